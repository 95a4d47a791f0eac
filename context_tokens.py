"""Observations merged into a rollout's tokens by verl's continuous-token builder, without work that is always the same.

For each observation the builder renders a made-up conversation with and without it and keeps the difference. What never
changes from turn to turn is taken out of that here; what comes out is what the builder gives. Measured by
benchmarks/loop_overhead.py.
"""

import weakref
from typing import Any

from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult

_LONGEST_PREFIX = 3  # system, user, assistant
_MOST_PREFIXES = 16
_PREFIXES: weakref.WeakKeyDictionary[Any, dict[type, dict[str, list[int]]]] = weakref.WeakKeyDictionary()
_TOOLS_MATTER: weakref.WeakKeyDictionary[Any, dict[type, bool]] = weakref.WeakKeyDictionary()


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
