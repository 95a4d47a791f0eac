"""A session with the real server is recorded, without its password, and played again without server and browser."""

import json

import pytest

from environment_session import ActionName, BrowserAction, BrowserSession, EnvironmentGate
from episode_record import AttemptRecord
from episode_recording import recording_of
from episode_replay import Recording, ReplayServer
from observations import read_elements
from recipe_settings import RecipeSettings
from secret_masking import MASK, Masker, is_password
from tests.contract.episodes import OBSERVE, element, settings_for

pytestmark = pytest.mark.timeout(120)
SECRET = "hunter2!"


async def log_in(session: BrowserSession, start_page: str) -> list:
    """Return what the server says to a login: observations, errors and the score."""
    assert await session.seed(start_page, {"url_contains": "/next"}) is None
    page = (await session.act(OBSERVE)).observation
    field, button = read_elements(page)[1].id, element(page, "enter")
    assert is_password(page, read_elements(page), field)
    steps = [await session.act(BrowserAction(ActionName.TYPE, element_id=field, text=SECRET))]
    steps += [await session.act(BrowserAction(ActionName.CLICK, element_id=button)), await session.act(OBSERVE)]
    steps += [await session.act(BrowserAction(ActionName.FINISH, answer="in"))]
    return [page, *((step.observation, step.error, step.failure) for step in steps), (await session.verify()).reward]


async def test_a_login_is_recorded_masked_and_replayed(server, site, tmp_path):
    settings = settings_for(server, act_timeout_s=45.0)
    async with BrowserSession(settings, EnvironmentGate(settings)) as session:
        session.exchanges = []
        seen = await log_in(session, f"{site}/login")
    # The server tells the type of no field: a password's line reads like every other one's.
    assert "  [0] input: \n  [1] input: \n" in seen[0] and "/next?u=&p=hunter2%21" in seen[2][0]
    recording = recording_of(AttemptRecord(task_id="log in"), session.exchanges, Masker((SECRET,)))
    path = tmp_path / "recording.json"
    path.write_text(json.dumps(recording))
    assert "hunter2" not in path.read_text()
    async with ReplayServer(Recording.read(path)) as replay:
        settings = RecipeSettings(environment_url=replay.url)
        async with BrowserSession(settings, EnvironmentGate(settings)) as session:
            again = await log_in(session, f"{site}/login")
    assert again[-1] == seen[-1] == 1.0
    assert json.dumps(again) == json.dumps(seen).replace("hunter2%21", MASK)
