"""Merging an observation gives the builder's own tokens, whatever is remembered."""

import pytest
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, QwenContinuousTokenBuilder

import context_tokens
from context_tokens import merge_observation, remember_prefixes
from cpu.policy_tokenizer import tool_schema

CALL = {"type": "function", "function": {"name": "browser", "arguments": {}}}
ASKED = [{"role": "system", "content": "Browse."}, {"role": "user", "content": "Open About."}]
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SAID = {"role": "assistant", "content": "I do not know"}
LATER = [
    (CALLED, {"role": "tool", "content": "URL: http://shop/\nTEXT:\n  Hello"}),
    (CALLED, {"role": "tool", "content": "\n\n  leading blanks, trailing ones \n"}),
    (CALLED, {"role": "tool", "content": ""}),
    (SAID, {"role": "user", "content": "There was no tool call."}),
]


def plain(builder, previous, updated, token_ids):
    return builder.merge_context_tokens(previous, updated, token_ids, tools=[tool_schema()])


@pytest.mark.parametrize(("reply", "observation"), LATER, ids=["page", "blanks", "empty", "no call"])
@pytest.mark.parametrize("builder_cls", [ContinuousTokenBuilder, QwenContinuousTokenBuilder])
def test_the_tokens_are_the_builders_own_the_first_time_and_later(tokenizer, builder_cls, reply, observation):
    previous = [*ASKED, reply]
    updated = [*previous, observation]
    expected = plain(builder_cls(tokenizer), previous, updated, [1, 2, 3])
    for _ in range(2):
        builder = builder_cls(tokenizer)
        remember_prefixes(builder)
        assert merge_observation(builder, previous, updated, [1, 2, 3], [tool_schema()]) == expected


def test_the_made_up_conversation_is_rendered_once(tokenizer, monkeypatch):
    monkeypatch.setattr(context_tokens, "_PREFIXES", type(context_tokens._PREFIXES)())
    rendered = []
    builder = ContinuousTokenBuilder(tokenizer)
    render = builder._render_tokens
    monkeypatch.setattr(
        builder, "_render_tokens", lambda messages, **kw: rendered.append(len(messages)) or render(messages, **kw)
    )
    remember_prefixes(builder)
    previous = [*ASKED, CALLED]
    for text in ("one", "two", "three"):
        merge_observation(builder, previous, [*previous, {"role": "tool", "content": text}], [], [tool_schema()])
    of_observations = [length for length in rendered if length == 4]
    assert len(of_observations) >= 3
    assert len(rendered) - len(of_observations) <= 8, "only what _tools_matter tries out, and the prefix once"


def test_what_is_remembered_is_bounded(tokenizer):
    builder = ContinuousTokenBuilder(tokenizer)
    remember_prefixes(builder)
    for number in range(100):
        builder._render_tokens([{"role": "user", "content": f"{number}"}], add_generation_prompt=False)
    known = context_tokens._PREFIXES[tokenizer][ContinuousTokenBuilder]
    assert len(known) <= 16


def test_tools_are_rendered_where_the_template_shows_them_later(tokenizer):
    class Showing(ContinuousTokenBuilder):
        """A template that lists the tools once more at its end."""

        def _render_tokens(self, messages, *, add_generation_prompt, tools=None):
            tokens = super()._render_tokens(messages, add_generation_prompt=add_generation_prompt, tools=tools)
            return [*tokens, 7] if tools and add_generation_prompt else tokens

    builder = Showing(tokenizer)
    assert context_tokens._tools_matter(builder, [tool_schema()])
    assert not context_tokens._tools_matter(ContinuousTokenBuilder(tokenizer), [tool_schema()])
