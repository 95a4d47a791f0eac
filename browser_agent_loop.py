"""The policy's one tool and the agent loop that drives a browser with it, registered with verl as `browser_tool_agent`.

Select it with `actor_rollout_ref.rollout.agent.default_agent_loop=browser_tool_agent`. The loop owns the attempt: it
opens a session before the first turn, runs one tool call a turn, has the environment score the episode and closes the
session whatever happens. A rollout that the environment spoiled is tried again in a fresh session; if it stays invalid
it returns no row or, with NEMO_GYM_BROWSER_DROP_INVALID=0, a flagged one, so that it neither trains nor votes.
"""

import asyncio
import logging
import random
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput

from browser_prompts import first_user_message
from browser_task import BrowserTask, TaskError
from context_tokens import merge_observation, remember_prefixes
from dataset import NeMoGymBrowserDataset
from environment_gate import EnvironmentGate
from environment_session import ActionName, BrowserAction, BrowserSession, StepResult
from episode import Episode, StopReason
from episode_limits import EpisodeLimits, LimitsError
from episode_log import EpisodeLog
from observations import cut_to_tokens, defuse_markup, read_elements
from recipe_settings import RecipeSettings
from rollout_failures import FailureKind, failure_of
from rollout_stats import AttemptReport, RolloutReport
from tool_calls import RawCall, UnusableCall, no_call, read_hermes_calls, to_action

logger = logging.getLogger(__name__)

# A call with a label takes 25 to 30 tokens in Qwen3's vocabulary; a turn with less room can only be cut short.
_MIN_TURN_TOKENS = 32
_MAX_BACKOFF_S = 60.0
# Short, since a row takes part in every forward pass of its batch.
_FLAGGED_PROMPT_TOKENS = 8


class BrowserTool(BaseTool):
    """The tool `browser`: its schema, from `configs/browser_tool.yaml`, is what the policy reads.

    One tool object serves all rollouts of a worker, so it holds no session; the agent loop runs the calls.
    """

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> None:
        """Raise RuntimeError: called only when another agent loop was selected, which could not hold a session."""
        raise RuntimeError(
            "The tool `browser` runs only in its own agent loop: set "
            "actor_rollout_ref.rollout.agent.default_agent_loop=browser_tool_agent"
        )


