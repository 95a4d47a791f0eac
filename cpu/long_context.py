"""A simulated episode whose context is compacted, as the agent loop does it to a real one.

The scripted expert's demonstrations and the policy's evaluation both run on it, so the policy is trained on the very
contexts that it meets.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from browser_prompts import SUMMARY_REQUEST, SYSTEM_PROMPT, first_user_message, fresh_user_message
from context_policy import ContextPolicy, action_line, summary_memory, window_memories
from conversation import MIN_TURN_TOKENS, summary_reserve
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import observation_text
from episode import StopReason
from observations import read_elements
from tool_calls import UnusableCall, read_hermes_calls, to_action


@dataclass(frozen=True)
class ContextLimits:
    """How much of an episode the policy reads at once, in tokens, and how long it may go on.

    The defaults are those of the benchmark: a flawless episode of nine turns passes the budget twice to four times, and
    no episode fits one context.
    """

    policy: ContextPolicy = ContextPolicy.WINDOW
    """`browser.context_policy`"""
    budget: int = 184
    """`browser.context_budget_tokens`"""
    window: int = 1
    """`browser.window_observations`"""
    max_prompt: int = 160
    """`data.max_prompt_length`"""
    max_response: int = 224
    """`data.max_response_length`; room for the reply after a prompt as long as the budget, a request and a summary."""
    max_summary: int = 32
    """`browser.max_summary_tokens`"""
    max_reply: int = 32
    """`browser.max_tokens_per_turn`"""
    max_turns: int = 12
    """`browser.max_turns`: room for one wrong item that is put back, and not for two."""
    max_unusable: int = 3
    """`browser.max_unusable_calls`"""

    def overrides(self) -> list[str]:
        """Return the Hydra overrides that set these limits."""
        return [
            f"browser.context_policy={self.policy}",
            f"browser.context_budget_tokens={self.budget}",
            f"browser.window_observations={self.window}",
            f"browser.max_summary_tokens={self.max_summary}",
            f"browser.max_tokens_per_turn={self.max_reply}",
            f"browser.max_turns={self.max_turns}",
            f"browser.max_unusable_calls={self.max_unusable}",
            f"data.max_prompt_length={self.max_prompt}",
            f"data.max_response_length={self.max_response}",
        ]


@dataclass(frozen=True)
class Rendering:
    """Messages as the tokens that the policy reads."""

    tokenizer: PreTrainedTokenizerFast
    schema: dict
    """The policy's one tool."""

    def prompt(self, messages: list[dict]) -> list[int]:
        """Return the ids of the messages and of the opening of the policy's next reply."""
        text = self.tokenizer.apply_chat_template(
            messages, tools=[self.schema], tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass
class LongEpisode:
    """An episode under way: the context at hand, those before it, and why it is over."""

    episode: SimulatedEpisode
    limits: ContextLimits
    rendering: Rendering
    messages: list[dict] = field(default_factory=list)
    """The context at hand."""
    prompt_ids: list[int] = field(default_factory=list)
    """The context at hand as the policy reads it before its next reply."""
    root_tokens: int = 0
    """Length of the prompt that opened the context at hand."""
    contexts: list[list[dict]] = field(default_factory=list)
    """Contexts that are closed; of an episode that is over all of them, each a row."""
    summarising: bool = False
    """Whether the next reply is a summary."""
    turns: int = 0
    stop_reason: StopReason | None = None
    _actions: list[str] = field(default_factory=list)
    _observations: list[str] = field(default_factory=list)
    _unusable: int = 0
    _at_hand: str = ""
    """What a fresh context shows as the page at hand."""

    def __post_init__(self) -> None:
        page = observation_text(self.episode.page)
        self._observations.append(page)
        self._open([first_user_message(self.episode.task.question, page)])

    @property
    def compactions(self) -> int:
        """Return how often a fresh context took the place of a full one."""
        return max(0, len(self.contexts) - (self.stop_reason is not None))

    def take(self, reply: str) -> None:
        """Run one reply of the policy, without its end-of-turn token: an action or, if one is due, a summary."""
        self.messages.append({"role": "assistant", "content": reply})
        if self.summarising:
            self.summarising = False
            self._open_fresh([summary_memory(reply)])
            return
        self.turns += 1
        role, observation = self._act(reply)
        if self.episode.finished:
            self._end(StopReason.FINISHED)
        elif self._unusable >= self.limits.max_unusable:
            self._end(StopReason.UNUSABLE_CALLS)
        elif self.turns >= self.limits.max_turns:
            self._end(StopReason.MAX_TURNS)
        else:
            self._show(role, observation)

    def _act(self, reply: str) -> tuple[str, str]:
        """Return the role and the content of the message that answers the reply."""
        role, answer = self._run(reply)
        page = observation_text(self.episode.page)
        # A fresh context must hold the page, and what was wrong with the call too.
        self._at_hand = f"{page}\n\n{answer}" if self._unusable else answer
        return role, answer

    def _run(self, reply: str) -> tuple[str, str]:
        elements = read_elements(observation_text(self.episode.page))
        calls = read_hermes_calls(reply)
        if isinstance(calls, UnusableCall):
            self._unusable += 1
            return "user", calls.message
        action = to_action(calls[0], elements)
        if isinstance(action, UnusableCall):
            self._unusable += 1
            return "tool", action.message
        self._unusable = 0
        observation = self.episode.act(action)
        self._actions.append(action_line(action, elements))
        self._observations.append(observation)
        note = f"Only the first of your {len(calls)} calls was run.\n" if len(calls) > 1 else ""
        return "tool", note + observation

    def _show(self, role: str, observation: str) -> None:
        """Add the observation to the context, or do what the context policy does where it does not fit."""
        extended = [*self.messages, {"role": role, "content": observation}]
        ids = self.rendering.prompt(extended)
        room = self.limits.max_response - (len(ids) - self.root_tokens) - self._reserve()
        if len(ids) <= self.limits.budget and room >= MIN_TURN_TOKENS:
            self.messages, self.prompt_ids = extended, ids
            return
        match self.limits.policy:
            case ContextPolicy.APPEND:
                self._end(StopReason.CONTEXT_FULL)
            case ContextPolicy.WINDOW:
                self._open_fresh(window_memories(self._actions, self._observations, self.limits.window))
            case ContextPolicy.SUMMARY:
                self.messages.append({"role": role, "content": SUMMARY_REQUEST})
                self.prompt_ids = self.rendering.prompt(self.messages)
                self.summarising = True

    def _reserve(self) -> int:
        if self.limits.policy is not ContextPolicy.SUMMARY:
            return 0
        return summary_reserve(self.rendering.tokenizer, self.limits.max_summary)

    def _open_fresh(self, memories: Iterable[str]) -> None:
        self.contexts.append(self.messages)
        task = self.episode.task.question
        self._open(fresh_user_message(task, memory, self._at_hand) for memory in memories)

    def _open(self, contents: Iterable[str]) -> None:
        """Start a context with the first user message that fits the longest prompt, or else with the last one, uncut.

        The agent loop cuts the page then; with the benchmark's limits every page of the practice site fits.
        """
        for content in contents:
            self.messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]
            self.prompt_ids = self.rendering.prompt(self.messages)
            if len(self.prompt_ids) <= min(self.limits.max_prompt, self.limits.budget):
                break
        self.root_tokens = len(self.prompt_ids)

    def _end(self, reason: StopReason) -> None:
        self.stop_reason = reason
        self.contexts.append(self.messages)
