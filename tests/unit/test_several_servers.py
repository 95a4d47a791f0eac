"""Rollouts over two environment servers: spread, each attempt on one, the next on the other; servers that die."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

import gate_core
from episode import Episode
from episode_log import read_episodes
from tests.agent_loop_harness import CLICK_ABOUT, FINISH, ROW
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.sessions import CLOSE_PATH, SEED_PATH, VERIFY_PATH

CLICK_PATH = "/browser_click"
TWO_CLICKS = [CLICK_ABOUT, CLICK_ABOUT, FINISH]  # one that is spoiled, and one in the next attempt


@pytest.fixture
async def servers():
    async with FakeEnvironment() as one, FakeEnvironment() as two:
        yield one, two


@pytest.fixture
def play(build, tmp_path, monkeypatch):
    """Return a function that runs rollouts of one worker over the servers: outputs, log records and reports."""
    monkeypatch.setattr(gate_core, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(gate_core, "_LONGEST_BACKOFF_S", 0.02)

    def play(servers, rollouts, replies=(CLICK_ABOUT, FINISH), at_once=True, settings=None, **given):
        urls = SimpleNamespace(url=",".join(server.url for server in servers))
        # Who waits for a server that is down beyond the test's own time limit fails the test.
        settings = {"outage_patience_s": 600.0, "outage_after_seeds": 1000} | (settings or {})
        loops = [build(urls, replies, settings=settings, **given)[0] for _ in range(rollouts)]
        for loop in loops:
            loop.servers = loops[0].servers  # as in one worker
        return finished(loops, at_once)

    async def finished(loops, at_once):
        runs = [loop.run({}, **ROW | {"session_id": rollout}) for rollout, loop in enumerate(loops)]
        outputs = await asyncio.gather(*runs) if at_once else [await run for run in runs]
        records, problems = read_episodes(tmp_path)
        assert problems == []
        servers = loops[0].servers.servers
        reports = [report for server in servers for report in server.gate.reports]
        return SimpleNamespace(outputs=outputs, records=records, reports=reports, servers=servers)

    return play


def attempts_of(played):
    """Return the servers of each rollout's attempts in order."""
    by_rollout = {}
    for record in sorted(played.records, key=lambda record: record["attempt"]):
        by_rollout.setdefault(record["rollout"], []).append(record["server"])
    return by_rollout


def assert_all_valid(played, rollouts):
    assert [output.reward_score for (output,) in played.outputs] == [1.0] * rollouts
    assert sorted(report.rollout for report in played.reports) == list(range(rollouts)), "each is reported once"
    assert all(report.valid for report in played.reports)


async def test_rollouts_are_spread_and_each_stays_on_its_server(servers, play):
    played = await play(servers, 10)
    assert_all_valid(played, 10)
    assert Counter(record["server"] for record in played.records) == {server.url: 5 for server in servers}
    for server in servers:
        assert server.seen.seeded == {1, 2, 3, 4, 5}
        assert 0 not in {call.session for call in server.seen.calls}, "a call on a cookie that this server never gave"
        for session in server.seen.seeded:
            paths = server.seen.paths(session)
            assert (paths[0], paths[-2:]) == (SEED_PATH, [VERIFY_PATH, CLOSE_PATH])
    assert [server.attempts for server in played.servers] == [0, 0]


async def test_each_server_keeps_its_share_of_the_caps(servers, play):
    for server in servers:
        server.faults += [Fault(Do.HANG, path=CLICK_PATH)]
    rollouts = asyncio.create_task(play(servers, 8, settings={"max_open_sessions": 3}))
    await servers[0].until(lambda seen: seen.paths().count(CLICK_PATH) == 2)
    await servers[1].until(lambda seen: seen.paths().count(CLICK_PATH) == 1)
    for server in servers:
        server.release()
    assert_all_valid(await rollouts, 8)
    assert [server.seen.peak_open for server in servers] == [2, 1]


