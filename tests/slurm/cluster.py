"""A real Slurm cluster on this machine: a controller and three nodes, each in Linux namespaces of its own.

A node has its own host name, address, process table, /dev/shm and /tmp/ray; the rest of the file system is shared, as
on a cluster with a network file system. Nothing inside reaches a network outside. Partitions: `train` (node1, node2,
16 CPUs and one pretended GPU each), `urgent` (the same nodes, preempts `train`) and `cpu` (node3, no GPU).

Not as on a real cluster: there are no cgroups, so a process that starts a session of its own outlives its job; no
database, so `sacct` knows nothing.
"""

import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cpu.processes import kill_all, parents

HERE = Path(__file__).parent
NODES = {"node1": "10.77.0.11", "node2": "10.77.0.12", "node3": "10.77.0.13"}
ENDED_STATES = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
OWN_SCRIPTS = frozenset(str(HERE / name) for name in ("controller.sh", "start_node.sh", "node.sh"))
DAEMONS = frozenset(["unshare", "slurmctld", "slurmscriptd", "slurmd"])  # as in /proc/PID/comm
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Variables by which Slurm's commands take options; a test run that is itself a job would hand its own on.
SLURM_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SINFO_")
LIMIT_S = 30.0
POLL_S = 0.1
LOG_TAIL_LINES = 30
NEEDS = (
    "the cluster needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged), a kernel with veth and"
    " bridge devices, and what tests/slurm/setup.sh installs"
)


class ClusterError(RuntimeError):
    """The cluster could not be started, or one of its commands failed; the text says which and what it said."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended: Slurm's state, the batch script's exit code, the signal that ended it or 0, and its restarts."""

    state: str
    exit_code: int
    signal: int
    restarts: int


