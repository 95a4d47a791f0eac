"""The fake environment keeps to the recorded contract of the real server, and its faults strike where they should."""

import pytest

from tests.fake_environment import Do, FakeEnvironment
from tests.recordings import compare_exchange, load_recordings

DEATHS = {"kill_browser": Do.KILL_BROWSER, "kill_renderer": Do.CRASH_PAGE, "kill_driver": Do.KILL_DRIVER}
RECORDINGS = load_recordings()


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