@register("browser_tool_agent")
class BrowserToolAgentLoop(ToolAgentLoop):
    """One rollout. verl builds one object per rollout, so clients and limits that are shared live in the gate."""

    session_class = BrowserSession

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _require_checked_dataset(self.dataset_cls)
        self.limits = EpisodeLimits.from_section(self.config.get("browser"))
        if self.response_length < _MIN_TURN_TOKENS:
            raise LimitsError(f"data.max_response_length={self.response_length}: no turn fits below {_MIN_TURN_TOKENS}")
        self.settings = RecipeSettings.from_env()
        self.settings.require_environment_url()
        self.gate = EnvironmentGate.shared(self.settings)
        self.episode_log = EpisodeLog(self.settings.episode_log_dir)
        self.added_tokens = tuple(self.tokenizer.get_added_vocab())
        remember_prefixes(self.continuous_token_builder)

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs) -> AgentLoopOutput | list:
        """Return the rollout's row; for an invalid rollout an empty list (verl then has no row of it) or a flagged row.

        Raises TaskError for a dataset row that is no browser task.
        """
        task = BrowserTask.from_row(kwargs)
        request_id = self._make_request_id(priority, self.rollout_config.full_determinism)
        episode, attempts = await self._run_attempts(task, sampling_params, request_id)
        await self.gate.report(RolloutReport(task.global_step, task.uid, task.rollout, episode.reward, tuple(attempts)))
        if episode.failure is None:
            return self._to_output(episode, len(attempts))
        return [] if self.settings.drop_invalid else self._flagged_output(episode, len(attempts), task.global_step)

    async def _run_attempts(
        self, task: BrowserTask, sampling_params: dict[str, Any], request_id: str
    ) -> tuple[Episode, list[AttemptReport]]:
        """Return the last attempt, which is the first valid one if there is one, and what became of each."""
        reports: list[AttemptReport] = []
        lost_s = 0.0
        while True:
            episode = await self._attempt(task, sampling_params, request_id, lost_s)
            reports.append(episode.report())
            self.episode_log.write(episode.record(task, len(reports)))
            failure = episode.failure
            if failure is None:
                return episode, reports
            logger.warning("Attempt %d of rollout %s failed: %s", len(reports), task.rollout_name, failure)
            if not failure.retryable or len(reports) >= self.limits.max_attempts:
                return episode, reports
            wait_s = max(self._backoff_s(len(reports)), min(failure.retry_after_s or 0.0, _MAX_BACKOFF_S))
            lost_s = episode.used_s + wait_s
            if lost_s >= self.limits.episode_deadline_s:
                return episode, reports
            # A fresh request id: the engine must not count the spoiled attempt's prefix as this one's conversation.
            request_id = uuid4().hex
            await asyncio.sleep(wait_s)

    def _backoff_s(self, attempt: int) -> float:
        return min(_MAX_BACKOFF_S, self.limits.retry_backoff_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)

    async def _attempt(
        self, task: BrowserTask, sampling_params: dict[str, Any], request_id: str, lost_s: float
    ) -> Episode:
        episode = Episode(request_id=request_id, sampling_params=sampling_params, lost_s=lost_s)
        async with self.session_class(self.settings, self.gate, self.limits.blocked_patterns) as session:
            episode.session = session
            episode.failure = await session.seed(task.initial_url, task.verifier_metadata)
            if episode.failure is None:
                first_page = await self._act(episode, BrowserAction(ActionName.OBSERVE))
            if episode.failure is None:
                await self._open_prompt(episode, task.messages, first_page)
            while episode.failure is None and episode.stop_reason is None:
                await self._turn(episode)
            if episode.failure is None:
                verdict = await session.verify()
                episode.reward, episode.failure = verdict.reward, verdict.failure
        return episode

    async def _open_prompt(self, episode: Episode, messages: list[dict], observation: str) -> None:
        """Put the start page into the last user message, cut so that the whole prompt fits `max_prompt_length`."""
        page = defuse_markup(observation, self.added_tokens)
        budget = self.limits.max_observation_tokens
        while budget > 0:
            shown = cut_to_tokens(page, self.tokenizer, budget)
            opened = [*messages[:-1], {**messages[-1], "content": first_user_message(messages[-1]["content"], shown)}]
            # Not ct_build_initial_tokens: it would cut an overlong prompt on the left, system prompt and tools first.
            prompt_ids = await self.loop.run_in_executor(
                None, lambda m=opened: self.continuous_token_builder.build_initial_tokens(m, tools=self.tool_schemas)
            )
            if len(prompt_ids) <= self.prompt_length:
                episode.open(opened, prompt_ids)
                return
            budget = min(budget, len(self.tokenizer.encode(shown, add_special_tokens=False)))
            budget -= len(prompt_ids) - self.prompt_length
        evidence = f"task and tools alone exceed data.max_prompt_length={self.prompt_length}"
        episode.failure = failure_of(FailureKind.PROMPT_TOO_LONG, evidence)

    async def _turn(self, episode: Episode) -> None:
        """Run one turn: generate, run the one call, append the observation; or set why the episode is over."""
        room = self.response_length - len(episode.response_mask)
        if room < _MIN_TURN_TOKENS:
            episode.stop_reason = StopReason.CONTEXT_FULL
            return
        output = await self._generate(episode, min(room, self.limits.max_tokens_per_turn))
        if output is None:
            return
        reply = self.tokenizer.decode(output.token_ids)
        call, note, message = await self._read_reply(reply, output.token_ids, episode)
        if isinstance(call, UnusableCall):
            episode.count_unusable(call)
            observation = call.message
            if episode.consecutive_unusable >= self.limits.max_unusable_calls:
                episode.stop_reason = StopReason.UNUSABLE_CALLS
        else:
            episode.count_action(call)
            observation = note + await self._act(episode, call)
        episode.check_limits(self.limits)
        if episode.failure is None and episode.stop_reason is None:
            self._append_observation(episode, message, observation)

    async def _generate(self, episode: Episode, max_tokens: int) -> TokenOutput | None:
        """Return the policy's reply, merged into the episode's tokens; None if the episode ended instead."""
        sampling_params = {**episode.sampling_params, "max_tokens": max_tokens}
        if self.tool_parser.stop_token_ids:
            stops = {*(sampling_params.get("stop_token_ids") or []), *self.tool_parser.stop_token_ids}
            sampling_params["stop_token_ids"] = sorted(stops)
        try:
            with episode.generating():
                async with asyncio.timeout(episode.remaining_s(self.limits)):
                    output = await self.server_manager.generate(
                        request_id=episode.request_id, prompt_ids=episode.token_ids, sampling_params=sampling_params
                    )
        except TimeoutError:
            episode.end_by_deadline()
            return None
        except Exception as error:  # noqa: BLE001 - Ray and every engine raise types of their own; none is the policy's
            episode.failure = failure_of(FailureKind.ENGINE_ERROR, f"{type(error).__name__}: {error}")
            return None
        if not output.token_ids:
            episode.failure = failure_of(FailureKind.ENGINE_ERROR, f"no tokens, stop_reason={output.stop_reason}")
            return None
        builder = self.continuous_token_builder
        logprobs = episode.response_logprobs if (episode.response_logprobs or output.log_probs) else None
        # Not verl's ct_merge_*: they go through a thread pool, where a turn waits longer for the GIL than a merge takes
        # (benchmarks/loop_overhead.py).
        merged = builder.merge_assistant_tokens(episode.token_ids, output.token_ids)
        mask, logprobs = builder.align_response_metadata(
            merged, episode.response_mask, logprobs, assistant_logprobs=output.log_probs or None
        )
        episode.add_reply(merged.token_ids, mask, logprobs, output)
        return output

    async def _read_reply(
        self, reply: str, token_ids: list[int], episode: Episode
    ) -> tuple[BrowserAction | UnusableCall, str, dict]:
        """Return the action (or what is wrong), a note to the policy, and the reply as a chat message."""
        if self.tool_parser_name == "hermes":
            calls = read_hermes_calls(reply)
        else:
            schemas = [tool.tool_schema for tool in self.tools.values()]
            _, parsed = await self.tool_parser.extract_tool_calls(token_ids, schemas)
            calls = [RawCall(call.name, call.arguments) for call in parsed] or no_call()
        if isinstance(calls, UnusableCall):
            return calls, "", {"role": "assistant", "content": reply}
        note = f"Only the first of your {len(calls)} calls was run.\n" if len(calls) > 1 else ""
        call = to_action(calls[0], episode.elements)
        function = {"name": str(calls[0].name), "arguments": {}}
        message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        return call, note, message

    async def _act(self, episode: Episode, action: BrowserAction) -> str:
        """Run one action and return what the policy reads of it; a fatal failure is kept in the episode."""
        step: StepResult = await episode.session.act(action)
        if step.failure is not None and step.failure.fatal:
            episode.end_by_failure(step.failure)
            return ""
        if step.observation:
            episode.elements = read_elements(step.observation)
        if action.name is ActionName.FINISH or step.done:
            episode.stop_reason = StopReason.FINISHED
        return f"The action failed. {step.error}" if step.error else step.observation

    def _append_observation(self, episode: Episode, message: dict, observation: str) -> None:
        """Add the reply and the observation to the conversation, unless no turn would fit behind it."""
        shown = defuse_markup(observation, self.added_tokens)
        previous = [*episode.messages, message]
        # A chat template has a place for a tool response only behind a tool call.
        role = "tool" if "tool_calls" in message else "user"
        updated = [*previous, {"role": role, "content": shown}]
        merged = merge_observation(
            self.continuous_token_builder, previous, updated, episode.token_ids, self.tool_schemas
        )
        # Most observations fit, and then the tokens around them do too; counting first would encode each of them twice.
        if merged.appended_token_count > self.limits.max_observation_tokens:
            updated[-1]["content"] = cut_to_tokens(shown, self.tokenizer, self.limits.max_observation_tokens)
            merged = merge_observation(
                self.continuous_token_builder, previous, updated, episode.token_ids, self.tool_schemas
            )
        mask, logprobs = self.continuous_token_builder.align_response_metadata(
            merged, episode.response_mask, episode.response_logprobs or None
        )
        if len(mask) + _MIN_TURN_TOKENS > self.response_length:
            episode.stop_reason = StopReason.CONTEXT_FULL
            return
        episode.add_context(updated, merged.token_ids, mask, logprobs)

    def _to_output(self, episode: Episode, attempts: int) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=episode.token_ids[: episode.prompt_tokens],
            response_ids=episode.token_ids[episode.prompt_tokens :],
            response_mask=episode.response_mask,
            response_logprobs=episode.response_logprobs or None,
            reward_score=episode.reward,
            num_turns=2 * episode.turns + 1,
            metrics=self._metrics(episode),
            extra_fields=self._extra_fields(episode, attempts),
        )

    def _flagged_output(self, episode: Episode, attempts: int, global_step: int) -> AgentLoopOutput:
        """Return a row that says only why the rollout is invalid: no token of a spoiled attempt, nothing trained.

        The reward of 0 is there because every row needs one; nothing reads it (patches.py, group_stats.py).
        """
        eos = self.tokenizer.eos_token_id
        weights = {"global_steps": global_step, "min_global_steps": global_step, "max_global_steps": global_step}
        return AgentLoopOutput(
            prompt_ids=[eos] * min(_FLAGGED_PROMPT_TOKENS, self.prompt_length),
            response_ids=[eos],
            response_mask=[0],
            response_logprobs=[0.0] if self.rollout_config.calculate_log_probs else None,
            reward_score=0.0,
            num_turns=0,
            metrics=self._metrics(episode),
            extra_fields=weights | self._extra_fields(episode, attempts),
        )

    def _metrics(self, episode: Episode) -> AgentLoopMetrics:
        return AgentLoopMetrics(
            generate_sequences=episode.generation_s,
            tool_calls=episode.session.environment_s,
            num_preempted=episode.num_preempted,
        )

    def _extra_fields(self, episode: Episode, attempts: int) -> dict[str, Any]:
        return {
            **episode.engine_fields,
            "turn_scores": [],
            "tool_rewards": [],
            "env_invalid": episode.failure is not None,
            "failure_kind": str(episode.failure.kind) if episode.failure else "",
            "rollout_row": 0,
            "rollout_rows": 1,
            "attempts": attempts,
            "reward_extra_info": episode.reward_extra_info(),
        }


def _require_checked_dataset(dataset_cls: type | None) -> None:
    """Raise TaskError unless the rows come from the recipe's dataset.

    The dataset is built in the trainer's process, where advantages are computed, and refuses to start there without
    the recipe's patch. A worker can't look into that process, so it insists on the dataset.
    """
    if not (isinstance(dataset_cls, type) and issubclass(dataset_cls, NeMoGymBrowserDataset)):
        raise TaskError(
            f"browser_tool_agent needs rows of NeMoGymBrowserDataset, not of {dataset_cls}: set "
            "data.custom_cls.path=pkg://dataset data.custom_cls.name=NeMoGymBrowserDataset"
        )
