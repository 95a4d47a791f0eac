"""Starting and completely ending programs (cpu/processes.py), with real processes that misbehave."""

import os
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cpu.processes import (
    ProcessError,
    ProcessTree,
    free_port,
    http_answers,
    parents,
    process_tree,
    require_free_port,
    wait_until_answers,
)

ROOT = Path(__file__).resolve().parents[2]
REPORT_AND_WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
# A grandchild in a session of its own whose parent ends at once, as a browser's helper does it.
ESCAPE = f"""
import subprocess, sys
subprocess.Popen(
    [sys.executable, "-c", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])",
     {REPORT_AND_WAIT!r}], start_new_session=True).wait()
{REPORT_AND_WAIT}
"""
IGNORE_TERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {REPORT_AND_WAIT}"


def start(tmp_path: Path, code: str, **options: bool) -> ProcessTree:
    command = [sys.executable, "-c", code]
    return ProcessTree("the test program", command, log_path=tmp_path / "log", env=os.environ, cwd=tmp_path, **options)


def wait_for_reports(tree: ProcessTree, count: int) -> list[int]:
    """Return the pids that the tree's processes wrote, once there are that many (pytest's timeout ends a failure)."""
    while len(lines := tree.log_path.read_text().split()) < count:
        assert tree.exit_code is None, tree.log_tail()
    return [int(line) for line in lines]


@pytest.mark.parametrize(
    ("code", "processes", "how"),
    [
        (REPORT_AND_WAIT, 1, "stop"),
        (ESCAPE, 2, "stop"),
        (ESCAPE, 2, "kill"),
        (IGNORE_TERM, 1, "stop"),
    ],
    ids=["plain", "escaped grandchild, stopped", "escaped grandchild, killed", "ignores TERM"],
)
def test_nothing_is_left_of_a_tree_that_was_ended(tmp_path, code, processes, how):
    tree = start(tmp_path, code)
    pids = wait_for_reports(tree, processes)
    assert set(pids) <= set(tree.pids())
    tree.stop(grace_s=0.3) if how == "stop" else tree.kill()
    assert tree.pids() == []
    assert process_tree(pids, tree.mark) == []


def test_what_a_killed_program_leaves_behind_is_still_found(tmp_path):
    tree = start(tmp_path, ESCAPE)
    pids = wait_for_reports(tree, 2)
    os.kill(tree.pid, signal.SIGKILL)
    while tree.exit_code is None:
        pass
    assert tree.pids() == [pid for pid in pids if pid != tree.pid]
    tree.kill()
    assert tree.pids() == []


def test_ending_a_tree_twice_is_harmless(tmp_path):
    tree = start(tmp_path, REPORT_AND_WAIT)
    tree.stop()
    tree.stop()
    tree.kill()
    assert tree.exit_code == -signal.SIGTERM


def test_a_program_that_ends_before_it_answers_is_named_with_its_last_words(tmp_path):
    tree = start(tmp_path, "import sys; print('cannot bind'); sys.exit(3)")
    with pytest.raises(ProcessError, match=r"the test program ended with exit code 3 .*cannot bind") as caught:
        wait_until_answers(tree, f"http://127.0.0.1:{free_port()}/", timeout_s=30)
    assert "\n" not in str(caught.value)


def test_a_program_that_never_answers_is_given_up_on(tmp_path):
    tree = start(tmp_path, REPORT_AND_WAIT)
    try:
        with pytest.raises(ProcessError, match=r"did not answer http://127.0.0.1:\d+/ within 0.2 s"):
            wait_until_answers(tree, f"http://127.0.0.1:{free_port()}/", timeout_s=0.2)
    finally:
        tree.kill()


def test_a_program_that_does_not_exist_is_one_clear_line(tmp_path):
    with pytest.raises(ProcessError, match="the thing could not be started: .*no/such/file"):
        ProcessTree("the thing", ["/no/such/file"], log_path=tmp_path / "log", env=os.environ, cwd=tmp_path)


def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ProcessError, match=f"port {port} is in use; .* give the practice site another port"):
            require_free_port(port, "the practice site")
    require_free_port(port, "the practice site")


def test_an_address_that_is_not_this_machines_is_one_clear_line():
    with pytest.raises(ProcessError, match=r"the server can't listen on 192.0.2.1:\d+: .* an address of this machine"):
        require_free_port(free_port(), "the server", "192.0.2.1")


PARENT = f"""
import os, pathlib, sys, time
from cpu.processes import ProcessTree
program = [sys.executable, "-c", {REPORT_AND_WAIT!r}]
here = pathlib.Path.cwd()
child = ProcessTree("child", program, log_path=here / "child", env=os.environ, cwd=here, dies_with_parent=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_program_that_dies_with_its_parent_does_so_when_the_parent_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    parent = start(tmp_path, PARENT)
    (child,) = wait_for_reports(parent, 1)
    os.kill(parent.pid, signal.SIGKILL)
    while child in parents():  # in a session of its own, which no signal to the parent's reaches
        pass
    assert parent.pids() == []


def test_a_program_that_dies_with_its_parent_does_not_begin_once_the_parent_has_ended(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 1)  # not what the new process will find as its parent
        tree = start(tmp_path, REPORT_AND_WAIT, dies_with_parent=True)
    while tree.exit_code is None:
        pass
    assert (tree.exit_code, tree.log_path.read_text()) == (1, "")


@pytest.mark.parametrize("status", [200, 404, 500])
def test_any_status_is_an_answer(status):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert http_answers(f"http://127.0.0.1:{server.server_port}/")
        thread.join()
    assert not http_answers(f"http://127.0.0.1:{server.server_port}/")
