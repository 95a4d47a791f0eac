"""The smoke check: healthy only when every step is, and otherwise the step, the answer and what to do."""

import asyncio
import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import smoke_environment
import smoke_episode
from recipe_settings import variables
from smoke_environment import SHIPPED_PAGE, check, main
from tests.fake_environment import Do, FakeEnvironment, Fault

ROOT = Path(__file__).resolve().parents[2]
# As the server answers when Playwright starts a Chromium that exits at once, and when there is none to start.
LAUNCH_FAILED = (
    "TargetClosedError('BrowserType.launch: Target page, context or browser has been closed\\nBrowser logs:\\n\\n"
    f"<launching> .../chrome-headless-shell {'--disable-something ' * 100}\\n"
    "[err] error while loading shared libraries: libnss3.so')"
)
NOT_INSTALLED = (
    'RuntimeError("Could not install Playwright Chromium, which the local browser backend needs. '
    '`python -m playwright install chromium` exited 1.\\nError: getaddrinfo ENOTFOUND cdn.playwright.dev")'
)


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch):
    for variable in variables():
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def dead_address():
    """An address at which nothing listens, and nothing else can start to: it is bound but takes no connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


async def checked(environment, start_page=SHIPPED_PAGE, timeout_s=20.0):
    lines = []
    report = await check(environment.url, start_page, timeout_s, lines.append)
    return report, lines


def outcome(report):
    return [(step.name, step.ok) for step in report.steps]


async def test_a_healthy_server_passes_every_step_and_keeps_no_session():
    async with FakeEnvironment() as environment:
        report, lines = await checked(environment)
        assert environment.open_sessions == set()
    assert report.healthy
    assert outcome(report) == [(name, True) for name in ("seed", "observe", "click", "finish", "verify", "close")]
    assert [line.split()[:2] for line in lines] == [[step.name, "ok"] for step in report.steps]
    assert environment.seen.paths()[-1] == "/close_session"


async def test_with_a_page_of_its_own_it_observes_and_finishes_only_and_says_so():
    async with FakeEnvironment() as environment:
        report, _ = await checked(environment, "site/about.html")
    assert report.healthy
    assert outcome(report) == [(name, True) for name in ("seed", "observe", "finish", "verify", "close")]
    assert report.checked == "opened site/about.html, observed, finished and scored"
    assert environment.seen.calls[0].body["initial_url"] == "site/about.html"


FAILURES = {
    "seed-500": (Fault(Do.STATUS, "/seed_session"), "seed", "server_error", "HTTP 500", "log"),
    "launch": (
        Fault(Do.STATUS, "/seed_session", text=LAUNCH_FAILED),
        "seed",
        "browser_launch_failed",
        "libnss3.so",
        "playwright install --with-deps chromium",
    ),
    "no-chromium": (
        Fault(Do.STATUS, "/seed_session", text=NOT_INSTALLED),
        "seed",
        None,
        "Could not install Playwright Chromium",
        "playwright install --with-deps chromium",
    ),
    "start-page": (
        Fault(Do.STATUS, "/seed_session", text="Error('Page.goto: net::ERR_NAME_NOT_RESOLVED at http://x/')"),
        "seed",
        "start_page_failed",
        "ERR_NAME_NOT_RESOLVED",
        "curl",
    ),
    "other-server": (
        Fault(Do.STATUS, "/seed_session", status=404, text="Not Found"),
        "seed",
        "request_rejected",
        "HTTP 404",
        "does not speak the contract",
    ),
    "html": (
        Fault(Do.GARBAGE, "/seed_session", text="<html>"),
        "seed",
        "malformed_answer",
        "JSONDecodeError",
        "does not speak the contract",
    ),
    "dropped": (
        Fault(Do.DISCONNECT, "/seed_session"),
        "seed",
        "environment_disconnected",
        "Disconnected",
        "dropped the connection",
    ),
    "lost": (Fault(Do.LOSE_SESSION, "/browser_observe"), "observe", "session_lost", "no active session", "one process"),
    "observe-500": (Fault(Do.STATUS, "/browser_observe"), "observe", "server_error", "HTTP 500", "log"),
    "no-link": (
        Fault(Do.ANSWER, "/browser_observe", body={"observation": "URL: http://x/\nTEXT:", "done": False}),
        "click",
        "malformed_answer",
        "no element `Go to form`",
        "does not speak the contract",
    ),
    "dead-browser": (Fault(Do.KILL_BROWSER, "/browser_click"), "click", "browser_died", "closed", "log"),
    "finish-not-done": (
        Fault(Do.ANSWER, "/browser_finish", body={"observation": "", "done": False, "error": None}),
        "finish",
        "malformed_answer",
        "done: true",
        "does not speak the contract",
    ),
    "verify-500": (Fault(Do.STATUS, "/verify"), "verify", "server_error", "HTTP 500", "log"),
    "masked": (
        Fault(Do.ANSWER, "/verify", body={"reward": 1.0, "mask_sample": True}),
        "verify",
        "reward_masked",
        '"mask_sample": true',
        "log",
    ),
    "unsolved": (
        Fault(Do.ANSWER, "/verify", body={"reward": 0.0}),
        "verify",
        "malformed_answer",
        "not the reward 1.0",
        "does not speak the contract",
    ),
    "close-500": (Fault(Do.STATUS, "/close_session"), "close", "server_error", "HTTP 500", "log"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_names_the_step_the_answer_and_what_to_do(name):
    fault, step, kind, answered, advice = FAILURES[name]
    async with FakeEnvironment(faults=[fault]) as environment:
        report, lines = await checked(environment)
        assert environment.open_sessions == set() or step in ("seed", "close")
    assert not report.healthy
    assert report.failed_step == step
    assert report.kind == kind or kind is None
    assert answered in report.answered and advice in report.advice
    assert [line for line in lines if "FAILED" in line][0].startswith(step)
    if step != "seed":
        assert report.steps[-1].name == "close"


@pytest.mark.parametrize(("path", "step"), [("/seed_session", "seed"), ("/browser_observe", "observe")])
async def test_a_server_that_never_answers_is_bounded_by_the_timeout(path, step):
    async with FakeEnvironment(faults=[Fault(Do.HANG, path)]) as environment:
        report, _ = await asyncio.wait_for(checked(environment, timeout_s=0.5), timeout=10)
    assert report.failed_step == step
    assert report.kind in ("seed_timeout", "act_timeout")
    assert "no answer within" in report.answered and "--timeout" in report.advice
    assert ("/close_session" in environment.seen.paths()) is (step == "observe")


async def test_a_close_that_hangs_is_the_failed_step_and_does_not_hold_up_the_check(monkeypatch):
    monkeypatch.setattr(smoke_episode, "CLOSE_S", 0.2)
    async with FakeEnvironment(faults=[Fault(Do.HANG, "/close_session")]) as environment:
        report, _ = await asyncio.wait_for(checked(environment), timeout=10)
    assert report.failed_step == "close"


async def test_a_stopped_check_closes_its_session():
    async with FakeEnvironment(faults=[Fault(Do.HANG, "/browser_observe")]) as environment:
        seeded = asyncio.Event()
        task = asyncio.create_task(check(environment.url, SHIPPED_PAGE, 20.0, lambda line: seeded.set()))
        await asyncio.wait_for(seeded.wait(), timeout=10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert environment.seen.paths()[-1] == "/close_session"


def test_nothing_listening_exits_1_and_says_what_to_do(dead_address, capsys):
    assert main(["--url", dead_address]) == 1
    out = capsys.readouterr().out
    assert f"unhealthy: step `seed` failed at {dead_address} (environment_unreachable)" in out
    assert "what to do: Nothing takes connections at this address." in out


async def test_a_healthy_server_exits_0_with_a_line_per_step(capsys, monkeypatch):
    async with FakeEnvironment() as environment:
        monkeypatch.setenv("NEMO_GYM_URL", environment.url + "/")
        assert await asyncio.to_thread(main, []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["seed", "observe", "click", "finish", "verify", "close", "healthy:"]
    assert all(" s  " in line for line in lines[:-1])


async def test_json_is_one_object_for_machines(capsys):
    async with FakeEnvironment(faults=[Fault(Do.STATUS, "/verify")]) as environment:
        assert await asyncio.to_thread(main, ["--json", "--url", environment.url]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["healthy"], report["url"]) == (False, environment.url)
    assert [step["ok"] for step in report["steps"]] == [True, True, True, True, False, True]
    assert report["failure"]["step"] == "verify" and report["failure"]["advice"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "NEMO_GYM_URL is not set"),
        (["--url", "gym:8000"], "must be http://HOST:PORT"),
        (["--url", "http://h:1", "--timeout", "0"], "--timeout 0.0: must be"),
        (["--url", "http://h:1", "--timeout", "nan"], "--timeout nan: must be"),
        (["--url", "http://h:1", "--timeout", "soon"], "invalid float value"),
        (["--url", "http://h:1", "--initial-url", "file:///etc/passwd"], "neither an http(s) address"),
        (["--uri", "http://h:1"], "unrecognized arguments"),
        (["--url", "http://h:1,gym:8000"], "must be http://HOST:PORT"),
        (["--url", "http://h:1,"], "must be http://HOST:PORT"),
        (["--url", "http://h:1, http://h:1/"], "http://h:1 is named twice"),
        (["--url", "http://h:1", "--initial-url", "site/index.html", "ftp://x"], "neither an http(s) address"),
        (["--url", "http://h:1", "--episodes", "4"], "--episodes: goes with --concurrency only"),
        (["--url", "http://h:1", "--max-act-s", "4"], "--max-act-s: goes with --concurrency only"),
        (["--url", "http://h:1", "--max-failure-share", "0"], "--max-failure-share: goes with --concurrency only"),
        (["--url", "http://h:1", "--concurrency", "2", "--timeout", "9"], "--timeout: not with --concurrency"),
        (["--url", "http://h:1", "--concurrency", "-1"], "--concurrency -1: must be a whole number"),
        (["--url", "http://h:1", "--concurrency", "0"], "--concurrency 0: must be a whole number"),
        (["--url", "http://h:1", "--concurrency", "few"], "invalid int value"),
        (["--url", "http://h:1", "--concurrency", "4", "--episodes", "3"], "--episodes 3: fewer than --concurrency 4"),
        (["--url", "http://h:1", "--concurrency", "4", "--episodes", "0"], "--episodes 0: must be"),
        (["--url", "http://h:1", "--concurrency", "4", "--seeds-at-once", "0"], "--seeds-at-once 0: must be"),
        (["--url", "http://h:1", "--concurrency", "4", "--duration", "0"], "--duration 0.0: must be"),
        (["--url", "http://h:1", "--concurrency", "4", "--max-seed-s", "nan"], "--max-seed-s nan: must be"),
        (["--url", "http://h:1", "--concurrency", "4", "--max-failure-share", "1"], "--max-failure-share 1.0: must be"),
        (
            ["--url", "http://h:1,http://h:2,http://h:3", "--concurrency", "2"],
            "--concurrency 2: must be at least 1 for",
        ),
        (
            ["--url", "http://h:1,http://h:2,http://h:3", "--concurrency", "3"],
            "--seeds-at-once 2: must be at least 1 for",
        ),
    ],
)
def test_wrong_usage_exits_2_and_says_why(arguments, said, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_more_connections_than_this_process_may_have_are_wrong_usage(monkeypatch, capsys):
    monkeypatch.setattr(smoke_environment.resource, "getrlimit", lambda which: (256, 1024))
    with pytest.raises(SystemExit) as error:
        main(["--url", "http://h:1", "--concurrency", "1000"])
    assert error.value.code == 2
    assert "needs 1064 open files, and this process may have 1024" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limits", "want"),
    [((256, 4096), [(1064, 4096)]), ((256, -1), [(1064, -1)]), ((2048, 4096), []), ((-1, -1), [])],
    ids=["raised", "raised without bound", "enough", "no limit"],
)
def test_the_limit_of_open_files_is_raised_as_far_as_needed(limits, want, monkeypatch, dead_address):
    raised = []
    monkeypatch.setattr(smoke_environment.resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(smoke_environment.resource, "setrlimit", lambda which, to: raised.append(to))
    assert main(["--url", dead_address, "--concurrency", "1000"]) == 1
    assert raised == want


async def test_one_unhealthy_server_of_several_exits_1_and_each_has_its_episode(capsys):
    async with FakeEnvironment() as well, FakeEnvironment(faults=[Fault(Do.STATUS, "/verify")]) as broken:
        urls = f"{broken.url}, {well.url}/"
        assert await asyncio.to_thread(main, ["--url", urls]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert await asyncio.to_thread(main, ["--url", urls, "--json"]) == 1
        assert await asyncio.to_thread(main, ["--url", well.url, "--json", "--initial-url", "site/about.html"]) == 0
    assert [line.split()[0] for line in lines if "healthy: " in line] == ["unhealthy:", "healthy:"]
    assert f"failed at {broken.url} (server_error)" in "".join(lines) and f"healthy: {well.url} (" in lines[-1]
    several, one = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [(c["url"], c["healthy"]) for c in several["checks"]] == [(broken.url, False), (well.url, True)]
    assert several["healthy"] is False and one["healthy"] is True


async def test_without_a_number_the_concurrency_is_that_of_the_settings(capsys, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS", "5")
    monkeypatch.setenv("NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS", "3")
    monkeypatch.setenv("NEMO_GYM_BROWSER_ACT_TIMEOUT_S", "50")
    async with FakeEnvironment() as environment:
        assert await asyncio.to_thread(main, ["--url", environment.url, "--json", "--concurrency"]) == 0
    assert environment.seen.peak_open == 5 and len(environment.seen.seeded) == 5
    report = json.loads(capsys.readouterr().out)
    assert (report["healthy"], report["concurrency"], report["planned"], report["seeds_at_once"]) == (True, 5, 5, 3)
    assert report["limits"]["act_s"] == 25.0


async def test_an_environment_that_breaks_under_load_exits_1_with_what_to_do(capsys):
    async with FakeEnvironment(faults=[Fault(Do.STATUS, "/seed_session", share=0.9)]) as environment:
        options = ["--concurrency", "20", "--episodes", "30", "--seeds-at-once", "4"]
        assert await asyncio.to_thread(main, ["--url", environment.url, *options]) == 1
    out = capsys.readouterr().out
    assert f"unhealthy: {environment.url}" in out and "server_error at seed" in out
    assert "--max-failure-share: at most 0.02 is healthy" in out and "concurrency: at least 20 is healthy" in out


async def test_thresholds_can_be_given(capsys):
    async with FakeEnvironment(faults=[Fault(Do.STATUS, "/verify", session=1)]) as environment:
        command = ["--url", environment.url, "--concurrency", "4"]
        assert await asyncio.to_thread(main, command) == 1
    async with FakeEnvironment(faults=[Fault(Do.STATUS, "/verify", session=1)]) as environment:
        command = ["--url", environment.url, "--concurrency", "4", "--max-failure-share", "0.25"]
        assert await asyncio.to_thread(main, command) == 0
        assert await asyncio.to_thread(main, [*command, "--max-seed-s", "0.0001"]) == 1
    assert "--max-seed-s: at most 0.0001 is healthy" in capsys.readouterr().out


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


async def test_progress_is_lines_in_a_log_and_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(smoke_environment, "LINE_EVERY_S", 0.05)
    async with FakeEnvironment(latency_s={"/browser_observe": 0.3}) as environment:
        command = ["--url", environment.url, "--concurrency", "2"]
        assert await asyncio.to_thread(main, command) == 0
        lines = capsys.readouterr().err.splitlines()
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert await asyncio.to_thread(main, command) == 0
        shown = sys.stderr.getvalue()
    assert any(line.endswith("s: 0 of 2 episodes, 0 failed, 2 sessions open") for line in lines)
    assert lines[-1].endswith("s: 2 of 2 episodes, 0 failed, 0 sessions open")
    assert "2/2" in shown and "0 open, 0 failed" in shown


def test_the_check_needs_neither_torch_nor_verl_nor_ray():
    code = 'import sys, smoke_environment; print(sorted({"torch", "verl", "ray", "numpy"} & set(sys.modules)))'
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
