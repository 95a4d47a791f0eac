"""The smoke check: healthy only when every step is, and otherwise the step, the answer and what to do."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
    ],
)
def test_wrong_usage_exits_2_and_says_why(arguments, said, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_the_check_needs_neither_torch_nor_verl_nor_ray():
    code = 'import sys, smoke_environment; print(sorted({"torch", "verl", "ray", "numpy"} & set(sys.modules)))'
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