async def test_the_next_attempt_goes_to_the_other_server(servers, play):
    servers[0].faults += [Fault(Do.LOSE_SESSION, path=CLICK_PATH)]
    played = await play(servers, 8, TWO_CLICKS)
    assert_all_valid(played, 8)
    one, two = (server.url for server in servers)
    assert Counter(map(tuple, attempts_of(played).values())) == {(one, two): 4, (two,): 4}


async def test_attempts_go_to_and_fro_while_both_spoil_them(servers, play):
    for server in servers:
        server.faults += [Fault(Do.LOSE_SESSION, path=CLICK_PATH)]
    played = await play(servers, 4, [CLICK_ABOUT], max_attempts=4)
    assert played.outputs == [[]] * 4
    for urls in attempts_of(played).values():
        assert urls[0] != urls[1] and urls[:2] == urls[2:]


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after the other"])
async def test_server_that_refuses_connections_costs_no_attempt(servers, play, at_once):
    down, up = servers
    await down.stop()
    played = await play(servers, 8, at_once=at_once)
    assert_all_valid(played, 8)
    assert Counter(record["server"] for record in played.records) == {up.url: 8}
    assert len(up.seen.seeded) == 8


async def test_time_lost_at_a_server_that_refuses_counts_toward_the_deadline(servers, play, monkeypatch):
    episodes = []

    class Kept(Episode):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            episodes.append(self)

    monkeypatch.setattr("browser_agent_loop.Episode", Kept)
    await servers[0].stop()
    await play(servers, 2)
    [lost_s] = [episode.session.environment_s for episode in episodes if episode.session.turned_away]
    assert [episode.lost_s for episode in episodes if episode.lost_s] == [lost_s]


async def test_server_that_spoils_every_seed_costs_a_rollout_one_attempt_at_most(servers, play):
    bad, good = servers
    bad.faults += [Fault(Do.STATUS, path=SEED_PATH, text="BrowserType.launch: no")]
    played = await play(servers, 12, settings={"outage_after_seeds": 3, "max_open_sessions": 4})
    assert_all_valid(played, 12)
    assert all(urls in ([good.url], [bad.url, good.url]) for urls in attempts_of(played).values())
    assert len(bad.seen.seeded) <= 6, "seeds that came after it was known to be down"


async def test_server_that_dies_loses_its_attempts_and_the_rollouts_end_on_the_other(servers, play):
    dying, other = servers
    for server in servers:
        server.faults += [Fault(Do.HANG, path=CLICK_PATH, session=session) for session in (1, 2)]
    rollouts = asyncio.create_task(play(servers, 6, TWO_CLICKS, settings={"max_open_sessions": 4}))
    for server in servers:
        await server.until(lambda seen: seen.paths().count(CLICK_PATH) == 2)
    dying.kill_browsers()
    await dying.stop()
    other.release()
    played = await rollouts
    assert_all_valid(played, 6)
    spoiled = [record for record in played.records if record["failure_kind"]]
    assert [record["server"] for record in spoiled] == [dying.url] * 2
    assert Counter(urls[-1] for urls in attempts_of(played).values()) == {other.url: 6}


async def test_with_both_servers_down_beyond_patience_rollouts_end_as_with_one(servers, play):
    for server in servers:
        await server.stop()
    played = await play(servers, 3, settings={"outage_patience_s": 0.3})
    assert played.outputs == [[]] * 3
    assert [(record["failure_kind"], record["attempt"]) for record in played.records] == [("environment_down", 1)] * 3
    assert [report.failure_kind for report in played.reports] == ["environment_down"] * 3
    assert all(server.gate._link._core.counters().down_s > 0.0 for server in played.servers)


async def test_whichever_server_comes_back_first_goes_on_with_all_rollouts(servers, play):
    for server in servers:
        await server.stop()
    rollouts = asyncio.create_task(play(servers, 6))
    done, _ = await asyncio.wait({rollouts}, timeout=0.5)
    assert done == set()
    await servers[1].start()
    played = await rollouts
    assert_all_valid(played, 6)
    assert [(record["server"], record["attempt"]) for record in played.records] == [(servers[1].url, 1)] * 6
    assert min(record["waiting_s"] for record in played.records) > 0.2
    assert played.servers[1].down_until == 0.0
