"""A rollout's model calls as they happen: the context that the engine is given next, and a record of each call.

The context is what the next call continues. A reply joins it or, if it is discarded, is only recorded; a fresh context
is a new root of the call forest (call_forest.py). Training rows are put together from these records, so that no token
that the policy read or wrote is ever rendered a second time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from browser_prompts import SUMMARY_REQUEST
from call_forest import CallRecord, CallStatus

# A call with a label takes 25 to 30 tokens in Qwen3's vocabulary; a turn with less room can only be cut short.
MIN_TURN_TOKENS = 32

# The chat template's own tokens around a request for a summary: role markers, tool response tags.
_TEMPLATE_TOKENS = 32


@dataclass
class Conversation:
    """The calls of one attempt; they all lie in one session, `main`."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The context as chat messages; replies with empty arguments, since only their place matters to the template."""
    token_ids: list[int] = field(default_factory=list)
    """The context as the engine is given it."""
    prompt_tokens: int = 0
    """Tokens of the context's root prompt: what verl takes as the row's prompt."""
    records: list[CallRecord] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Ids of the calls whose replies joined a context, in order; the last one is the call that is scored."""
    roots: int = 0
    """How many contexts there were."""
    _parent: str | None = None
    """The call that the context continues."""
    _recorded: int = 0
    """Tokens of the context that are in records already."""

    def open(self, messages: list[dict[str, Any]], prompt_ids: Sequence[int]) -> None:
        """Start a fresh context with a prompt."""
        self.messages, self.token_ids = messages, list(prompt_ids)
        self.prompt_tokens = len(self.token_ids)
        self._parent, self._recorded = None, 0
        self.roots += 1

    @property
    def response_tokens(self) -> int:
        """Tokens of the context after its root prompt."""
        return len(self.token_ids) - self.prompt_tokens

    def add_reply(
        self, token_ids: Sequence[int], logprobs: Sequence[float] | None, *, kept: bool = True, **fields: Any
    ) -> CallRecord:
        """Record the reply to the context and return the record; unless it is kept, the context stays as it is.

        `fields` are those of a CallRecord. Raises CallForestError for log-probs that do not go with the tokens.
        """
        call = CallRecord(
            f"{len(self.records)}",
            self._parent,
            prompt_ids=self.token_ids[self._recorded :],
            response_ids=token_ids,
            response_logprobs=logprobs,
            **fields,
        )
        self.records.append(call)
        if kept:
            self.kept.append(call.call_id)
            self.token_ids = [*self.token_ids, *token_ids]
            self._parent, self._recorded = call.call_id, len(self.token_ids)
        return call

    def extend(self, messages: list[dict[str, Any]], token_ids: list[int], removed: int = 0) -> None:
        """Take over the context with messages appended, of whose tokens the last `removed` ones were taken away first.

        A chat template that takes away what the policy wrote leaves a context that continues none of its calls: it is
        a fresh root, all of it a prompt.
        """
        if self.would_break(removed):
            self.open(messages, token_ids)
            return
        self.messages, self.token_ids = messages, token_ids

    def would_break(self, removed: int) -> bool:
        """Return whether taking away so many of the last tokens takes away what a call wrote."""
        return len(self.token_ids) - removed < self._recorded

    @property
    def discarded(self) -> int:
        """How many replies were discarded."""
        return len(self.records) - len(self.kept)


def status_of(token_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int]) -> CallStatus:
    """Return whether a reply was stopped by its length: verl 0.9.1 calls both ends of a generation `completed`."""
    stopped = len(token_ids) < max_tokens or token_ids[-1] in stop_token_ids
    return CallStatus.OK if stopped else CallStatus.TRUNCATED


def summary_reserve(tokenizer: Any, max_summary_tokens: int) -> int:
    """Return how many tokens the request for a summary and a summary of this length may take."""
    return len(tokenizer.encode(SUMMARY_REQUEST, add_special_tokens=False)) + _TEMPLATE_TOKENS + max_summary_tokens
