"""cpu/setup.sh: what it says when something is missing, and that it does nothing when nothing is to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_TOOLS = "bash dirname sha256sum uname mkdir df awk grep tail sleep sed cp cat chmod env find mktemp rm".split()
SYSTEM_TOOLS += ["timeout", "touch"]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Return a copy of what the script reads, with a bin folder that holds the system's tools but no Python."""
    (tmp_path / "cpu").mkdir()
    for name in ("setup.sh", "requirements-verl.lock", "requirements-gym.lock"):
        shutil.copy(ROOT / "cpu" / name, tmp_path / "cpu" / name)
    (tmp_path / "bin").mkdir()
    for tool in SYSTEM_TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def program(checkout: Path, path: str, body: str) -> Path:
    """Write an executable shell script and return its path."""
    file = checkout / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # a link to the real tool, perhaps
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return file


def setup(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [checkout / "cpu/setup.sh", *arguments],
        env={"PATH": str(checkout / "bin"), "HOME": str(checkout), **variables},
        capture_output=True,
        text=True,
        timeout=30,
    )


def fake_python(checkout: Path, path: str, version: str, pip: str = "exit 0") -> Path:
    """Write a Python that knows its version, makes empty environments, and does `pip` when it is asked for pip."""
    body = f"""case "$*" in
  *version_info*) echo "{version} $0" ;;
  *ensurepip*) exit 0 ;;
  *"-m venv"*) for venv; do :; done; mkdir -p "$venv/bin"; cp "$0" "$venv/bin/python" ;;
  *"-m pip install"*) {pip} ;;
  *) exit 0 ;;
esac"""
    return program(checkout, path, body)


def stamp(checkout: Path, venv: str, lock: str) -> None:
    """Mark an environment as made from this lock file and this script."""
    program(checkout, f"{venv}/bin/python", "exit 1")
    sums = subprocess.run(["sha256sum", lock, "cpu/setup.sh"], cwd=checkout, capture_output=True, text=True, check=True)
    (checkout / venv / ".setup-stamp").write_text(sums.stdout)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpu"], "unknown part 'gpu'; one of: all, verl, gym, test"),
        (["verl", "gym"], "one part at a time; got: verl gym"),
    ],
)
def test_wrong_arguments_are_one_clear_line(checkout, arguments, says):
    result = setup(checkout, *arguments)
    assert (result.returncode, result.stderr) == (1, f"setup: error: {says}\n")


def test_without_a_python_it_says_which_are_needed_and_what_it_found(checkout):
    fake_python(checkout, "bin/python3", "3.13")
    # On PATH, but nothing behind it: what a version manager's shim is.
    program(checkout, "bin/python3.11", "echo 'python3.11: command not found' >&2; exit 127")
    result = setup(checkout, "verl")
    assert result.returncode == 1
    assert "Python 3.11 or 3.12 is needed (found: python3=3.13); install one, or name it: PYTHON=" in result.stderr


def test_a_python_asked_for_by_name_is_never_replaced(checkout):
    fake_python(checkout, "bin/python3.11", "3.11")
    result = setup(checkout, "verl", PYTHON=str(fake_python(checkout, "other/python3.13", "3.13")))
    assert result.returncode == 1
    assert f"found: {checkout}/other/python3.13=3.13)" in result.stderr


def test_a_failing_pip_is_told_with_its_error_and_the_log(checkout):
    fake_python(
        checkout, "bin/python3.12", "3.12", pip='echo "ERROR: No matching distribution found for torch"; exit 1'
    )
    result = setup(checkout, "verl")
    assert result.returncode == 1
    assert "ERROR: No matching distribution found for torch" in result.stderr
    assert "failed (exit 1); the whole output is in runs/setup/verl.log" in result.stderr
    assert not (checkout / ".venv/.setup-stamp").exists()


def test_a_cuda_build_of_torch_is_told_and_gets_its_libraries(checkout):
    fake_python(checkout, "bin/python3.11", "3.11", pip='case "$*" in *-r*) echo "ERROR: enough"; exit 1 ;; esac')
    program(checkout, "bin/uname", '[ "$1" = -m ] && echo x86_64 || echo Linux')
    result = setup(checkout, "verl")  # the stand-in for Python names no version of torch, so none that ends in +cpu
    assert "only the CUDA build of torch" in result.stdout and "PIP_EXTRA_INDEX_URL" in result.stdout
    installed = [line for line in (checkout / "runs/setup/verl.log").read_text().splitlines() if line.startswith("$")]
    assert "--no-deps torch==" in installed[1]
    assert "torch==" in installed[2] and "--no-deps" not in installed[2]


