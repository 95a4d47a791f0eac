"""The agent loop to compare with: an environment failure arrives as an ordinary rollout with reward 0.

That is what a tool-calling agent loop does whose session is opened by a tool: the failed reset comes back as text, each
further call answers that there is no session, the policy goes on until it gives up, and the score of the session that
never was is 0 (https://github.com/NVIDIA-NeMo/Gym/issues/2921).
"""

from collections.abc import Mapping
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from browser_agent_loop import BrowserToolAgentLoop
from browser_task import BrowserTask
from environment_session import ActionName, BrowserAction, BrowserSession, StepResult, Verdict
from episode import Episode
from rollout_failures import Failure
from server_choice import Server

NO_SESSION = "no active session; seed_session must be called first"
SEED_FAILED = "!seed_failed"


class _BlindSession(BrowserSession):
    """A session that goes on when its seed has failed, as if nothing had happened."""

    seed_failed = False

    async def seed(self, initial_url: str, verifier_metadata: Mapping[str, Any]) -> Failure | None:
        failure = await super().seed(initial_url, verifier_metadata)
        self.seed_failed = failure is not None
        return None

    async def act(self, action: BrowserAction) -> StepResult:
        if not self.seed_failed:
            return await super().act(action)
        return StepResult("", action.name is ActionName.FINISH, NO_SESSION, None, 0.0)

    async def verify(self) -> Verdict:
        return Verdict(0.0, None, 0.0) if self.seed_failed else await super().verify()


class FailuresAsZerosLoop(BrowserToolAgentLoop):
    """`BrowserToolAgentLoop` without classification: every rollout is a row, none is flagged."""

    session_class = _BlindSession

    async def _attempt(self, episode: Episode, task: BrowserTask, server: Server, may_leave: bool) -> None:
        await super()._attempt(episode, task, server, may_leave)
        if episode.session.seed_failed:
            episode.actions.insert(0, SEED_FAILED)

    def _outputs(self, episode: Episode, attempts: int) -> list[AgentLoopOutput]:
        outputs = super()._outputs(episode, attempts)
        for output in outputs:
            # Without the flags the batch is one that the recipe's patch leaves to verl.
            del output.extra_fields["env_invalid"], output.extra_fields["failure_kind"]
        return outputs
