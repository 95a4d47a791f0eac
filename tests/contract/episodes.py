"""What the contract tests' episodes have in common."""

from collections.abc import Mapping
from typing import Any

import aiohttp

from cpu.gym_server import GymServer
from environment_session import ActionName, BrowserAction
from recipe_settings import RecipeSettings

VERIFY_BODY = {
    "responses_create_params": {"input": ""},
    "response": {
        "id": "episode",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "tools": [],
    },
}
OBSERVE = BrowserAction(ActionName.OBSERVE)


def settings_for(server: GymServer, **changes: float) -> RecipeSettings:
    """Return settings for the server, with a short patience for outages."""
    return RecipeSettings(environment_url=server.url, outage_patience_s=5.0, **changes)


def element(observation: str, label: str) -> int:
    """Return the id of the element whose line ends in the label, as in `  [0] a: next page`."""
    line = next(line for line in observation.splitlines() if line.rstrip().endswith(label))
    return int(line.partition("[")[2].partition("]")[0])


async def exchange(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> tuple[int, str]:
    """Return status and text of a call made without BrowserSession, which asks for a score only once."""
    async with http.post(url, json=body) as response:
        return response.status, await response.text()
