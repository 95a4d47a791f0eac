"""The fake environment keeps to the recorded contract of the real server, and its faults strike where they should."""

import aiohttp
import pytest

from cpu.demonstrations import expert_arguments
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import Split, observation_text, page_at
from cpu.practice_tasks import TaskKind, make_tasks
from observations import read_elements
from tests.fake_environment import COOKIE, Do, FakeEnvironment, Fault
from tests.practice_environment import practice_browsers
from tests.recordings import compare_exchange, load_recordings
from tool_calls import RawCall, to_action

DEATHS = {"kill_browser": Do.KILL_BROWSER, "kill_renderer": Do.CRASH_PAGE, "kill_driver": Do.KILL_DRIVER}
RECORDINGS = load_recordings()
START = "site/index.html"
VERIFY_BODY = {
    "responses_create_params": {"input": ""},
    "response": dict.fromkeys(
        ("id", "created_at", "model", "object", "output", "tool_choice", "parallel_tool_calls", "tools")
    ),
}
SITE_URL = "http://127.0.0.1:8077"
ONE_TASK_OF_EACH_KIND = make_tasks(Split.VALIDATION, len(TaskKind))


class Client:
    """One session's cookie jar."""

    def __init__(self, environment: FakeEnvironment) -> None:
        self.url = environment.url
        self.http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc_info):
        await self.http.close()

    async def post(self, path, **body):
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json(), response.headers

    async def seed(self, url=START, **spec):
        return (await self.post("/seed_session", initial_url=url, verifier_metadata=spec))[0]

    async def act(self, name, **arguments):
        return (await self.post(f"/browser_{name}", **arguments))[1]

    async def reward(self):
        return (await self.post("/verify", **VERIFY_BODY))[1]["reward"]


@pytest.mark.parametrize("name", RECORDINGS)
async def test_fake_answers_as_the_real_server_did(name):
    async with FakeEnvironment() as environment:

        async def bring_about(event: str) -> None:
            if event == "stop_server":
                await environment.stop()
            elif event == "start_server":
                await environment.start()
            else:
                environment.kill_browsers(DEATHS[event])

        assert await compare_exchange(environment.url, RECORDINGS[name], bring_about) == []


# The fault script


async def test_step_counts_the_tool_calls_of_a_session_whatever_their_path():
    faults = [Fault(Do.ERROR, step=3, text="struck")]
    async with FakeEnvironment(faults=faults) as environment, Client(environment) as one, Client(environment) as two:
        for client in (one, two):
            assert await client.seed(answer_equals="x") == 200
            errors = [(await client.act(name))["error"] for name in ("observe", "observe", "finish", "observe")]
            assert errors == [None, None, "struck", None]
            assert await client.reward() == 0.0


async def test_step_strikes_no_seed_no_verify_and_no_close():
    async with FakeEnvironment(faults=[Fault(Do.STATUS, step=1)]) as environment, Client(environment) as client:
        assert await client.seed(answer_equals="") == 200
        assert (await client.post("/browser_observe"))[0] == 500
        assert await client.reward() == 1.0
        assert (await client.post("/close_session"))[:2] == (200, {"closed": True})


async def broken_sessions(seed, sessions=60, **fault):
    """Return the numbers of the sessions whose seed fails, after as many seeds, each on a cookie of its own."""
    faults = [Fault(Do.STATUS, path="/seed_session", **fault)]
    async with FakeEnvironment(faults=faults, seed=seed) as environment:
        statuses = []
        for _ in range(sessions):
            async with Client(environment) as client:
                statuses.append(await client.seed(url="about:blank"))
    return {number for number, status in enumerate(statuses, start=1) if status != 200}


async def test_share_strikes_the_same_sessions_every_time_and_others_with_another_seed():
    first = await broken_sessions(seed=1, share=0.5)
    assert first == await broken_sessions(seed=1, share=0.5)
    assert first != await broken_sessions(seed=2, share=0.5)
    assert 15 < len(first) < 45


async def test_greater_share_strikes_the_sessions_of_a_smaller_one_too():
    some = await broken_sessions(seed=1, share=0.3)
    most = await broken_sessions(seed=1, share=0.91)
    assert some < most
    assert await broken_sessions(seed=1, share=0.0) == set()
    assert len(await broken_sessions(seed=1, share=1.0)) == 60


async def test_share_is_met_over_many_sessions():
    async with FakeEnvironment(seed=3) as environment:
        fault = Fault(Do.STATUS, share=0.91)
        places = [environment.place("/seed_session", session) for session in range(1, 4001)]
    assert sum(map(fault.fits, places)) / 4000 == pytest.approx(0.91, abs=0.015)


@pytest.mark.parametrize(
    ("site", "struck"), [(None, True), ("http://train.", True), ("http://validation.", False)], ids=str
)
async def test_a_fault_may_be_meant_for_one_site(site, struck):
    fault = Fault(Do.STATUS, site=site)
    async with FakeEnvironment() as environment:
        assert fault.fits(environment.place("/seed_session", 1, start="http://train.test/")) is struck
        assert fault.fits(environment.place("/browser_click", 1, step=3, start="http://train.test/")) is struck


async def test_the_site_of_a_session_is_where_it_was_seeded():
    faults = [Fault(Do.ERROR, site=SITE_URL, path="/browser_observe", text="struck")]
    browsers = practice_browsers(SITE_URL, "http://other.test")
    async with FakeEnvironment(faults=faults, browser_factory=browsers) as environment:
        errors = []
        for start in (f"{SITE_URL}/", "http://other.test/"):
            async with Client(environment) as client:
                await client.seed(start)
                errors.append((await client.act("observe"))["error"])
    assert errors == ["struck", None]


