"""What the policy reads, as tokens: prompts that open a context, and observations merged into it.

verl's continuous-token builder does the merging: for each observation it renders a made-up conversation with and
without it and keeps the difference. What never changes from turn to turn is taken out of that here; what comes out is
what the builder gives. Measured by benchmarks/loop_overhead.py.
"""

import asyncio
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult

from browser_prompts import SUMMARY_REQUEST, first_user_message, fresh_user_message
from context_policy import ContextPolicy
from conversation import MIN_TURN_TOKENS, Conversation, summary_reserve
from episode_limits import EpisodeLimits, LimitsError
from observations import cut_to_tokens

_LONGEST_PREFIX = 3  # system, user, assistant
_MOST_PREFIXES = 16
_PREFIXES: weakref.WeakKeyDictionary[Any, dict[type, dict[str, list[int]]]] = weakref.WeakKeyDictionary()
_TOOLS_MATTER: weakref.WeakKeyDictionary[Any, dict[type, bool]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ContextWriter:
    """Writes into a rollout's context within its limits. Raises LimitsError if no turn fits into a row."""

    builder: ContinuousTokenBuilder
    tokenizer: Any
    tools: list[dict]
    """Schemas of the policy's tools."""
    limits: EpisodeLimits
    prompt_length: int
    """data.max_prompt_length."""
    response_length: int
    """data.max_response_length."""

    def __post_init__(self) -> None:
        if self.response_length < MIN_TURN_TOKENS + self.reserve:
            summary = f" beside a summary of {self.limits.max_summary_tokens}" if self.reserve else ""
            raise LimitsError(
                f"data.max_response_length={self.response_length}: no turn of {MIN_TURN_TOKENS} tokens fits{summary}"
            )

    @cached_property
    def reserve(self) -> int:
        """Tokens of a row that are kept free for the request of a summary and the summary."""
        if self.limits.context_policy != ContextPolicy.SUMMARY:
            return 0
        return summary_reserve(self.tokenizer, self.limits.max_summary_tokens)

    @property
    def longest_prompt(self) -> int:
        """Tokens that a root prompt may take."""
        return min(self.prompt_length, self.limits.context_budget_tokens or self.prompt_length)

    def room(self, conversation: Conversation) -> int:
        """Return how many tokens the next reply may take."""
        return self.response_length - conversation.response_tokens - self.reserve

    async def open(
        self, conversation: Conversation, messages: list[dict], page: str, memories: Iterable[str] = ("",)
    ) -> bool:
        """Start a context with the task's messages and the page, and with the first of the memories that fits.

        With the last memory the page is cut until the prompt fits. Return whether it did: if not, task and tools alone
        are too long, and the conversation is as it was.
        """
        budget, memory = self.limits.max_observation_tokens, ""
        shown = cut_to_tokens(page, self.tokenizer, budget)
        for memory in memories:
            opened, prompt_ids = await self._render(messages, memory, shown)
            if len(prompt_ids) <= self.longest_prompt:
                conversation.open(opened, prompt_ids)
                return True
        while True:
            budget = min(budget, len(self.tokenizer.encode(shown, add_special_tokens=False)))
            budget -= len(prompt_ids) - self.longest_prompt
            if budget <= 0:
                return False
            shown = cut_to_tokens(page, self.tokenizer, budget)
            opened, prompt_ids = await self._render(messages, memory, shown)
            if len(prompt_ids) <= self.longest_prompt:
                conversation.open(opened, prompt_ids)
                return True

    async def _render(self, messages: list[dict], memory: str, page: str) -> tuple[list[dict], list[int]]:
        """Return the messages with page and memory in the last of them, and their tokens."""
        task = messages[-1]["content"]
        text = fresh_user_message(task, memory, page) if memory else first_user_message(task, page)
        opened = [*messages[:-1], {**messages[-1], "content": text}]
        # Not ct_build_initial_tokens: it would cut an overlong prompt on the left, system prompt and tools first.
        prompt_ids = await asyncio.get_running_loop().run_in_executor(
            None, lambda: self.builder.build_initial_tokens(opened, tools=self.tools)
        )
        return opened, prompt_ids

    def append(self, conversation: Conversation, message: dict, observation: str) -> bool:
        """Append the reply's message and an observation; return False, and append nothing, if no turn fits behind it.

        The observation is cut to the limits, with a visible mark. A prompt longer than the budget does not fit.
        """
        longest, updated, merged = self.limits.max_observation_tokens, *self._merge(conversation, message, observation)
        # Most observations fit, and then the tokens around them do too; counting first would encode each of them twice.
        if merged.appended_token_count > longest:
            updated, merged = self._merge(conversation, message, cut_to_tokens(observation, self.tokenizer, longest))
        budget = self.limits.context_budget_tokens
        if budget is not None and len(merged.token_ids) > budget:
            return False
        return self._take(conversation, updated, merged, MIN_TURN_TOKENS + self.reserve)

    def ask_for_summary(self, conversation: Conversation, message: dict) -> bool:
        """Append the reply's message and the request for a summary; return False if there is no room for one."""
        updated, merged = self._merge(conversation, message, SUMMARY_REQUEST)
        return self._take(conversation, updated, merged, self.limits.max_summary_tokens)

    def _merge(self, conversation: Conversation, message: dict, content: str) -> tuple[list[dict], MergeResult]:
        previous = [*conversation.messages, message]
        # A chat template has a place for a tool response only behind a tool call.
        updated = [*previous, {"role": "tool" if "tool_calls" in message else "user", "content": content}]
        return updated, merge_observation(self.builder, previous, updated, conversation.token_ids, self.tools)

    def _take(self, conversation: Conversation, messages: list[dict], merged: MergeResult, room: int) -> bool:
        """Take over what was merged if so many tokens fit behind it; return whether they do."""
        removed = merged.removed_prefix_token_count
        prompt_tokens = len(merged.token_ids) if conversation.would_break(removed) else conversation.prompt_tokens
        response_tokens = len(merged.token_ids) - prompt_tokens
        if prompt_tokens > self.longest_prompt or response_tokens + room > self.response_length:
            return False
        conversation.extend(messages, merged.token_ids, removed)
        return True


def merge_observation(
    builder: ContinuousTokenBuilder, previous: list[dict], updated: list[dict], token_ids: list[int], tools: list[dict]
) -> MergeResult:
    """Return the tokens of a rollout with the messages appended that `updated` has and `previous` has not."""
    needed = tools if _tools_matter(builder, tools) else None
    return builder.merge_context_tokens(previous, updated, token_ids, tools=needed)


def remember_prefixes(builder: ContinuousTokenBuilder) -> None:
    """Let the builder render the made-up conversation without the observation once, and not at every turn."""
    known = _PREFIXES.setdefault(builder.tokenizer, {}).setdefault(builder.__class__, {})
    render = builder._render_tokens

    def render_once(messages: list[dict], *, add_generation_prompt: bool, tools: list[dict] | None = None) -> list[int]:
        if add_generation_prompt or tools is not None or len(messages) > _LONGEST_PREFIX:
            return render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        key = repr(messages)
        if key not in known:
            if len(known) >= _MOST_PREFIXES:
                known.clear()
            known[key] = render(messages, add_generation_prompt=False)
        return known[key]

    builder._render_tokens = render_once


def _tools_matter(builder: ContinuousTokenBuilder, tools: list[dict]) -> bool:
    """Return whether the chat template renders a later message differently when it is given the tools.

    The tools' schemas are the longest part of the made-up conversation, and templates such as Qwen's put them into the
    system message alone.
    """
    known = _TOOLS_MATTER.setdefault(builder.tokenizer, {})
    if builder.__class__ not in known:
        call = {"type": "function", "function": {"name": "browser", "arguments": {}}}
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        later = [{"role": role, "content": "URL: http://a/\nTEXT:\n  b"} for role in ("tool", "user")]
        known[builder.__class__] = any(
            builder.tokenize_context_incremental_messages(before, [*before, message], tools=tools)
            != builder.tokenize_context_incremental_messages(before, [*before, message])
            for message in later
        )
    return known[builder.__class__]
