"""Installs the import hook of patches.py in every Python process that has this folder on PYTHONPATH.

Python imports the first `sitecustomize` on its path only, so this one also runs the next one after it. An error here
is printed by Python as 'Error in sitecustomize' and the program goes on; patches.require_applied then refuses to train.
Everything that runs Python reads this file, pip and ray included: it must stay cheap and import neither torch nor verl.
"""

import os
import sys

_RAN = "_verl_browser_recipe_sitecustomize_ran"


def _run_shadowed() -> None:
    """Run the next `sitecustomize` after this folder on `sys.path`, if there is one, as Python itself would have."""
    here = os.path.realpath(os.path.dirname(os.path.abspath(__file__)))
    folders = [os.path.realpath(entry) for entry in sys.path]
    if here not in folders:
        return
    later = [sys.path[i] for i in range(folders.index(here), len(folders)) if folders[i] != here]
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec("sitecustomize", later) if find_spec else None
        if spec is not None and spec.loader is not None:
            # By hand: importlib.util would cost every process more than all else here.
            module = type(sys)(spec.name)
            module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
            if spec.submodule_search_locations is not None:
                module.__path__ = spec.submodule_search_locations
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return


# vLLM imports a package that silences the whole process below ERROR unless this says otherwise (logging_config.py of
# model_hosting_container_standards 0.1.16): warnings of the sampler and the agent loop would never be seen.
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")

try:
    import patches

    patches.install()
finally:
    # Once per process: the shadowed one may chain to the next on the path too, which can be this folder again.
    if not hasattr(sys, _RAN):
        setattr(sys, _RAN, True)
        _run_shadowed()
