"""The simulator of the practice site shows what the real environment shows, and scores as it scores."""

import pytest

from cpu.demonstrations import expert_arguments
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import Split, observation_text
from cpu.practice_site import PracticeServer
from cpu.practice_tasks import TaskKind, make_tasks
from environment_gate import EnvironmentGate
from environment_session import ActionName, BrowserAction, BrowserSession
from observations import read_elements
from recipe_settings import RecipeSettings
from tests.background import serving
from tool_calls import RawCall, to_action

ONE_TASK_OF_EACH_KIND = make_tasks(Split.VALIDATION, len(TaskKind))


@pytest.fixture(scope="module")
def practice_site():
    with serving(PracticeServer("127.0.0.1", 0)) as site:
        yield site.base_url


@pytest.mark.parametrize("task", ONE_TASK_OF_EACH_KIND, ids=lambda task: str(task.kind))
async def test_an_experts_episode_reads_the_same_and_is_a_success_in_both(server, practice_site, task):
    simulated = SimulatedEpisode(task, practice_site)
    settings = RecipeSettings(environment_url=server.url)
    async with BrowserSession(settings, EnvironmentGate(settings)) as session:
        assert await session.seed(practice_site + task.initial_url, task.scoring_spec(practice_site)) is None
        shown = (await session.act(BrowserAction(ActionName.OBSERVE))).observation
        while not simulated.finished:
            assert shown == observation_text(simulated.page)
            action = to_action(RawCall("browser", expert_arguments(simulated)), read_elements(shown))
            simulated.act(action)
            shown = (await session.act(action)).observation
        assert ((await session.verify()).reward, simulated.reward) == (1.0, 1.0)
