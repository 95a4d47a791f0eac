"""Many smoke episodes at once: how many are really open, what ends a run, and what is left behind."""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import smoke_load
from cpu.processes import free_port
from recipe_settings import RecipeSettings, shares
from rollout_failures import FailureKind, failure_of
from smoke_episode import SHIPPED_PAGE, Smoke, StepFailed
from smoke_load import REFUSED_IN_A_ROW, Ended, LoadPlan, run_load
from smoke_report import Limits, load_report
from tests.fake_environment import Do, FakeEnvironment, Fault

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("/seed_session", "/browser_observe", "/browser_click", "/browser_finish", "/verify", "/close_session")


def plan(*urls, n=4, m=None, k=2, duration_s=30.0, pages=(SHIPPED_PAGE,), **deadlines):
    return LoadPlan(tuple(urls), pages, n, m or n, duration_s, k, RecipeSettings(**deadlines))


async def measured(*urls, failure_share=0.02, **given):
    run = await asyncio.wait_for(run_load(plan(*urls, **given)), timeout=40)
    limits = Limits.from_settings(RecipeSettings())
    return load_report(run, Limits(failure_share, limits.seed_s, limits.act_s, limits.verify_s, limits.close_s))


def thresholds(report):
    return [broken.threshold for broken in report.broken]


@pytest.mark.parametrize(
    ("n", "m", "k"), [(1, 1, 1), (1, 3, 1), (4, 4, 2), (8, 20, 3), (16, 16, 16), (40, 40, 5)], ids=lambda value: value
)
async def test_exactly_as_many_sessions_as_told_are_open_at_the_peak_and_never_more(n, m, k):
    # Both take a moment, so that those that may overlap do.
    async with FakeEnvironment(latency_s={"/seed_session": 0.01, "/verify": 0.01}) as environment:
        report = await measured(environment.url, n=n, m=m, k=k)
        assert environment.open_sessions == set()
    assert report.healthy and report.ended == Ended.EPISODES
    assert environment.seen.peak_open == report.counts.peak_open == n
    assert environment.seen.peak_opening == k
    assert len(environment.seen.seeded) == report.counts.begun == report.counts.healthy == m
    assert environment.seen.overlapping == []


async def test_each_session_plays_the_same_episode_as_the_single_check():
    async with FakeEnvironment() as environment:
        await measured(environment.url, n=3)
    for session in environment.seen.seeded:
        assert environment.seen.paths(session) == list(STEPS)


async def test_no_session_goes_on_before_all_are_open():
    async with FakeEnvironment() as environment:
        await measured(environment.url, n=6, m=12)
    assert environment.seen.paths()[:6] == ["/seed_session"] * 6


async def test_a_seed_that_fails_is_made_up_for_while_episodes_are_left():
    async with FakeEnvironment(faults=[Fault(Do.STATUS, "/seed_session", times=3)]) as environment:
        report = await measured(environment.url, n=5, m=10)
    assert environment.seen.peak_open == report.counts.peak_open == 5
    assert (report.counts.healthy, report.counts.failed) == (7, 3)


async def test_a_server_that_fails_most_seeds_under_load_is_unhealthy():
    faults = [Fault(Do.STATUS, "/seed_session", share=0.916)]
    async with FakeEnvironment(faults=faults) as environment:
        failing = sum(faults[0].fits(environment.place("/seed_session", number)) for number in range(1, 201))
        report = await measured(environment.url, n=200, k=20)
        assert environment.open_sessions == set()
    assert 170 < failing < 200
    assert not report.healthy
    assert [(f.step, f.kind, f.count) for f in report.failures] == [("seed", "server_error", failing)]
    assert "HTTP 500" in report.failures[0].example and report.failures[0].what_to_do
    assert report.counts.peak_open == environment.seen.peak_open == 200 - failing
    assert thresholds(report) == ["--max-failure-share", "concurrency"]
    assert report.broken[0].value == round(failing / 200, 4)


