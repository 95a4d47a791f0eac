"""A stand-in for NeMo Gym's server that breaks on demand: the `app.py` of an environment that stand_in_venv() makes.

GET /pid answers its process id, /browser starts a process that leaves it as a browser's helper may and answers that
one's id, /die ends it with exit code 3, /hang is the last that it answers; anything else is answered at once. How it
starts is read from the file START of its environment: `well`, `never` (no answer ever comes), `later` (once
the file GO-PORT appears beside it), or a number, with which it exits.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SLEEP = "import time; time.sleep(600)"
LEAVE = (
    "import subprocess, sys; n = subprocess.DEVNULL; "
    "print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=n, stderr=n).pid)"
)


def stand_in_venv(folder: Path) -> Path:
    """Return a new Python environment that GymServer takes, whose server is this file."""
    site_packages = folder / "lib/python3.11/site-packages"
    server = site_packages / "resources_servers/interactive_browser"
    server.mkdir(parents=True)
    (server / "app.py").symlink_to(Path(__file__).resolve())
    (folder / "bin").mkdir()
    # -S: without the packages of the tests' own environment it starts in a fifth of the time.
    (folder / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (folder / "bin/python").chmod(0o755)
    (folder / "pw-browsers").mkdir()
    (folder / "pw-browsers/CHROMIUM").write_text("/bin/true\n")
    (folder / "START").write_text("well")
    return folder


class Handler(BaseHTTPRequestHandler):
    """Answers one request; the server's `hangs` is an Event that is set once it hangs."""

    def do_GET(self) -> None:
        if self.path == "/hang":
            self.server.hangs.set()
        elif self.server.hangs.is_set():
            threading.Event().wait()
        elif self.path == "/die":
            os._exit(3)
        body = self._browser() if self.path == "/browser" else str(os.getpid())
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def _browser(self) -> str:
        command = [sys.executable, "-S", "-c", LEAVE, sys.executable, "-S", "-c", SLEEP]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    """Serve until TERM, where NEMO_GYM_CONFIG_DICT says."""
    venv = Path(os.environ["PLAYWRIGHT_BROWSERS_PATH"]).parent
    start = (venv / "START").read_text()
    if start.isdigit():
        sys.stderr.write("stand-in: cannot start\n")
        sys.exit(int(start))
    config = os.environ["NEMO_GYM_CONFIG_DICT"].partition("entrypoint: app.py")[2]
    host = re.search(r"host: (\S+)", config)[1]
    port = int(re.search(r"port: (\d+)", config)[1])
    while start == "later" and not (venv / f"GO-{port}").exists():
        time.sleep(0.02)
    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    server.hangs = threading.Event()
    if start == "never":
        server.hangs.set()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.serve_forever()


if __name__ == "__main__":
    main()
