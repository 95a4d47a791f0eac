"""smoke_environment.py as a user runs it: against the real server, and against every kind of broken one."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cpu.gym_server import GymServer
from cpu.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
FALSE = "/bin/false"  # a browser that can't start

pytestmark = pytest.mark.timeout(120)


def smoke(url: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "smoke_environment.py", "--url", url, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)


@pytest.fixture
def silent_url() -> Iterator[str]:
    """Return an address that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def failing_url() -> Iterator[str]:
    """Return an address that answers every request with 500."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b"Internal Server Error"
            self.send_response(500)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_the_real_server_is_healthy(server):
    result = smoke(server.url)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"healthy: {server.url}")
    assert [line.split()[:2] for line in result.stdout.splitlines()[:-1]] == [
        [step, "ok"] for step in ("seed", "observe", "click", "finish", "verify", "close")
    ]
    assert server.browser_pids() == []


def test_the_real_server_is_healthy_for_machines_too(server):
    result = smoke(server.url, "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["healthy"], report["failure"]) == (0, True, None)


def test_the_real_server_holds_three_sessions_at_once(server):
    result = smoke(server.url, "--json", "--concurrency", "3", "--episodes", "5")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    counts = report["counts"]
    assert (report["healthy"], counts["peak_open"], counts["healthy"], counts["leaked"]) == (True, 3, 5, 0)
    assert all(latency["calls"] == 5 and latency["p50_s"] > 0 for latency in report["latencies"])
    assert server.browser_pids() == []


def test_a_server_killed_under_load_is_unhealthy_with_the_kinds_of_its_failures(server):
    command = [sys.executable, "smoke_environment.py", "--url", server.url, "--json"]
    command += ["--concurrency", "3", "--episodes", "200"]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # Two seeds are under way at once, so that the third browser belongs to a session beside one that is open.
        _until(lambda: len(server.browser_pids()) >= 3)
        server.kill()
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait()
        server.restart()
    assert program.returncode == 1, out + err
    report = json.loads(out)
    assert (report["healthy"], report["ended"]) == (False, "refused")
    kinds = {failure["kind"] for failure in report["failures"]}
    assert "environment_unreachable" in kinds and kinds <= {"environment_unreachable", "environment_disconnected"}
    assert report["counts"]["begun"] < 200 and report["counts"]["leaked"] > 0
    assert {"--max-failure-share", "leaked sessions"} <= {broken["threshold"] for broken in report["broken"]}


def _until(holds: Callable[[], bool]) -> None:
    gives_up_at = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < gives_up_at
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        ("nothing_url", "environment_unreachable"),
        ("silent_url", "seed_timeout"),
        ("failing_url", "server_error"),
        ("browserless_url", "browser_launch_failed"),
    ],
    ids=["nothing listens", "never answers", "answers 500", "Chromium can't start"],
)
def test_a_broken_server_is_unhealthy_at_a_named_step(request, broken, kind):
    url = request.getfixturevalue(broken)
    result = smoke(url, "--timeout", "20" if broken == "browserless_url" else "3")
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"unhealthy: step `seed` failed at {url} ({kind})" in result.stdout
    assert "what to do: " in result.stdout
    assert "Traceback" not in result.stderr


@pytest.fixture
def nothing_url() -> str:
    """Return an address where nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def browserless_url(tmp_path) -> Iterator[str]:
    """Return the address of a real server whose Chromium ends at once."""
    with GymServer(free_port(), tmp_path / "gym.log", chromium=FALSE) as running:
        yield running.url