FAILURES = {
    "lost": (Fault(Do.LOSE_SESSION, "/browser_observe", times=2), "observe", "session_lost", 0),
    "died": (Fault(Do.KILL_BROWSER, "/browser_click", times=2), "click", "browser_died", 0),
    "masked": (Fault(Do.ANSWER, "/verify", body={"reward": 1.0, "mask_sample": True}, times=2), "verify", None, 0),
    "leaked": (Fault(Do.STATUS, "/close_session", times=2), "close", "server_error", 2),
    "dropped": (Fault(Do.DISCONNECT, "/browser_finish", times=2), "finish", "environment_disconnected", 0),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_failures_are_counted_by_step_and_kind_and_leaks_are_found(name):
    fault, step, kind, leaked = FAILURES[name]
    async with FakeEnvironment(faults=[fault]) as environment:
        report = await measured(environment.url, n=4, failure_share=0.9)
    assert [(f.step, f.count) for f in report.failures] == [(step, 2)]
    assert kind is None or report.failures[0].kind == kind
    assert (report.counts.healthy, report.counts.failed) == (2, 2)
    assert (report.counts.opened, report.counts.closed, report.counts.leaked) == (4, 4 - leaked, leaked)
    assert thresholds(report) == (["leaked sessions"] if leaked else [])


async def test_a_hung_seed_is_given_up_at_its_deadline_and_counts_with_the_time_it_took():
    async with FakeEnvironment(faults=[Fault(Do.HANG, "/seed_session", session=2)]) as environment:
        report = await measured(environment.url, n=3, k=3, seed_timeout_s=1.5)
    assert [(f.step, f.kind, f.count) for f in report.failures] == [("seed", "seed_timeout", 1)]
    assert (report.counts.seeds_given_up, report.counts.opened, report.counts.peak_open) == (1, 2, 2)
    seed = report.latencies[0]
    assert (seed.action, seed.calls) == ("seed", 3) and seed.max_s >= 1.5


async def test_start_pages_are_taken_in_turn():
    pages = ("site/about.html", SHIPPED_PAGE)
    async with FakeEnvironment() as environment:
        report = await measured(environment.url, n=4, k=1, pages=pages)
    seeds = [call.body["initial_url"] for call in environment.seen.calls if call.path == "/seed_session"]
    assert seeds == [*pages, *pages] and report.healthy


async def test_the_duration_ends_a_run_whose_episodes_would_go_on():
    async with FakeEnvironment() as environment:
        report = await measured(environment.url, n=2, m=1_000_000, duration_s=1.0)
        assert environment.open_sessions == set()
    assert report.ended == Ended.DURATION and report.healthy
    assert 2 <= report.counts.begun == report.counts.healthy < 1_000_000


async def test_a_duration_too_short_to_open_all_sessions_is_unhealthy_and_says_so():
    async with FakeEnvironment(latency_s={"/seed_session": 0.1}) as environment:
        report = await measured(environment.url, n=50, k=1, duration_s=0.25)
    assert (report.ended, thresholds(report)) == (Ended.DURATION, ["concurrency"])
    assert report.counts.failed == 0 and "--duration" in report.broken[0].what_to_do


async def test_episodes_that_are_not_over_long_after_the_duration_have_failed(monkeypatch):
    monkeypatch.setattr(LoadPlan, "longest_episode_s", 0.5)
    async with FakeEnvironment(faults=[Fault(Do.HANG, "/verify")]) as environment:
        running = asyncio.create_task(measured(environment.url, n=4, k=1, duration_s=0.5))
        # The one verify is hung, the others wait for it to be over. None is closed before the run breaks them off.
        await environment.until(lambda seen: "/close_session" in seen.paths())
        environment.release()
        report = await running
        assert environment.open_sessions == set()
    assert [f.kind for f in report.failures if f.step == "verify"] == ["episode_deadline"]
    assert {f.kind for f in report.failures} == {"episode_deadline"}
    assert report.counts.failed == report.counts.begun > 0 and report.counts.cut_short == 0


async def test_sessions_are_spread_evenly_over_servers_and_so_are_seeds():
    async with AsyncExitStack() as stack:
        slow_seeds = {"/seed_session": 0.01}
        servers = [await stack.enter_async_context(FakeEnvironment(latency_s=slow_seeds)) for _ in range(2)]
        report = await measured(*(server.url for server in servers), n=5, m=11, k=3)
    assert report.healthy and report.counts.peak_open == 5
    assert [server.seen.peak_open for server in servers] == [3, 2]
    assert [server.seen.peak_opening for server in servers] == [2, 1]
    assert [len(server.seen.seeded) for server in servers] == [6, 5]
    assert [(s.url, s.counts.healthy, s.counts.peak_open) for s in report.servers] == [
        (servers[0].url, 6, 3),
        (servers[1].url, 5, 2),
    ]


@pytest.mark.parametrize(
    ("total", "among", "want"), [(5, 2, [3, 2]), (4, 4, [1, 1, 1, 1]), (9, 1, [9]), (7, 3, [3, 2, 2])]
)
def test_shares_are_even_and_add_up(total, among, want):
    assert shares(total, among) == want


async def test_a_run_against_dead_servers_ends_early():
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    report = await measured(*urls, n=100, m=1280, k=4)
    assert report.ended == Ended.REFUSED and not report.healthy
    assert 2 * REFUSED_IN_A_ROW <= report.counts.begun < 2 * (REFUSED_IN_A_ROW + 2)
    assert report.failures[0].kind == "environment_unreachable"
    assert [server.given_up for server in report.servers] == [True, True]


async def test_a_dead_server_is_left_out_and_unhealthy_however_few_failures_that_makes():
    dead = f"http://127.0.0.1:{free_port()}"
    async with FakeEnvironment() as environment:
        report = await measured(environment.url, dead, n=2, m=120, k=2, failure_share=0.6)
    assert report.ended == Ended.EPISODES and not report.healthy
    assert [(s.given_up, s.counts.begun) for s in report.servers] == [(False, 60), (True, REFUSED_IN_A_ROW)]
    assert thresholds(report) == ["servers that refuse connections"]
    assert dead in report.broken[0].said and environment.url not in report.broken[0].said


async def test_only_refusals_in_a_row_count(monkeypatch):
    seeds = iter([*([False] * (REFUSED_IN_A_ROW - 1)), True] * 3)

    class Scripted(Smoke):
        """Opens a session, or finds its connection refused, as the script says; the rest is the real thing."""

        async def open(self):
            if next(seeds):
                return await super().open()
            self.report.fail("seed", failure_of(FailureKind.ENVIRONMENT_UNREACHABLE, "refused"), "refused")
            raise StepFailed

    monkeypatch.setattr(smoke_load, "Smoke", Scripted)
    async with FakeEnvironment() as environment:
        report = await measured(environment.url, n=1, m=3 * REFUSED_IN_A_ROW, k=1, failure_share=0.95)
    assert (report.counts.healthy, report.counts.failed) == (3, 3 * (REFUSED_IN_A_ROW - 1))
    assert not report.servers[0].given_up


async def test_a_server_that_drops_connections_is_not_taken_for_a_dead_one():
    faults = [Fault(Do.DISCONNECT, "/seed_session", times=2 * REFUSED_IN_A_ROW)]
    async with FakeEnvironment(faults=faults) as environment:
        report = await measured(environment.url, n=1, m=40, k=1, failure_share=0.9)
    assert report.counts.failed == 2 * REFUSED_IN_A_ROW and not report.servers[0].given_up


async def stopped_program(environment, number, arrived, n, *options):
    """Return exit code and standard output of the program, which got a signal once `arrived` was true."""
    command = [sys.executable, "smoke_environment.py", "--url", environment.url, "--concurrency", str(n), *options]
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(50):
        await environment.until(arrived)
        program.send_signal(number)
        out, err = await program.communicate()
    assert "Traceback" not in err.decode()
    return program.returncode, out.decode()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["Ctrl-C", "TERM"],
)
async def test_a_stopped_program_closes_its_sessions_and_says_what_it_measured(number, code, said):
    async with FakeEnvironment(faults=[Fault(Do.HANG, "/browser_observe")]) as environment:

        def all_observe(seen):
            return seen.paths().count("/browser_observe") == 3

        returned, out = await stopped_program(environment, number, all_observe, 3, "--seeds-at-once", "3")
        assert environment.open_sessions == set()
    assert returned == code
    assert f"no verdict: {said}" in out
    assert "0 healthy, 0 failed, 3 cut short, of 3 planned" in out
    assert "3 opened, 3 closed, 0 leaked" in out and "held: 3 of 3" in out


async def test_a_stopped_program_waits_for_seeds_under_way_and_closes_what_they_open():
    async with FakeEnvironment(latency_s={"/seed_session": 0.5}) as environment:

        def seeds_under_way(seen):
            return len(seen.seeded) == 2

        returned, out = await stopped_program(environment, signal.SIGTERM, seeds_under_way, 9, "--seeds-at-once", "2")
        assert environment.open_sessions == set()
    assert returned == 143
    assert len(environment.seen.seeded) == 2
    assert "2 opened, 2 closed, 0 leaked" in out