class SlurmCluster:
    """Three nodes and a controller, from the start of a `with` block to its end."""

    def __init__(self, folder: Path, *, pyxis: bool = False):
        """Keep all of the cluster's files under this folder; with `pyxis`, take pyxis' options (see its stand-in)."""
        self.folder = folder.resolve()
        self._pyxis = pyxis
        self._unshare: subprocess.Popen | None = None
        self._init_pid: int | None = None

    def __enter__(self) -> "SlurmCluster":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- start and stop -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Return when all nodes are idle. Raises ClusterError with the end of every log, and leaves nothing running."""
        if os.geteuid() != 0:
            raise ClusterError(f"not root: {NEEDS}")
        self._write_folder()
        command = ["setpriv", "--pdeathsig", "KILL"]  # a killed test run takes the cluster with it
        command += "unshare --net --mount --pid --uts --ipc --fork --kill-child --mount-proc".split()
        command += [HERE / "controller.sh", self.folder, *(f"{name}={address}" for name, address in NODES.items())]
        try:
            with (self.folder / "log/controller.out").open("wb") as log:
                self._unshare = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
                    cwd="/",
                    start_new_session=True,
                )
            self._wait_for_nodes()
        except BaseException as error:  # a Ctrl-C while waiting must not leave the namespaces behind either
            logs = self.log_tails()
            self.stop()
            if isinstance(error, ClusterError | OSError):
                raise ClusterError(f"the Slurm cluster did not start: {error}; {NEEDS}\n{logs}") from error
            raise

    def stop(self) -> None:
        """End everything inside and return when it is gone; after a failed or no start there may be nothing to do."""
        unshare, self._unshare = self._unshare, None
        if unshare is None:
            return
        inside = [pid for pid, parent in parents().items() if parent == unshare.pid]
        # The end of a PID namespace's first process comes after the end of all others in it.
        watched = [os.pidfd_open(pid) for pid in inside]
        kill_all([unshare.pid, *inside])
        unshare.wait()
        try:
            for descriptor in watched:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                if not poll.poll(10_000):
                    raise ClusterError(f"processes of the cluster in {self.folder} do not end, even killed")
        finally:
            for descriptor in watched:
                os.close(descriptor)

    def log_tails(self) -> str:
        """Return the last lines of each log of the daemons."""
        parts = []
        for log in sorted((self.folder / "log").glob("*")):
            lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            parts += [f"--- {log}", *lines]
        return "\n".join(parts)

    def _write_folder(self) -> None:
        if (self.folder / "etc").exists():
            raise ClusterError(f"{self.folder} has held a cluster before; give it a new folder")
        for name in ("lib/state", "log", *(f"lib/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        shutil.copytree(HERE / "etc", self.folder / "etc")
        plugins = ""
        if self._pyxis:
            library = self.folder / "etc/pyxis_stand_in.so"
            compiler = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, HERE / "pyxis_stand_in.c"]
            built = subprocess.run(compiler, capture_output=True, text=True, timeout=60)
            if built.returncode:
                raise ClusterError(f"pyxis_stand_in.c does not compile: {built.stderr}")
            plugins = f"required {library}\n"
        (self.folder / "etc/plugstack.conf").write_text(plugins)

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not (self.folder / "namespaces-are-ready").exists():
            self._require_running()
            if time.monotonic() > deadline:
                raise ClusterError(f"the namespaces were not set up within {LIMIT_S:g} s")
            time.sleep(POLL_S)
        [self._init_pid] = [pid for pid, parent in parents().items() if parent == self._unshare.pid]
        self.wait_until_idle(*NODES)

    def _require_running(self) -> None:
        if self._unshare is None:
            raise ClusterError("the cluster is not running")
        if (code := self._unshare.poll()) is not None:
            raise ClusterError(f"the cluster's namespaces ended with exit code {code}")

    # --- commands -----------------------------------------------------------------------------------------------------

    def run(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 30.0,
        node: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Return what the command answered, run beside the controller as a user's shell would, or on a node.

        `env` is added to this process's own variables. Raises subprocess.TimeoutExpired; the command is then dead.
        """
        return subprocess.run(
            self._inside(command, cwd, node),
            env={**self._environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def spawn(self, *command: str | Path, log: Path, cwd: Path | None = None) -> subprocess.Popen:
        """Return the command as a process that runs beside the controller; it ends with this process at the latest."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self._inside(command, cwd, None),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _inside(self, command: tuple[str | Path, ...], cwd: Path | None, node: str | None) -> list[str]:
        enter = ["nsenter", f"--target={self._namespaces_of(node)}", *"--net --mount --pid --uts --ipc".split()]
        # nsenter can only start in `/` or in a folder that the namespace knows by no path: hence the shell's cd.
        enter += ["sh", "-c", 'cd "$0" && exec setpriv --pdeathsig KILL "$@"', str(cwd or Path.cwd())]
        return [*enter, *map(str, command)]

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(SLURM_PREFIXES)}
        return {**inherited, "PATH": f"{inherited.get('PATH', '')}:{SYSTEM_PATH}"}

    def submit(
        self,
        script: Path,
        *options: str,
        args: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> int:
        """Return the id of the job that sbatch made of the script. Raises ClusterError with what sbatch said."""
        said = self._client("sbatch", "--parsable", *options, script, *args, env=env, cwd=cwd)
        return int(said.split()[-1].partition(";")[0])

    def jobs(self, job_id: int) -> list[dict[str, str]]:
        """Return what the controller says of the job, one dictionary for each component of a heterogeneous one."""
        lines = self._client("scontrol", "show", "job", "--oneliner", str(job_id)).splitlines()
        return [dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=|$)", line)) for line in lines if line.strip()]

    def state(self, job_id: int) -> str:
        """Return the state of the job, or of the first component of a heterogeneous one."""
        return self.jobs(job_id)[0]["JobState"]

    def wait(self, job_id: int, timeout_s: float = 60.0, states: frozenset[str] = ENDED_STATES) -> JobResult:
        """Return the job's result once all its components are in one of the states. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            components = self.jobs(job_id)
            if all(component["JobState"] in states for component in components):
                code, _, number = components[0]["ExitCode"].partition(":")
                restarts = int(components[0]["Restarts"])
                return JobResult(components[0]["JobState"], int(code), int(number), restarts)
            if time.monotonic() > deadline:
                seen = [f"{c['JobState']} (Reason={c['Reason']})" for c in components]
                raise TimeoutError(
                    f"job {job_id} is {', '.join(seen)} after {timeout_s:g} s, not {'/'.join(sorted(states))};"
                    f" processes: {self.processes()}\n{self.log_tails()}"
                )
            time.sleep(POLL_S)

    def cancel(self, job_id: int, *options: str) -> None:
        """Return when scancel has told the controller; the job ends later."""
        self._client("scancel", *options, str(job_id))

    def cancel_all(self) -> None:
        """Cancel all jobs and return when none is left in the queue. Raises ClusterError after 30 s."""
        deadline = time.monotonic() + LIMIT_S
        while left := self._client("squeue", "--noheader", "--format=%i %T"):
            if time.monotonic() > deadline:
                raise ClusterError(f"jobs do not end, even cancelled: {left.split()}\n{self.log_tails()}")
            self._client("scancel", "--user=root")
            time.sleep(POLL_S)

    def processes(self) -> dict[int, str]:
        """Return {pid: command line} of all that runs inside besides the daemons; a job's slurmstepd counts.

        The pids are those of the controller's namespace, in which the processes of all nodes can be seen.
        """
        return {
            pid: " ".join(arguments)
            for pid, name, arguments in _processes(Path(f"/proc/{self._init_pid}/root/proc"))
            if name not in DAEMONS and OWN_SCRIPTS.isdisjoint(arguments[1:2])
        }

    # --- nodes --------------------------------------------------------------------------------------------------------

    def node_states(self) -> dict[str, str]:
        """Return {node: state}, as sinfo abbreviates it: idle, mix, alloc, drain, down, `*` for one that is silent."""
        answer = self.run("sinfo", "--noheader", "--Node", "--format=%N %t")
        return dict(line.split() for line in answer.stdout.splitlines())

    def wait_until_idle(self, *nodes: str) -> None:
        """Return when nothing runs on these nodes and they take jobs. Raises ClusterError after 30 s."""
        deadline = time.monotonic() + LIMIT_S
        while any((states := self.node_states()).get(node) != "idle" for node in nodes):
            self._require_running()
            if time.monotonic() > deadline:
                reasons = self._client("sinfo", "--list-reasons", "--noheader", "--format=%N: %E").strip()
                raise ClusterError(f"not all of {', '.join(nodes)} are idle after {LIMIT_S:g} s: {states}; {reasons}")
            time.sleep(POLL_S)

    def set_node(self, name: str, state: str) -> None:
        """Tell the controller that the node is in this state: drain, resume, down (which fails the jobs on it)."""
        self._client("scontrol", "update", f"NodeName={name}", f"State={state}", "Reason=test")

    def kill_node(self, name: str) -> None:
        """Kill all that runs on the node at once, its daemon among it, as a loss of power would.

        The controller finds out after SlurmdTimeout (see slurm.conf), or is told with `set_node(name, "down")`.
        """
        self._client("kill", "-KILL", (self.folder / f"{name}.pid").read_text().strip())

    def start_node(self, name: str) -> None:
        """Start a killed node again; return when it is idle."""
        self._client("setsid", "--fork", HERE / "start_node.sh", self.folder, name)
        self.wait_until_idle(name)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _namespaces_of(self, node: str | None) -> int:
        """Return the pid, as this process sees it, whose namespaces are the node's, or the controller's for None."""
        self._require_running()
        if node is None:
            return self._init_pid
        wanted = [str(HERE / "node.sh"), str(self.folder), node]
        found = [pid for pid, _, arguments in _processes(Path("/proc")) if arguments[1:] == wanted]
        if not found:
            raise ClusterError(f"node {node} is not running")
        return found[0]

    def _client(self, *command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Return what the command printed. Raises ClusterError when it failed."""
        answer = self.run(*command, env=env, cwd=cwd)
        if answer.returncode:
            raise ClusterError(
                f"{' '.join(map(str, command))}: exit code {answer.returncode}: {answer.stderr.strip()}{answer.stdout}"
            )
        return answer.stdout


def _processes(proc: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (pid, name, arguments) of each living process in this /proc; zombies have no arguments and are left out."""
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name = (entry / "comm").read_text().strip()
            text = (entry / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        if text:
            yield int(entry.name), name, text.split("\0")
