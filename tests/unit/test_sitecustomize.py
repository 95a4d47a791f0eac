"""sitecustomize.py in real interpreters: its cost, what it chains to, what its errors do. None imports verl."""

import ast
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

REPORT = (
    "import json, sys\n"
    "hooks = [type(finder).__name__ for finder in sys.meta_path]\n"
    "print(json.dumps({'modules': sorted(sys.modules), 'hooks': hooks, 'trace': getattr(sys, 'trace', [])}))\n"
)
TRACE = "import sys\nsys.trace = [*getattr(sys, 'trace', []), {name!r}]\n"


def python(code: str, *path: Path | str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def report(*path: Path | str) -> dict:
    result = python(REPORT, *path)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def shadowed(folder: Path, name: str, code: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(TRACE.format(name=name) + code)
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with copies of the two files, for tests that break one."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("sitecustomize.py", "patches.py"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_an_interpreter_loads_two_modules_more_and_no_other():
    with_it, without = report(ROOT), report()
    assert set(with_it["modules"]) - set(without["modules"]) == {"sitecustomize", "patches"}
    assert with_it["hooks"] == ["_Hook", *without["hooks"]]


def test_it_costs_less_than_5_ms():
    def cost_us() -> int:
        lines = python("pass", ROOT, options=("-X", "importtime")).stderr.splitlines()
        (line,) = [line for line in lines if line.split("|")[-1].strip() == "sitecustomize"]
        return int(line.split("|")[1])

    assert statistics.median(cost_us() for _ in range(5)) < 5000


@pytest.mark.parametrize("name", ["sitecustomize.py", "patches.py"])
def test_what_every_interpreter_reads_is_python_3_8(name):
    ast.parse((ROOT / name).read_text(), feature_version=(3, 8))


def test_the_sitecustomize_that_it_shadows_runs_as_python_itself_would_run_it(tmp_path):
    other = shadowed(tmp_path / "other", "other", "sys.trace += [__name__, __file__]\n")
    assert report(ROOT, other)["trace"] == ["other", "sitecustomize", str(other / "sitecustomize.py")]
    result = python("import sitecustomize; print(sitecustomize.sys.trace[0])", ROOT, other)
    assert result.stdout == "other\n"


def test_a_shadowed_package_runs_too(tmp_path):
    package = shadowed(tmp_path / "sitecustomize", "package", "from sitecustomize import part\n")
    (package / "sitecustomize.py").rename(package / "__init__.py")
    (package / "part.py").write_text(TRACE.format(name="part"))
    assert report(ROOT, tmp_path)["trace"] == ["package", "part"]


def test_only_the_next_one_runs(tmp_path):
    first, second = (shadowed(tmp_path / name, name) for name in ("first", "second"))
    assert report(ROOT, first, second)["trace"] == ["first"]


def test_one_that_stands_before_it_is_not_run_again(tmp_path):
    # It chains to the next on the path by itself, as this recipe's does.
    chain = f"import runpy; runpy.run_path({str(ROOT / 'sitecustomize.py')!r})\n"
    first = shadowed(tmp_path / "first", "first", chain)
    got = report(first, ROOT)
    assert got["trace"] == ["first"]
    assert got["hooks"].count("_Hook") == 1


@pytest.mark.parametrize("again", ["same", "symlink", "trailing slash"])
def test_the_folder_twice_on_the_path_runs_it_once(tmp_path, again):
    link = tmp_path / "link"
    link.symlink_to(ROOT)
    twice = {"same": ROOT, "symlink": link, "trailing slash": f"{ROOT}/"}[again]
    other = shadowed(tmp_path / "other", "other")
    got = report(ROOT, twice, other)
    assert got["trace"] == ["other"]
    assert got["hooks"].count("_Hook") == 1


def test_a_shadowed_one_that_chains_back_to_this_folder_ends(tmp_path):
    chain = f"import runpy\nif len(sys.trace) < 5:\n    runpy.run_path({str(ROOT / 'sitecustomize.py')!r})\n"
    other = shadowed(tmp_path / "other", "other", chain)
    assert report(ROOT, other, ROOT)["trace"] == ["other"]


def test_an_error_in_the_shadowed_one_is_reported_and_the_hook_is_in_place(tmp_path):
    other = shadowed(tmp_path / "other", "other", "raise ValueError('not mine')\n")
    result = python("import patches; patches.require_applied(); print('goes on')", ROOT, other)
    assert (result.returncode, result.stdout) == (0, "goes on\n")
    assert "Error in sitecustomize" in result.stderr and "not mine" in result.stderr


@pytest.mark.parametrize(
    ("broken", "said"),
    [("raise ImportError('no file')\n", "no file"), ("this is no Python\n", "SyntaxError"), ("", "install")],
    ids=["import fails", "syntax error", "another patches.py"],
)
def test_an_error_in_it_breaks_neither_the_interpreter_nor_the_shadowed_one(copy, tmp_path, broken, said):
    (copy / "patches.py").write_text(broken)
    other = shadowed(tmp_path / "other", "other")
    result = python("import sys; print(sys.trace)", copy, other)
    assert (result.returncode, result.stdout) == (0, "['other']\n")
    assert "Error in sitecustomize" in result.stderr and said in result.stderr


def test_an_error_in_it_keeps_the_recipe_from_training(copy):
    with (copy / "sitecustomize.py").open("r+") as file:
        code = file.read().replace("patches.install()", "raise OSError('disk')")
        file.seek(0)
        file.truncate()
        file.write(code)
    result = python("import patches; patches.require_applied()", copy)
    assert result.returncode == 1
    assert "patches.PatchError: Refusing to train" in result.stderr
    assert f"Start Python with {copy} on PYTHONPATH" in result.stderr


def test_where_it_never_ran_the_recipe_refuses_to_train():
    result = python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); import patches; patches.require_applied()")
    assert result.returncode == 1
    assert "the import hook is not installed in this process" in result.stderr


@pytest.mark.parametrize(("set_before", "level"), [(None, "WARNING"), ("DEBUG", "DEBUG")])
def test_warnings_are_seen_although_vllm_is_imported(set_before, level):
    """Its dependency sets the root logger to ERROR on import unless this variable says otherwise."""
    code = "import logging, model_hosting_container_standards.logging_config\n"
    code += "print(logging.getLevelName(logging.root.level))"
    environment = {key: value for key, value in os.environ.items() if "LOG_LEVEL" not in key} | {
        "PYTHONPATH": str(ROOT)
    }
    environment |= {"SAGEMAKER_CONTAINER_LOG_LEVEL": set_before} if set_before else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/")
    assert done.stdout.splitlines()[-1:] == [level], done.stderr
