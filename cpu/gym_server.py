"""NeMo Gym's real `interactive_browser` server, started and stopped as a subprocess: no Ray, no head server.

python -m cpu.gym_server --port 18080 [--log runs/gym.log]      runs until Ctrl-C or TERM
"""

import argparse
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from omegaconf import OmegaConf

from cpu.processes import ProcessError, ProcessTree, command_line, require_free_port, wait_until_answers

REPO_ROOT = Path(__file__).resolve().parent.parent
GYM_VENV = REPO_ROOT / ".venv-gym"
BROWSERS_DIR = GYM_VENV / "pw-browsers"
"""What PLAYWRIGHT_BROWSERS_PATH must name for the default environment's Playwright."""
CONFIG = REPO_ROOT / "configs" / "interactive_browser.yaml"


class GymServer:
    """The environment server on one port. Stopping it ends its browsers too, also those it no longer knows.

    Use as a context manager, or call start() and stop().
    """

    def __init__(
        self,
        port: int,
        log_path: Path,
        chromium: str | None = None,
        *,
        host: str = "127.0.0.1",
        gym_venv: Path | None = None,
        dies_with_parent: bool = False,
    ):
        """Prepare a server; nothing starts yet.

        `chromium` overrides the browser that cpu/setup.sh found; `host` is the address to listen on; `gym_venv` the
        Python environment with NeMo Gym (default: this checkout's .venv-gym); `dies_with_parent`: see ProcessTree.
        """
        self.port = port
        self.log_path = Path(log_path)
        self.chromium = chromium
        self.host = host
        # Absolute, as the server runs in another folder; resolve() would leave the environment for its base Python.
        self.gym_venv = Path(gym_venv or GYM_VENV).absolute()
        self.dies_with_parent = dies_with_parent
        self._tree: ProcessTree | None = None

    @property
    def url(self) -> str:
        """The server's address on this machine, without a trailing slash (Linux takes 0.0.0.0 for this machine)."""
        return f"http://{self.host}:{self.port}"

    @property
    def health_url(self) -> str:
        """The address that a server whose event loop runs answers at once, without a session."""
        return f"{self.url}/healthz"

    @property
    def pid(self) -> int | None:
        """The server's own process id; None before start()."""
        return self._tree.pid if self._tree else None

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        return self._tree is not None and self._tree.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the server's process, negative for a signal; None while it runs and before it started."""
        return self._tree.exit_code if self._tree else None

    def start(self, timeout_s: float = 90.0) -> None:
        """Return when the server answers. Raises ProcessError: port in use, missing part, or the log's last lines."""
        self.launch()
        try:
            wait_until_answers(self._tree, self.health_url, timeout_s)
        except BaseException:  # a Ctrl-C while waiting must not leave the server behind either
            self.kill()
            raise

    def require_startable(self) -> None:
        """Return nothing when the server could be started; otherwise raise ProcessError: missing part, port in use."""
        if self.running:
            raise ProcessError(f"the environment server on port {self.port} is running already")
        require_free_port(self.port, "the environment server", self.host)
        if not self._python.exists():
            raise ProcessError(f"the environment server is not installed ({self.gym_venv} is missing); run: make setup")
        self._require_browser()
        _site_packages(self.gym_venv)

    def launch(self) -> None:
        """Start the server's process without waiting for an answer. Raises ProcessError as require_startable does."""
        self.require_startable()
        site_packages = _site_packages(self.gym_venv)
        server_dir = site_packages / "resources_servers/interactive_browser"
        env = {
            **os.environ,
            "NEMO_GYM_CONFIG_PATH": "interactive_browser",
            # Without it, the server's entry point would ask a head server, which isn't there.
            "NEMO_GYM_CONFIG_DICT": self._config(),
            "PLAYWRIGHT_BROWSERS_PATH": str(self.gym_venv / "pw-browsers"),
            "PYTHONPATH": f"{server_dir}{os.pathsep}{site_packages}",
            "PYTHONUNBUFFERED": "1",
            # Each session starts a Playwright driver of its own; compiling its JavaScript is a quarter of that start.
            "NODE_COMPILE_CACHE": str(self.gym_venv / "node-compile-cache"),
        }
        if self.chromium:
            env["GYM_CHROMIUM"] = self.chromium
        self._tree = ProcessTree(
            "the environment server",
            [str(self._python), "app.py"],
            log_path=self.log_path,
            env=env,
            cwd=server_dir,
            dies_with_parent=self.dies_with_parent,
        )

    def log_tail(self) -> str:
        """Return the last lines of what the server has written since it was started, joined into one line."""
        return self._tree.log_tail() if self._tree else ""

    def stop(self, grace_s: float = 10.0) -> None:
        """End the server, letting it close its browsers; kill what is left. Does nothing when it isn't running."""
        if self._tree:
            self._tree.stop(grace_s)

    def kill(self) -> None:
        """Kill the server and its browsers at once, as a crash would."""
        if self._tree:
            self._tree.kill()

    def restart(self, timeout_s: float = 90.0) -> None:
        """Stop and start again on the same port; every open session is lost."""
        self.stop()
        self.start(timeout_s)

    def pids(self) -> list[int]:
        """Return every living process of the server: itself, Playwright's drivers, the browsers and their children."""
        return self._tree.pids() if self._tree else []

    def browser_pids(self) -> list[int]:
        """Return the main processes of the Chromiums that belong to this server, one for each open session."""
        return [pid for pid in self.pids() if _is_main_chromium(command_line(pid))]

    def __enter__(self) -> "GymServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _python(self) -> Path:
        return self.gym_venv / "bin/python"

    def _config(self) -> str:
        config = OmegaConf.load(CONFIG)
        server = config.interactive_browser.resources_servers.interactive_browser
        server.host, server.port = self.host, self.port
        return OmegaConf.to_yaml(config)

    def _require_browser(self) -> None:
        chosen = self.gym_venv / "pw-browsers/CHROMIUM"
        if not self.chromium and not chosen.exists():
            raise ProcessError("no browser is set up for the environment server; run: make setup")
        browser = self.chromium or chosen.read_text().strip()
        if not shutil.which(browser):
            raise ProcessError(f"the environment server's browser {browser} is missing; run: make setup")