async def test_conditions_of_a_fault_hold_together():
    faults = [Fault(Do.ERROR, path="/browser_observe", session=2, step=2, text="struck", times=1)]
    async with FakeEnvironment(faults=faults) as environment, Client(environment) as one, Client(environment) as two:
        errors = []
        for client in (one, two):
            await client.seed()
            errors += [(await client.act("observe"))["error"] for _ in range(3)]
    assert errors == [None, None, None, None, "struck", None]


async def test_retry_after_is_the_answers_header():
    faults = [Fault(Do.STATUS, path="/seed_session", status=429, text="slow down", retry_after="7", times=1)]
    async with FakeEnvironment(faults=faults) as environment, Client(environment) as client:
        status, body, headers = await client.post("/seed_session")
        assert (status, body, headers["Retry-After"]) == (429, "slow down", "7")
        assert "Retry-After" not in (await client.post("/seed_session"))[2]


async def test_connections_that_the_server_closes_lose_no_session():
    async with FakeEnvironment() as environment, Client(environment) as client:
        await client.seed()
        await environment.close_idle_connections()
        assert "TITLE: Home" in (await client.act("observe"))["observation"]


# The practice site without a browser


@pytest.fixture
async def practice():
    async with FakeEnvironment(browser_factory=practice_browsers(SITE_URL)) as environment:
        yield environment


@pytest.mark.parametrize("task", ONE_TASK_OF_EACH_KIND, ids=lambda task: str(task.kind))
async def test_practice_task_reads_as_in_the_page_model_and_is_scored_one(practice, task):
    simulated = SimulatedEpisode(task, SITE_URL)
    async with Client(practice) as client:
        assert await client.seed(SITE_URL + task.initial_url, **task.scoring_spec(SITE_URL)) == 200
        shown = await client.act("observe")
        while True:
            assert shown == {"observation": observation_text(simulated.page), "done": False, "error": None}
            action = to_action(RawCall("browser", expert_arguments(simulated)), read_elements(shown["observation"]))
            arguments = {"element_id": action.element_id, "text": action.text, "answer": action.answer}
            simulated.act(action)
            shown = await client.act(action.name, **{k: v for k, v in arguments.items() if v is not None})
            if simulated.finished:
                break
        assert await client.reward() == simulated.reward == 1.0


@pytest.mark.parametrize("task", ONE_TASK_OF_EACH_KIND, ids=lambda task: str(task.kind))
async def test_practice_task_that_is_not_solved_is_scored_zero(practice, task):
    async with Client(practice) as client:
        await client.seed(SITE_URL + task.initial_url, **task.scoring_spec(SITE_URL))
        await client.act("observe")
        await client.act("finish", answer="nothing")
        assert await client.reward() == 0.0


@pytest.mark.parametrize(
    "path", ["/delta/12", "/delta/12/search?q=tea+bus", "/delta/12/none", "/", "/delta/12/shop?x=*~"]
)
async def test_practice_page_can_be_navigated_to(practice, path):
    async with Client(practice) as client:
        await client.seed(f"{SITE_URL}/delta/12")
        shown = (await client.act("navigate", url=SITE_URL + path))["observation"]
    assert shown == observation_text(page_at(SITE_URL + path))


@pytest.mark.parametrize(("written", "shown"), [("", "/"), ("/delta/12/a b?q=c d", "/delta/12/a%20b?q=c%20d")])
async def test_address_is_shown_as_a_browser_writes_it(practice, written, shown):
    async with Client(practice) as client:
        await client.seed(f"{SITE_URL}/delta/12")
        observation = (await client.act("navigate", url=SITE_URL + written))["observation"]
    assert observation.split("\n")[0] == f"URL: {SITE_URL}{shown}"


async def test_practice_browser_refuses_what_a_browser_refuses(practice):
    async with Client(practice) as client:
        await client.seed(f"{SITE_URL}/delta/12/club")
        await client.act("observe")
        errors = [
            (await client.act("type", element_id=1, text="mia"))["error"],
            (await client.act("click", element_id=9))["error"],
            (await client.act("navigate", url="http://made-up.test/"))["error"],
            (await client.act("navigate", url="http://127.0.0.1:8078/delta/12"))["error"],
        ]
    assert "type failed: ElementHandle.fill: Error: Element is not an <input>" in errors[0]
    assert errors[1] == "click failed: 'element_id 9 not in last observation; call browser_observe first'"
    assert "net::ERR_NAME_NOT_RESOLVED" in errors[2]
    assert "net::ERR_CONNECTION_REFUSED" in errors[3]


async def test_practice_browsers_share_nothing_and_die_one_by_one():
    faults = [Fault(Do.KILL_BROWSER, session=1, step=2)]
    factory = practice_browsers(SITE_URL)
    async with FakeEnvironment(faults=faults, browser_factory=factory) as environment:
        async with Client(environment) as one, Client(environment) as two:
            for client, path in ((one, "/delta/12/list"), (two, "/delta/12/shop")):
                await client.seed(SITE_URL + path)
            shown = [(await client.act("observe"))["observation"].split("\n")[0] for client in (one, two)]
            assert shown == [f"URL: {SITE_URL}/delta/12/list", f"URL: {SITE_URL}/delta/12/shop"]
            assert "has been closed" in (await one.act("observe"))["error"]
            assert (await two.act("observe"))["error"] is None
            assert {cookie.key for cookie in one.http.cookie_jar} == {COOKIE}
