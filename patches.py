"""The recipe's patches of verl: import hook, state, and the check; run as a program, a line per patch.

    python patches.py --check [--json]    exit 0: every patch is applied or not needed; 1: one is not; 2: wrong usage

verl's trainers compute advantages without the flags of invalid rollouts, and cut mini-batches by the number of rows.
`install` puts an import hook in place that patches the modules in TARGETS right after each has run; sitecustomize.py
calls it at interpreter start. Nothing here makes `import verl` fail: what cannot be patched is recorded, and
`require_applied` refuses to train.

What is replaced, and by what, is in verl_patches.py and verl_mini_batches.py. This file is read by every Python process
that has the folder on its path, so it imports nothing that an interpreter has not loaded by itself.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from patching import PatchRecord

TARGETS = ("verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base")
"""Modules of verl that the hook waits for."""

FOLDER = os.path.dirname(os.path.abspath(__file__))

_records: dict[str, "tuple[PatchRecord, ...]"] = {}
"""What became of the patches of each module that has been loaded."""

_failures: dict[str, str] = {}
"""Why no patch of a module could even be tried, by module."""


class PatchError(RuntimeError):
    """The patches are not in place, so training must not start. The message says why and what to do."""


class _Hook:
    """Finder at the head of `sys.meta_path` that lets the other finders find a target and then patches it."""

    def find_spec(self, fullname, path=None, target=None):
        """Return the spec of a module in TARGETS with a loader that patches it; None for every other module."""
        if fullname not in TARGETS:
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader)
                return spec
        return None


class _PatchingLoader:
    """A loader that runs a module through its own loader, then patches it."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        """Return what the module's own loader creates."""
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        """Run the module, then patch it."""
        # inspect, pickle and importlib.resources ask the module for its loader: they get its own.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _apply(module)


_HOOK = _Hook()


def install() -> None:
    """Put the import hook in place and patch the targets that are imported already. A second call does nothing."""
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)
    for name in TARGETS:
        module = sys.modules.get(name)
        if module is None or name in _records:
            continue
        # A module that is still running has not defined what is to be replaced; require_applied reports it.
        if not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _apply(module)


def require_applied() -> None:
    """Raise PatchError, with the fix, unless the patches are in place or will be once the trainer is imported."""
    problems = _problems()
    if problems:
        raise PatchError(
            "Refusing to train: verl would let invalid rollouts vote in the GRPO baseline, or the number of rows decide"
            " how many optimizer steps a batch gets.\n"
            + "".join(f"  - {problem}\n" for problem in problems)
            + f"Check with: python {os.path.join(FOLDER, 'patches.py')} --check"
        )


def _problems() -> list[str]:
    """Return what stands between this process and patched trainers, a sentence each with its fix."""
    start_early = (
        f"Start Python with {FOLDER} on PYTHONPATH, in Ray's workers too (runtime_env.env_vars.PYTHONPATH), so that "
        "sitecustomize.py runs; a line 'Error in sitecustomize' on stderr says why it did not"
    )
    loaded = [name for name in TARGETS if name in sys.modules]
    problems = []
    if len(loaded) < len(TARGETS) and _HOOK not in sys.meta_path:
        problems.append(f"the import hook is not installed in this process. {start_early}.")
    for name in loaded:
        if name in _failures:
            problems.append(f"{name}: {_failures[name]}")
        elif name not in _records:
            problems.append(f"{name} was imported before the import hook was installed. {start_early}.")
        else:
            problems += [record.text for record in _records[name] if record.refused]
            problems += _undone(sys.modules[name])
    return problems


def _undone(module: "ModuleType") -> list[str]:
    """Return the applied patches of a module that something has replaced since, a sentence each."""
    from patching import is_in_place

    gone = [
        record.target
        for record in _records[module.__name__]
        if record.applied and record.target.startswith(module.__name__) and not is_in_place(module, record.target)
    ]
    return [
        f"{target} was patched, and something has replaced it since. Train without the other patch." for target in gone
    ]


def _apply(module: "ModuleType") -> None:
    """Patch a module that has run, and record what became of it."""
    name = module.__name__
    _failures.pop(name, None)
    _records.pop(name, None)
    try:
        import verl_patches

        _records[name] = verl_patches.apply(module)
    except Exception as error:  # noqa: BLE001 - importing verl must not fail for programs that do not train this recipe
        _failures[name] = (
            f"applying the patches failed with {type(error).__name__}: {error}. "
            "Install the release of verl that REQUIRED_VERL.txt pins, and use a complete checkout of this recipe."
        )


def check() -> "list[PatchRecord]":
    """Return what became of every patch, after importing every target."""
    import contextlib
    import importlib

    import verl_patches

    install()
    for name in TARGETS:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout belongs to the result
                importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever verl's import raises is the answer
            _failures[name] = (
                f"importing it failed with {type(error).__name__}: {error}. "
                "Install verl as REQUIRED_VERL.txt says, with the Python that will train."
            )
    records = []
    for name in TARGETS:
        if name in _failures:
            records += verl_patches.refuse_all(name, _failures[name])
        else:
            records += _records[name]
    return records


def main(argv: "list[str] | None" = None) -> int:
    """Print a line per patch. Return 0 when each is applied or not needed, else 1."""
    import argparse
    import json

    parser = argparse.ArgumentParser(prog="patches.py", description="Say for each patch of verl what became of it.")
    parser.add_argument("--check", action="store_true", required=True, help="import verl's trainers and check")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line per patch")
    arguments = parser.parse_args(argv)
    at_start = _HOOK in sys.meta_path
    records = check()
    ok = not any(record.refused for record in records)
    if arguments.json:
        answer = {"ok": ok, "hook_at_interpreter_start": at_start, "patches": [record.as_json() for record in records]}
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        sys.stdout.writelines(f"{record.text}\n" for record in records)
        if not at_start:
            sys.stdout.write(f"note: this Python did not run sitecustomize.py; training needs PYTHONPATH={FOLDER}\n")
    return 0 if ok else 1


if __name__ == "__main__":
    import patches  # the state lives in the module of this name, not in __main__

    sys.exit(patches.main())
