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
CONFIG = REPO_ROOT / "configs" / "interactive_browser.yaml"


class GymServer:
    """The environment server on one port. Stopping it ends its browsers too, also those it no longer knows.

    Use as a context manager, or call start() and stop().
    """

    def __init__(self, port: int, log_path: Path, chromium: str | None = None):
        """Prepare a server; nothing starts yet. `chromium` overrides the browser that cpu/setup.sh found."""
        self.port = port
        self.log_path = Path(log_path)
        self.chromium = chromium
        self._tree: ProcessTree | None = None

    @property
    def url(self) -> str:
        """The server's address, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's own process id; None before start()."""
        return self._tree.pid if self._tree else None

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        return self._tree is not None and self._tree.exit_code is None

    def start(self, timeout_s: float = 90.0) -> None:
        """Return when the server answers. Raises ProcessError: port in use, missing part, or the log's last lines."""
        if self.running:
            raise ProcessError(f"the environment server on port {self.port} is running already")
        require_free_port(self.port, "the environment server")
        python = GYM_VENV / "bin/python"
        if not python.exists():
            raise ProcessError("the environment server is not installed (.venv-gym is missing); run: make setup")
        self._require_browser()
        site_packages = _site_packages(python)
        server_dir = site_packages / "resources_servers/interactive_browser"
        env = {
            **os.environ,
            "NEMO_GYM_CONFIG_PATH": "interactive_browser",
            # Without it, the server's entry point would ask a head server, which isn't there.
            "NEMO_GYM_CONFIG_DICT": self._config(),
            "PLAYWRIGHT_BROWSERS_PATH": str(BROWSERS_DIR),
            "PYTHONPATH": f"{server_dir}{os.pathsep}{site_packages}",
            "PYTHONUNBUFFERED": "1",
            # Each session starts a Playwright driver of its own; compiling its JavaScript is a quarter of that start.
            "NODE_COMPILE_CACHE": str(GYM_VENV / "node-compile-cache"),
        }
        if self.chromium:
            env["GYM_CHROMIUM"] = self.chromium
        self._tree = ProcessTree(
            "the environment server", [str(python), "app.py"], log_path=self.log_path, env=env, cwd=server_dir
        )
        try:
            wait_until_answers(self._tree, f"{self.url}/healthz", timeout_s)
        except BaseException:  # a Ctrl-C while waiting must not leave the server behind either
            self.kill()
            raise

    def stop(self) -> None:
        """End the server, letting it close its browsers; kill what is left. Does nothing when it isn't running."""
        if self._tree:
            self._tree.stop()

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

    def _config(self) -> str:
        config = OmegaConf.load(CONFIG)
        config.interactive_browser.resources_servers.interactive_browser.port = self.port
        return OmegaConf.to_yaml(config)

    def _require_browser(self) -> None:
        chosen = BROWSERS_DIR / "CHROMIUM"
        if not self.chromium and not chosen.exists():
            raise ProcessError("no browser is set up for the environment server; run: make setup")
        browser = self.chromium or chosen.read_text().strip()
        if not shutil.which(browser):
            raise ProcessError(f"the environment server's browser {browser} is missing; run: make setup")


def _is_main_chromium(line: str) -> bool:
    # Chromium's own children say what they are (--type=renderer), and Debian's chromium is a shell script that runs
    # the browser with the same arguments.
    return "--remote-debugging" in line and "--type=" not in line and not Path(line.split()[0]).name.endswith("sh")


def _site_packages(python: Path) -> Path:
    """Return the folder that NeMo Gym is installed in. Raises ProcessError when it isn't."""
    found = sorted(
        python.parent.parent.glob("lib/python3.*/site-packages/resources_servers/interactive_browser/app.py")
    )
    if not found:
        raise ProcessError(".venv-gym holds no interactive_browser server; run: make setup")
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
