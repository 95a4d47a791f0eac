"""Which server an attempt goes to, on a clock that only the test moves."""

from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

import server_choice
from environment_gate import Pass
from recipe_settings import RecipeSettings, SettingsError
from server_choice import DOWN_FOR_S, Server, ServerChoice

URLS = ("http://a:1", "http://b:1", "http://c:1")


@pytest.fixture
def clock(monkeypatch):
    """A clock, and the sleeps that were asked for; each moves the clock."""
    clock = SimpleNamespace(now=1000.0, slept=[])

    async def sleep(seconds):
        clock.slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(server_choice, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(server_choice.asyncio, "sleep", sleep)
    return clock


def servers_of(count=2, **changes):
    """Return the choice of one event loop among so many servers; no gate is asked here."""
    urls = ",".join(URLS[:count])
    settings = RecipeSettings(environment_url=urls, max_concurrent_seeds=count, **changes)
    return ServerChoice([Server(share, None) for share in settings.servers()])


def first_choices(choice, rollouts):
    """Return how many of so many rollouts that begin at once go to each server."""
    with ExitStack() as running:
        chosen = [running.enter_context(choice.for_rollout("u", rollout).next()).url for rollout in range(rollouts)]
    return Counter(chosen)


def next_url(servers):
    with servers.next() as server:
        return server.url


@pytest.mark.parametrize(("servers", "rollouts"), [(1, 5), (2, 8), (2, 33), (3, 32)])
def test_rollouts_of_one_worker_are_spread_evenly(servers, rollouts):
    counts = first_choices(servers_of(servers), rollouts).values()
    assert len(counts) == servers
    assert max(counts) - min(counts) <= 1


def test_workers_with_one_rollout_each_do_not_all_choose_the_same_server():
    urls = Counter(next_url(servers_of(3).for_rollout("u", worker)) for worker in range(300))
    assert set(urls) == set(URLS)
    assert min(urls.values()) > 70


def test_server_whose_attempts_take_longer_gets_fewer():
    choice = servers_of()
    slow = choice.servers[0]
    slow.attempts = 3  # they came as the others did, and are still there
    assert {next_url(choice.for_rollout("u", rollout)) for rollout in range(20)} == {URLS[1]}


def test_attempt_that_has_ended_counts_no_more_whatever_its_end():
    choice = servers_of()
    with pytest.raises(RuntimeError), choice.for_rollout("u", 0).next():
        raise RuntimeError("the rollout broke")
    assert [server.attempts for server in choice.servers] == [0, 0]


async def test_every_attempt_at_a_rollout_goes_to_a_server_it_has_not_tried_yet():
    choice = servers_of(3)
    servers = choice.for_rollout("u", 0)
    order = []
    for _ in range(6):
        with servers.next() as server:
            order.append(server.url)
        assert await servers.moves_on(server, None) is False
        for other in {*choice.servers} - {server}:
            other.attempts += 1  # those that it has not tried are busier by far
    assert set(order[:3]) == set(order[3:]) == set(URLS)


async def test_server_that_is_down_gets_no_rollout_for_a_while(clock):
    choice = servers_of()
    with choice.for_rollout("u", 0).next() as down:
        pass
    assert await choice.for_rollout("u", 0).moves_on(down, Pass.ELSEWHERE) is True
    assert clock.slept == [], "another server is up"
    assert down.url not in first_choices(choice, 20)
    clock.now += DOWN_FOR_S
    assert down.url in first_choices(choice, 20)


async def test_server_that_answers_gets_rollouts_again_at_once(clock):
    choice = servers_of()
    choice.servers[0].turned_away()
    choice.servers[0].answered()
    assert set(first_choices(choice, 20)) == set(URLS[:2])


async def test_while_all_servers_are_down_they_are_asked_in_turn_with_growing_waits(clock, monkeypatch):
    monkeypatch.setattr("gate_core.random.uniform", lambda low, high: high)
    servers = servers_of(outage_patience_s=100.0).for_rollout("u", 0)
    asked = []
    while True:
        with servers.next() as server:
            asked.append(server.url)
        clock.now += 0.1
        if not await servers.moves_on(server, Pass.ELSEWHERE):
            break
    assert clock.slept[:6] == [0.5, 1, 2, 4, 8, 15]
    assert {frozenset(pair) for pair in zip(asked, asked[1:], strict=False)} == {frozenset(URLS[:2])}
    assert clock.now > 1100.0, "given up before its patience was over"
    assert clock.now < 1120.0


ELSEWHERE, REFUSED = Pass.ELSEWHERE, Pass.REFUSED


@pytest.mark.parametrize(
    ("answers", "moves"),
    [
        ([(0, REFUSED)], [True]),
        ([(0, REFUSED), (1, ELSEWHERE)], [True, True]),
        ([(0, REFUSED), (1, REFUSED)], [True, False]),
        ([(0, REFUSED), (0, ELSEWHERE), (1, REFUSED)], [True, True, True]),
        ([(0, REFUSED), (1, None), (1, REFUSED)], [True, False, True]),
        ([(0, None)], [False]),
    ],
    ids=["one gave up", "the other just went down", "both gave up", "a new outage", "one was up", "an attempt"],
)
async def test_rollout_ends_only_when_every_server_has_been_down_beyond_patience(clock, answers, moves):
    choice = servers_of()
    servers = choice.for_rollout("u", 0)
    assert [await servers.moves_on(choice.servers[number], answer) for number, answer in answers] == moves


async def test_single_server_that_refuses_ends_the_rollout(clock):
    choice = servers_of(1)
    servers = choice.for_rollout("u", 0)
    assert servers.may_leave is False
    assert await servers.moves_on(choice.servers[0], REFUSED) is False


async def test_without_an_address_there_is_no_choice():
    with pytest.raises(SettingsError, match="NEMO_GYM_URL is not set"):
        ServerChoice.shared(RecipeSettings())


async def test_servers_are_shared_within_one_event_loop():
    settings = RecipeSettings(environment_url="http://a:1,http://b:1")
    choice = ServerChoice.shared(settings)
    assert choice is ServerChoice.shared(RecipeSettings(environment_url="http://a:1,http://b:1"))
    assert len({server.gate for server in choice.servers}) == 2
