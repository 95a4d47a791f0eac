"""tests/slurm/setup.sh: what it installs, what it says when it can not, and that it leaves a ready machine alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tests/slurm/setup.sh"
SYSTEM_TOOLS = "bash cat dirname mktemp rm sort".split()
NEEDED_COMMANDS = "slurmctld slurmd sbatch ip unshare nsenter setpriv".split()
ALL_PACKAGES = "gcc iproute2 libc6-dev libslurm-dev slurm-client slurmctld slurmd util-linux"


class Machine:
    """A bin folder with the system's tools and stand-ins for what the script looks for and calls."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in SYSTEM_TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.program("uname", "echo Linux")
        self.program("id", "echo 0")

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def compiler(self, without: str = "no-header-at-all") -> None:
        """Add a gcc that finds every header but this one."""
        self.program("gcc", f'source=$(cat); [[ $source != *"{without}"* ]]')

    def setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # The script adds the folders where Debian keeps slurmctld: here they must not show this machine's own.
        text = SCRIPT.read_text().replace("PATH=$PATH:/usr/sbin:/sbin", "")
        assert text != SCRIPT.read_text()
        script = self.bin.parent / "setup.sh"
        script.write_text(text)
        return subprocess.run(
            [self.bin / "bash", script, *arguments],
            env={"PATH": str(self.bin)},
            capture_output=True,
            text=True,
            timeout=30,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def with_everything(machine: Machine) -> None:
    for name in NEEDED_COMMANDS:
        machine.program(name, "exit 1")
    machine.compiler()


def test_nothing_is_done_when_everything_is_there(machine):
    with_everything(machine)
    machine.program("apt-get", "echo 'apt-get was called' >&2; exit 1")
    result = machine.setup()
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("taken", "without_header", "package"),
    [
        ("slurmctld", "", "slurmctld"),
        ("sbatch", "", "slurm-client"),
        ("ip", "", "iproute2"),
        ("setpriv", "", "util-linux"),
        (None, "slurm/spank.h", "libslurm-dev"),
        (None, "stdlib.h", "libc6-dev"),
    ],
)
def test_what_is_missing_is_installed_by_root(machine, taken, without_header, package):
    with_everything(machine)
    if taken:
        (machine.bin / taken).unlink()
    else:
        machine.compiler(without=without_header)
    # Installing makes all that is looked for appear.
    apt = f"""echo "$*" >> {machine.bin}/../apt.log
[[ $* == *" install "* ]] || exit 0
for name in {" ".join(NEEDED_COMMANDS)} gcc; do cp {machine.bin}/good {machine.bin}/$name; done"""
    machine.program("good", "cat >/dev/null")  # as the compiler it must read its input: the writer would fail
    (machine.bin / "cp").symlink_to(shutil.which("cp"))
    machine.program("apt-get", apt)
    result = machine.setup()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"setup: installing {package}\n"
    update, install = (machine.bin.parent / "apt.log").read_text().splitlines()
    assert update.endswith(" update")
    assert install.endswith(f" install -y --no-install-recommends {package}")


@pytest.mark.parametrize("lacks", ["root", "apt"])
def test_who_can_not_install_is_told_what_is_missing(machine, lacks):
    if lacks == "root":
        machine.program("id", "echo 1000")
        machine.program("apt-get", "exit 0")
    result = machine.setup()
    assert result.returncode == 1
    assert result.stderr == (
        f"tests/slurm/setup.sh: error: missing: {ALL_PACKAGES} (Debian's names); install them, or run this as root on a"
        " system with apt\n"
    )


@pytest.mark.parametrize(
    ("apt", "says"),
    [
        (
            "echo 'E: no such package'; exit 100",
            "E: no such package\ntests/slurm/setup.sh: error: apt could not install",
        ),
        ("exit 0", f"tests/slurm/setup.sh: error: still missing after apt installed it: {ALL_PACKAGES}"),
    ],
    ids=["apt fails", "apt installs something else"],
)
def test_a_failed_installation_is_told(machine, apt, says):
    machine.program("apt-get", apt)
    result = machine.setup()
    assert result.returncode == 1
    assert result.stderr.startswith(says)


@pytest.mark.parametrize(
    ("arguments", "system", "says"),
    [
        (["all"], "Linux", "takes no arguments; got: all"),
        ([], "Darwin", "the cluster of the tests is made of Linux namespaces; this is Darwin"),
    ],
)
def test_wrong_use_is_one_clear_line(machine, arguments, system, says):
    machine.program("uname", f"echo {system}")
    result = machine.setup(*arguments)
    assert (result.returncode, result.stderr) == (1, f"tests/slurm/setup.sh: error: {says}\n")