def test_nothing_is_done_when_nothing_is_to_do(checkout):
    stamp(checkout, ".venv", "cpu/requirements-verl.lock")
    stamp(checkout, ".venv-gym", "cpu/requirements-gym.lock")
    browser = program(checkout, "bin/browser", "exit 1")
    (checkout / ".venv-gym/pw-browsers").mkdir()
    (checkout / ".venv-gym/pw-browsers/CHROMIUM").write_text(f"{browser}\n")
    result = setup(checkout, "all")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("changed", ["cpu/requirements-verl.lock", "cpu/setup.sh"])
def test_a_changed_lock_file_or_script_sets_up_again(checkout, changed):
    stamp(checkout, ".venv", "cpu/requirements-verl.lock")
    with (checkout / changed).open("a") as file:
        file.write("# changed\n")
    result = setup(checkout, "verl")  # no Python in this checkout: it gets as far as looking for one
    assert result.returncode == 1
    assert "Python 3.11 or 3.12 is needed" in result.stderr


def test_a_browser_that_is_gone_is_looked_for_again(checkout):
    stamp(checkout, ".venv-gym", "cpu/requirements-gym.lock")
    (checkout / ".venv-gym/pw-browsers").mkdir()
    (checkout / ".venv-gym/pw-browsers/CHROMIUM").write_text("/no/such/browser\n")
    result = setup(checkout, "gym", CHROMIUM="/no/such/browser")
    assert result.returncode == 1
    assert "CHROMIUM=/no/such/browser is not an executable file" in result.stderr


def gym_checkout(checkout: Path, user_id: int) -> None:
    """Make .venv-gym current but without a browser, and the user that user id."""
    stamp(checkout, ".venv-gym", "cpu/requirements-gym.lock")
    install = "mkdir -p $PLAYWRIGHT_BROWSERS_PATH/c; cp bin/a-browser $PLAYWRIGHT_BROWSERS_PATH/c/chrome-headless-shell"
    body = f"""case "$*" in *"playwright install"*) {install} ;; *) echo 1234 ;; esac"""
    program(checkout, ".venv-gym/bin/python", body)
    program(checkout, "bin/id", f"echo {user_id}")
    program(checkout, "bin/a-browser", 'echo "<p>up $*"')


def wrappers(checkout: Path) -> list[Path]:
    return sorted(path for path in (checkout / ".venv-gym/pw-browsers").rglob("*") if os.access(path, os.X_OK))


def run(wrapper: Path, **variables: str) -> str:
    command = [wrapper, "--remote-debugging-pipe"]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("user_id", "apt_cache", "becomes"),
    [
        (0, "exit 0", "bin/chromium-headless-shell"),
        (0, "exit 100", "bin/chromium"),
        (1000, "exit 100", ".venv-gym/pw-download/c/chrome-headless-shell"),
    ],
    ids=["root, Debian has the small build", "root, only the full build", "no root: Playwright's own"],
)
def test_a_missing_browser_is_installed_and_put_where_playwright_looks(checkout, user_id, apt_cache, becomes):
    gym_checkout(checkout, user_id)
    program(checkout, "bin/apt-cache", apt_cache)
    program(
        checkout,
        "bin/apt-get",
        f'for name; do :; done; [ "$1" = update ] || cp {checkout}/bin/a-browser {checkout}/bin/"$name"',
    )
    result = setup(checkout, "gym")
    assert result.returncode == 0, result.stderr
    assert f"the environment server will use {checkout / becomes}" in result.stdout
    files = [path for path in wrappers(checkout) if path.is_file()]
    assert [str(path.relative_to(checkout / ".venv-gym/pw-browsers")) for path in files] == [
        "chromium-1234/chrome-linux/chrome",
        "chromium-1234/chrome-linux64/chrome",
        "chromium_headless_shell-1234/chrome-headless-shell-linux64/chrome-headless-shell",
        "chromium_headless_shell-1234/chrome-linux/headless_shell",
    ]
    for wrapper in files:
        assert "--headless --no-sandbox" in run(wrapper) and "--remote-debugging-pipe" in run(wrapper)
    assert run(files[0], GYM_CHROMIUM="/bin/echo").startswith("--headless")
    assert setup(checkout, "gym").stdout == ""


def test_a_browser_that_does_not_start_is_refused(checkout):
    gym_checkout(checkout, 0)
    broken = program(checkout, "bin/chromium", "echo 'libnss3.so: cannot open shared object file' >&2; exit 127")
    result = setup(checkout, "gym")
    assert result.returncode == 1
    assert f"the browser {broken} does not start: libnss3.so: cannot open" in result.stderr
    assert not (checkout / ".venv-gym/pw-browsers/CHROMIUM").exists()


def test_the_script_is_executable():
    assert os.access(ROOT / "cpu/setup.sh", os.X_OK)
    assert os.access(ROOT / ".ci/run", os.X_OK)