def _is_main_chromium(line: str) -> bool:
    # Chromium's own children say what they are (--type=renderer), and Debian's chromium is a shell script that runs
    # the browser with the same arguments.
    return "--remote-debugging" in line and "--type=" not in line and not Path(line.split()[0]).name.endswith("sh")


def _site_packages(gym_venv: Path) -> Path:
    """Return the folder that NeMo Gym is installed in. Raises ProcessError when it isn't."""
    found = sorted(gym_venv.glob("lib/python3.*/site-packages/resources_servers/interactive_browser/app.py"))
    if not found:
        raise ProcessError(f"{gym_venv} holds no interactive_browser server; run: make setup")
    return found[0].parents[2]


def main(argv: list[str] | None = None) -> int:
    """Run a server until a signal comes; return the exit code: 0 stopped by a signal, 1 failed."""
    parser = argparse.ArgumentParser(prog="python -m cpu.gym_server", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True, help="TCP port on 127.0.0.1")
    parser.add_argument("--log", type=Path, default=Path("runs/gym_server.log"), help="server's output (appended)")
    parser.add_argument("--chromium", help="browser to use instead of the one that cpu/setup.sh found")
    arguments = parser.parse_args(argv)

    stop_requested = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop_requested.set())
    server = GymServer(arguments.port, arguments.log, arguments.chromium)
    try:
        server.start()
        print(f"environment server on {server.url} (log: {server.log_path}); Ctrl-C stops it", flush=True)
        while server.running and not stop_requested.wait(0.5):
            pass
        if not stop_requested.is_set():
            print(f"the environment server ended by itself (log: {server.log_path})", file=sys.stderr)
            return 1
        return 0
    except ProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
