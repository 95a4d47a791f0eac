"""The policy's one tool and the agent loop that drives a browser with it, registered with verl as `browser_tool_agent`.

Select it with `actor_rollout_ref.rollout.agent.default_agent_loop=browser_tool_agent`. The loop owns the attempt: it
opens a session before the first turn, runs one tool call a turn, has the environment or the judge score the episode,
and closes the session whatever happens. A rollout that the environment spoiled is tried again in a fresh session; if
it stays invalid it returns no row or, with NEMO_GYM_BROWSER_DROP_INVALID=0, a flagged one, so that it neither trains
nor votes.

Each model call is recorded (conversation.py). When a context is full, the rollout goes on in a fresh one as
`browser.context_policy` says; `browser.selection_policy` says which calls the training rows are made of.
"""

import asyncio
import logging
import random
import re
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput

from browser_task import BrowserTask, TaskError
from context_policy import ContextPolicy, summary_memory, window_memories
from context_tokens import ContextWriter, remember_prefixes
from conversation import MIN_TURN_TOKENS, status_of
from dataset import NeMoGymBrowserDataset
from environment_gate import EnvironmentGate
from environment_session import ActionName, BrowserAction, BrowserSession, StepResult
from episode import Episode, StopReason
from episode_limits import EpisodeLimits
from episode_log import EpisodeLog
from episode_record import CallKind
from episode_recording import Recordings
from judge import Evidence, Judge, Outcome
from observations import cut_to_tokens, defuse_markup, read_elements
from recipe_settings import RecipeSettings
from rollout_failures import FailureKind, failure_of
from rollout_output import flagged_output, row_outputs
from rollout_stats import AttemptReport, RolloutReport, ShownEpisode
from secret_masking import Masker
from tool_calls import RawCall, UnusableCall, no_call, read_hermes_calls, to_action
from validation_tables import shown_episode

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 60.0
_THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)


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
        self.settings = RecipeSettings.from_env()
        self.settings.require_environment_url()
        self.gate = EnvironmentGate.shared(self.settings)
        self.judge = Judge.shared(self.settings, self._count_tokens) if self.settings.judge_url else None
        self.masker = Masker.of_settings(self.settings)
        self.episode_log = EpisodeLog(self.settings.episode_log_dir, self.masker)
        self.recordings = Recordings(self.settings.record_dir, self.masker)
        self.added_tokens = tuple(self.tokenizer.get_added_vocab())
        remember_prefixes(self.continuous_token_builder)
        self.writer = ContextWriter(
            self.continuous_token_builder,
            self.tokenizer,
            self.tool_schemas,
            self.limits,
            self.prompt_length,
            self.response_length,
        )

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs) -> list[AgentLoopOutput]:
        """Return the rollout's rows; of an invalid rollout no row (verl then knows nothing of it) or a flagged one.

        Raises TaskError for a dataset row that is no browser task, or one that needs a judge where there is none.
        """
        task = BrowserTask.from_row(kwargs)
        if task.judged and self.judge is None:
            raise TaskError(f"{task.rollout_name} needs a judge, and NEMO_GYM_BROWSER_JUDGE_URL is not set here")
        request_id = self._make_request_id(priority, self.rollout_config.full_determinism)
        episode, attempts = await self._run_attempts(task, sampling_params, request_id)
        shown = self._shown(episode, task, len(attempts))
        report = RolloutReport(task.global_step, task.uid, task.rollout, episode.reward, tuple(attempts), shown)
        await self.gate.report(report)
        if episode.failure is None:
            return self._outputs(episode, len(attempts))
        if self.settings.drop_invalid:
            return []
        eos, logprobs = self.tokenizer.eos_token_id, self.rollout_config.calculate_log_probs
        return [flagged_output(episode, len(attempts), task.global_step, eos, self.prompt_length, logprobs)]

    def _shown(self, episode: Episode, task: BrowserTask, attempts: int) -> ShownEpisode | None:
        """Return the episode for the trackers' tables, if they are asked for."""
        if not (self.config.get("trainer") or {}).get("log_val_generations", 0):
            return None
        return shown_episode(episode.record(task, attempts, final=True), self.masker.knowing(episode.typed_secrets))

    def _outputs(self, episode: Episode, attempts: int) -> list[AgentLoopOutput]:
        """Return the rows of a valid rollout."""
        return row_outputs(episode, attempts)

    async def _run_attempts(
        self, task: BrowserTask, sampling_params: dict[str, Any], request_id: str
    ) -> tuple[Episode, list[AttemptReport]]:
        """Return the last attempt, which is the first valid one if there is one, and what became of each."""
        reports: list[AttemptReport] = []
        lost_s = 0.0
        while True:
            episode = await self._attempt(task, sampling_params, request_id, lost_s)
            reports.append(episode.report())
            wait_s = self._wait_s(episode, len(reports))
            record = episode.record(task, len(reports), final=wait_s is None)
            await self.episode_log.append(record, episode.typed_secrets)
            await self.recordings.keep(record, episode.session.exchanges, episode.typed_secrets)
            if episode.failure is not None:
                failure = self.masker.knowing(episode.typed_secrets).mask(str(episode.failure))
                logger.warning("Attempt %d of rollout %s failed: %s", len(reports), task.rollout_name, failure)
            if wait_s is None:
                return episode, reports
            lost_s = episode.used_s + wait_s
            # A fresh request id: the engine must not count the spoiled attempt's prefix as this one's conversation.
            request_id = uuid4().hex
            await asyncio.sleep(wait_s)

    def _wait_s(self, episode: Episode, attempt: int) -> float | None:
        """Return the seconds to wait before the next attempt; None if there is none."""
        failure = episode.failure
        if failure is None or not failure.retryable or attempt >= self.limits.max_attempts:
            return None
        wait_s = max(self._backoff_s(attempt), min(failure.retry_after_s or 0.0, _MAX_BACKOFF_S))
        return wait_s if episode.used_s + wait_s < self.limits.episode_deadline_s else None

    def _backoff_s(self, attempt: int) -> float:
        return min(_MAX_BACKOFF_S, self.limits.retry_backoff_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)

    async def _attempt(
        self, task: BrowserTask, sampling_params: dict[str, Any], request_id: str, lost_s: float
    ) -> Episode:
        episode = Episode(request_id=request_id, sampling_params=sampling_params, lost_s=lost_s)
        async with self.session_class(self.settings, self.gate, self.limits.blocked_patterns) as session:
            episode.session = session
            session.exchanges = self.recordings.new_exchanges()
            episode.failure = await session.seed(task.initial_url, task.verifier_metadata)
            if episode.failure is None:
                first_page = await self._act(episode, BrowserAction(ActionName.OBSERVE))
            if episode.failure is None:
                await self._open(episode, task, first_page)
            while episode.failure is None and episode.stop_reason is None:
                with episode.timing_turn():
                    await self._turn(episode, task)
            if episode.failure is None and not task.judged:
                verdict = await session.verify()
                episode.reward, episode.failure = verdict.reward, verdict.failure
        if episode.failure is None and task.judged:
            await self._judge(episode, task)
        if episode.failure is None:
            episode.plan(self.limits, self.prompt_length, self.response_length)
        if episode.cut_calls:
            logger.warning("Rollout %s: %d model calls fit into no row", task.rollout_name, episode.cut_calls)
        return episode

    async def _judge(self, episode: Episode, task: BrowserTask) -> None:
        """Have the judge score the episode, whose browser is closed; without a verdict it is invalid.

        The judge asks again by itself with what the episode left, so an attempt is never repeated for its sake.
        """
        if episode.stop_reason is StopReason.BROWSER_WRECKED:
            episode.reward = 0.0
            return
        last_page, observations = defuse_markup(episode.page, self.added_tokens), episode.observations
        if last_page not in observations[-1]:  # what the last action led to, which no further turn was shown
            observations = [*observations, last_page]
        evidence = Evidence(tuple(episode.ledger), tuple(observations))
        judgement = await self.judge.score(task.question, episode.answer, evidence, task.reference_answer)
        episode.judgement = judgement
        if judgement.verdict.outcome is Outcome.UNUSABLE:
            episode.failure = failure_of(judgement.verdict.kind, judgement.verdict.reason)
        else:
            episode.reward = float(judgement.verdict.outcome is Outcome.SUCCESS)

    def _count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    async def _open(self, episode: Episode, task: BrowserTask, observation: str) -> None:
        """Start the first context, with the start page."""
        page = defuse_markup(observation, self.added_tokens)
        episode.observations.append(page)
        episode.trace.start(observation)
        if not await self.writer.open(episode.conversation, task.messages, page):
            evidence = f"task and tools alone exceed {self.writer.longest_prompt} tokens of prompt"
            episode.failure = failure_of(FailureKind.PROMPT_TOO_LONG, evidence)

    async def _turn(self, episode: Episode, task: BrowserTask) -> None:
        """Run one turn: generate, run the one call, put what came back before the policy; or set why it is over."""
        room = self.writer.room(episode.conversation)
        if room < MIN_TURN_TOKENS:
            episode.stop_reason = StopReason.CONTEXT_FULL
            return
        reply = await self._reply(episode, min(room, self.limits.max_tokens_per_turn))
        if reply is None:
            return
        call, note, message = reply
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
            await self._go_on(episode, task, message, observation)

    async def _reply(
        self, episode: Episode, max_tokens: int
    ) -> tuple[BrowserAction | UnusableCall, str, dict[str, Any]] | None:
        """Return the policy's reply as `_read_reply` does, after the retries that it may have; None if it is over."""
        for retries_left in range(self.limits.retry_unusable_calls, -1, -1):
            output = await self._generate(episode, max_tokens)
            if output is None:
                return None
            text = self.tokenizer.decode(output.token_ids)
            reply = await self._read_reply(text, output.token_ids, episode)
            kept = retries_left == 0 or not isinstance(reply[0], UnusableCall)
            self._record(episode, output, max_tokens, CallKind.TURN if kept else CallKind.DISCARDED, text)
            if kept:
                return reply
            episode.count_discarded(reply[0])
        return None

    def _record(self, episode: Episode, output: TokenOutput, max_tokens: int, kind: CallKind, text: str) -> None:
        stops = {self.tokenizer.eos_token_id, *self.tool_parser.stop_token_ids}
        episode.add_reply(output, status_of(output.token_ids, max_tokens, stops), kind, text)

    async def _generate(self, episode: Episode, max_tokens: int) -> TokenOutput | None:
        """Return what the engine generates for the context; None if the episode ended instead."""
        sampling_params = {**episode.sampling_params, "max_tokens": max_tokens}
        if self.tool_parser.stop_token_ids:
            stops = {*(sampling_params.get("stop_token_ids") or []), *self.tool_parser.stop_token_ids}
            sampling_params["stop_token_ids"] = sorted(stops)
        try:
            with episode.generating():
                async with asyncio.timeout(episode.remaining_s(self.limits)):
                    output = await self.server_manager.generate(
                        request_id=episode.request_id,
                        prompt_ids=episode.conversation.token_ids,
                        sampling_params=sampling_params,
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
        if output.log_probs and len(output.log_probs) != len(output.token_ids):
            evidence = f"{len(output.log_probs)} log-probs for {len(output.token_ids)} tokens"
            episode.failure = failure_of(FailureKind.ENGINE_ERROR, evidence)
            return None
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
        episode.trace.note_step(step)
        if step.failure is not None and step.failure.fatal:
            episode.end_by_failure(step.failure)
            return ""
        episode.page_is_last = bool(step.observation)
        if step.observation:
            episode.page, episode.elements = step.observation, read_elements(step.observation)
        if action.name is ActionName.FINISH or step.done:
            episode.stop_reason = StopReason.FINISHED
        return f"The action failed. {step.error}" if step.error else step.observation

    async def _go_on(self, episode: Episode, task: BrowserTask, message: dict, observation: str) -> None:
        """Put an observation before the policy: behind its reply or, if the context is full, in a fresh one."""
        shown = defuse_markup(observation, self.added_tokens)
        if len(episode.observations) <= len(episode.ledger):  # what answers an unusable call is no action's outcome
            episode.observations.append(shown)
        conversation = episode.conversation
        if self.writer.append(conversation, message, shown):
            return
        policy = self.limits.context_policy
        if policy == ContextPolicy.APPEND or conversation.roots >= self.limits.max_rows_per_rollout:
            episode.stop_reason = StopReason.CONTEXT_FULL
            return
        memories = self._window(episode) if policy == ContextPolicy.WINDOW else await self._summary(episode, message)
        if episode.failure is not None or episode.stop_reason is not None:
            return
        if not episode.page_is_last:
            # A fresh context without a page would leave the policy blind; what is cut to fit is cut at the end.
            shown = f"{defuse_markup(episode.page, self.added_tokens)}\n\n{shown}"
        if not await self.writer.open(conversation, task.messages, shown, memories):
            episode.stop_reason = StopReason.CONTEXT_FULL

    def _window(self, episode: Episode) -> Iterable[str]:
        """Return what a fresh context may tell of the turns so far, the fullest text first."""
        window, longest = self.limits.window_observations, self.limits.max_observation_tokens
        recent = [cut_to_tokens(page, self.tokenizer, longest) for page in episode.observations[-window:]]
        return window_memories(episode.ledger, [*episode.observations[:-window], *recent], window)

    async def _summary(self, episode: Episode, message: dict) -> Iterable[str]:
        """Return what the policy writes down for a fresh context; nothing if the episode ended over it."""
        if not self.writer.ask_for_summary(episode.conversation, message):
            episode.stop_reason = StopReason.CONTEXT_FULL
            return ()
        output = await self._generate(episode, self.limits.max_summary_tokens)
        if output is None:
            return ()
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        self._record(episode, output, self.limits.max_summary_tokens, CallKind.SUMMARY, text)
        episode.check_limits(self.limits)
        return (summary_memory(defuse_markup(_THOUGHT.sub("", text), self.added_tokens)),)


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
