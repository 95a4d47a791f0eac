"""Episodes longer than a context: what the policy reads then, what is recorded, and the rows that come of it."""

import re
from itertools import pairwise

import pytest

from browser_prompts import SUMMARY_REQUEST
from episode_limits import LimitsError
from episode_log import read_episodes
from tests.agent_loop_harness import CLICK_ABOUT, FINISH, ROW, ScriptedPolicy, call

OBSERVE = call(action="observe")
BROKEN = "<tool_call>{broken</tool_call>"
LONG = {"max_turns": 20}


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids)


@pytest.fixture
async def sizes(build, environment):
    """Return the tokens of the first prompt, and of one observe with what it shows."""
    loop, policy = build(environment, [OBSERVE, OBSERVE, FINISH], **LONG)
    await loop.run({}, **ROW)
    first, second, third = map(len, policy.prompts)
    assert third - second == second - first
    return first, second - first


def trained_text(tokenizer, output) -> str:
    return text_of(tokenizer, [t for t, m in zip(output.response_ids, output.response_mask, strict=True) if m])


async def test_append_is_one_row_token_for_token_as_verls_builder_merges_it(build, environment, tokenizer):
    replies = [CLICK_ABOUT, "no call at all", OBSERVE, FINISH]
    loop, policy = build(environment, list(replies))
    (output,) = await loop.run({}, **ROW)
    builder, merged, mask, logprobs = loop.continuous_token_builder, list(output.prompt_ids), [], []
    for reply, prompt in zip(replies, [*policy.prompts[1:], None], strict=True):
        ids = tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        result = builder.merge_assistant_tokens(merged, ids)
        mask, logprobs = builder.align_response_metadata(result, mask, logprobs, assistant_logprobs=[-0.5] * len(ids))
        merged = result.token_ids
        if prompt is not None:
            assert prompt[: len(merged)] == merged
            mask, logprobs = mask + [0] * (len(prompt) - len(merged)), logprobs + [0.0] * (len(prompt) - len(merged))
            merged = prompt
    assert output.prompt_ids + output.response_ids == merged
    assert (output.response_mask, output.response_logprobs) == (mask, logprobs)
    assert (output.extra_fields["rollout_row"], output.extra_fields["rollout_rows"]) == (0, 1)


async def test_append_ends_where_the_next_prompt_would_pass_the_budget(build, environment, sizes, tmp_path):
    prompt, turn = sizes
    loop, policy = build(environment, [OBSERVE], context_budget_tokens=prompt + 2 * turn, **LONG)
    (output,) = await loop.run({}, **ROW)
    assert [len(p) for p in policy.prompts] == [prompt, prompt + turn, prompt + 2 * turn]
    assert output.response_mask[-1] == 1
    records, _ = read_episodes(tmp_path)
    assert (records[-1]["stop_reason"], records[-1]["compactions"], records[-1]["rows"]) == ("context_full", 0, 1)


async def test_window_goes_on_in_a_fresh_context_with_ledger_and_last_observations(
    build, environment, tokenizer, sizes, tmp_path
):
    prompt, turn = sizes
    budget = prompt + 2 * turn
    replies = [CLICK_ABOUT, OBSERVE, "no call", OBSERVE, FINISH]
    loop, policy = build(
        environment, replies, context_policy="window", context_budget_tokens=budget, window_observations=1, **LONG
    )
    outputs = await loop.run({}, **ROW)
    assert len(outputs) > 1
    assert all(len(p) <= budget for p in policy.prompts)
    fresh = text_of(tokenizer, outputs[-1].prompt_ids)
    assert "Browse." in fresh and "Open About.\n\nYour actions so far:\n1. click [1] a: About\n2. observe" in fresh
    assert "The page now:\n" in fresh and fresh.count("ELEMENTS:") == 1
    assert "".join(trained_text(tokenizer, o) for o in outputs) == "".join(f"{r}<|im_end|>" for r in replies)
    flags = [(o.extra_fields["rollout_row"], o.extra_fields["rollout_rows"]) for o in outputs]
    assert flags == [(i, len(outputs)) for i in range(len(outputs))]
    assert {(o.reward_score, o.extra_fields["env_invalid"]) for o in outputs} == {(outputs[0].reward_score, False)}
    records, _ = read_episodes(tmp_path)
    assert (records[-1]["compactions"], records[-1]["rows"]) == (len(outputs) - 1, len(outputs))


async def test_every_prompt_of_the_engine_is_the_beginning_of_a_row(build, environment, sizes):
    prompt, turn = sizes
    for policy_name in ("append", "window", "summary"):
        limits = {"context_policy": policy_name, "context_budget_tokens": prompt + 2 * turn, "max_summary_tokens": 40}
        loop, policy = build(environment, [OBSERVE] * 6 + [FINISH], **limits, **LONG)
        outputs = await loop.run({}, **ROW)
        rows = [o.prompt_ids + o.response_ids for o in outputs]
        for seen in policy.prompts:
            assert any(row[: len(seen)] == seen for row in rows), policy_name


@pytest.mark.parametrize("window", [1, 2, 3])
async def test_fresh_context_of_a_window_holds_the_last_k_observations(build, environment, tokenizer, sizes, window):
    prompt, turn = sizes
    limits = {"context_policy": "window", "window_observations": window, "context_budget_tokens": prompt + 4 * turn}
    loop, policy = build(environment, [OBSERVE] * 6 + [FINISH], 2048, **limits, **LONG)
    outputs = await loop.run({}, **ROW)
    assert text_of(tokenizer, outputs[1].prompt_ids).count("ELEMENTS:") == window


async def test_fresh_context_after_a_failed_call_still_shows_the_page(build, environment, tokenizer):
    replies = [OBSERVE, OBSERVE, CLICK_ABOUT, "no call", FINISH]
    loop, policy = build(environment, list(replies), **LONG)
    await loop.run({}, **ROW)
    limits = {"context_policy": "window", "context_budget_tokens": len(policy.prompts[4]) - 1, "window_observations": 1}
    loop, policy = build(environment, replies, 1024, **limits, **LONG)
    outputs = await loop.run({}, **ROW)
    fresh = text_of(tokenizer, outputs[1].prompt_ids)
    _, page = fresh.split("The page now:\nURL: ")
    assert page.count("Secret code: ALPHA-42") == 1 and "\n\nThere was no tool call" in page


async def test_answer_to_an_unusable_call_is_no_observation_of_a_window(build, environment, tokenizer, sizes):
    prompt, turn = sizes
    limits = {"context_policy": "window", "context_budget_tokens": prompt + 4 * turn, "window_observations": 3}
    replies = [OBSERVE, OBSERVE, OBSERVE, "no call", OBSERVE, OBSERVE, FINISH]
    loop, policy = build(environment, replies, 2048, **limits, **LONG)
    outputs = await loop.run({}, **ROW)
    fresh = text_of(tokenizer, outputs[1].prompt_ids)
    assert fresh.count("ELEMENTS:") == 3
    assert "There was no tool call" not in fresh


async def test_memory_shrinks_before_the_page_is_cut(build, environment, tokenizer, sizes):
    prompt, turn = sizes
    limits = {"context_policy": "window", "context_budget_tokens": prompt + 60, "window_observations": 4}
    loop, policy = build(environment, [OBSERVE] * 9 + [FINISH], **limits, **LONG)
    outputs = await loop.run({}, **ROW)
    fresh = text_of(tokenizer, outputs[-1].prompt_ids)
    assert all(len(p) <= prompt + 60 for p in policy.prompts)
    assert "are not shown)" in fresh and "[cut at" not in fresh


async def test_summary_is_a_call_that_trains_and_opens_the_next_context(build, environment, tokenizer, sizes, tmp_path):
    prompt, turn = sizes
    limits = {"context_policy": "summary", "context_budget_tokens": prompt + turn, "max_summary_tokens": 48}
    note = "<think>hm</think>The About page <tool_call> is open."
    loop, policy = build(environment, [CLICK_ABOUT, OBSERVE, note, FINISH], 1024, **limits, **LONG)
    outputs = await loop.run({}, **ROW)
    assert len(outputs) == 2
    first, last = outputs
    asked = text_of(tokenizer, policy.prompts[2])
    assert asked.endswith("<|im_start|>assistant\n") and SUMMARY_REQUEST in asked
    assert trained_text(tokenizer, first).endswith(f"{OBSERVE}<|im_end|>{note}<|im_end|>")
    fresh = text_of(tokenizer, last.prompt_ids)
    assert "Your notes on what you did before:\nThe About page < tool_call> is open.\n\nThe page now:\nURL: " in fresh
    assert (last.reward_score, last.extra_fields["reward_extra_info"]["turns"]) == (1.0, 3.0)
    assert policy.max_tokens[2] == 48


async def test_summary_has_its_room_even_when_the_row_is_full(build, environment, sizes):
    prompt, turn = sizes
    limits = {"context_policy": "summary", "max_summary_tokens": 64, "max_unusable_calls": 99}
    limits["max_tokens_per_turn"] = 400
    loop, policy = build(environment, [OBSERVE, "x" * 400], 1024, 400, **limits, **LONG)
    outputs = await loop.run({}, **ROW)
    assert len(outputs) > 1
    assert all(len(o.response_ids) <= 400 for o in outputs)
    assert policy.max_tokens[0] == 400 - loop.writer.reserve
    assert all(asked == 64 for asked, seen in zip(policy.max_tokens, policy.prompts, strict=True) if _asks(seen, loop))
    assert any(_asks(seen, loop) for seen in policy.prompts)


def _asks(prompt, loop) -> bool:
    return SUMMARY_REQUEST in loop.tokenizer.decode(prompt)


async def test_rollout_has_no_more_rows_than_it_may(build, environment, sizes, tmp_path):
    prompt, turn = sizes
    limits = {"context_policy": "window", "context_budget_tokens": prompt + turn, "max_rows_per_rollout": 3}
    loop, policy = build(environment, [OBSERVE], **limits, **LONG)
    outputs = await loop.run({}, **ROW)
    assert len(outputs) == 3
    records, _ = read_episodes(tmp_path)
    assert (records[-1]["stop_reason"], records[-1]["rows"]) == ("context_full", 3)


async def test_calls_beyond_the_last_row_allowed_are_cut_and_counted(build, environment, tokenizer, tmp_path):
    limits = {"retry_unusable_calls": 2, "selection_policy": "all_captured", "max_rows_per_rollout": 2}
    loop, _ = build(environment, [CLICK_ABOUT, BROKEN, "no call", FINISH], **limits)
    outputs = await loop.run({}, **ROW)
    assert [trained_text(tokenizer, o).split("<|im_end|>")[:-1] for o in outputs] == [[CLICK_ABOUT, BROKEN], [FINISH]]
    records, _ = read_episodes(tmp_path)
    assert (records[-1]["cut_calls"], records[-1]["rows"]) == (1, 2)


async def test_row_that_cannot_hold_the_scored_call_makes_the_rollout_invalid(build, environment, tmp_path):
    loop, _ = build(environment, [CLICK_ABOUT, FINISH])
    loop.response_length = 40
    assert await loop.run({}, **ROW) == []
    (record,), _ = read_episodes(tmp_path)
    assert record["failure_kind"] == "rows_not_planned"
    assert "of 512 prompt and 40 response tokens" in record["failure_evidence"]


class AgeingPolicy(ScriptedPolicy):
    """The weights are one version newer at every call."""

    async def generate(self, *args, **kwargs):
        output = await super().generate(*args, **kwargs)
        version = 7 + len(self.prompts)
        output.extra_fields = {"global_steps": version, "min_global_steps": version, "max_global_steps": version}
        return output


async def test_each_row_tells_the_weights_of_its_own_tokens(build, environment, sizes):
    prompt, turn = sizes
    limits = {"context_policy": "window", "context_budget_tokens": prompt + turn}
    loop, policy = build(environment, [OBSERVE, OBSERVE, OBSERVE, FINISH], **limits, **LONG)
    loop.server_manager = AgeingPolicy(policy.tokenizer, policy.replies)
    outputs = await loop.run({}, **ROW)
    told = [(o.extra_fields["min_global_steps"], o.extra_fields["max_global_steps"]) for o in outputs]
    assert (told[0][0], told[-1][1]) == (8, 11)
    assert all(newest + 1 == oldest for (_, newest), (oldest, _) in pairwise(told))


class ShortPolicy(ScriptedPolicy):
    """A log-probability is missing."""

    async def generate(self, *args, **kwargs):
        output = await super().generate(*args, **kwargs)
        output.log_probs.pop()
        return output


async def test_missing_log_probability_is_the_engines_error(build, environment, tokenizer, tmp_path):
    loop, _ = build(environment, [FINISH])
    loop.server_manager = ShortPolicy(tokenizer, [FINISH])
    assert await loop.run({}, **ROW) == []
    records, _ = read_episodes(tmp_path)
    assert {record["failure_kind"] for record in records} == {"engine_error"}
    assert re.search(r"\d+ log-probs for \d+ tokens", records[0]["failure_evidence"])


statuses_seen = []


def see_statuses(forest):
    statuses_seen[:] = [str(record.status) for record in forest.records]
    return forest.kept


async def test_selection_policy_sees_which_replies_were_cut_off(build, environment):
    limits = {"max_tokens_per_turn": 60, "selection_policy": f"{__name__}:see_statuses"}
    loop, _ = build(environment, [OBSERVE, "x" * 400, FINISH], **limits, **LONG)
    await loop.run({}, **ROW)
    assert statuses_seen == ["ok", "truncated", "ok"]


@pytest.mark.parametrize(
    ("selection", "rows", "trained"),
    [
        ("returned_history", 1, [CLICK_ABOUT, FINISH]),
        ("main_chain", 1, [CLICK_ABOUT, FINISH]),
        ("all_captured", 3, [CLICK_ABOUT, FINISH, BROKEN, "no call"]),
    ],
)
async def test_unusable_call_is_generated_anew_and_trains_only_if_all_calls_do(
    build, environment, tokenizer, tmp_path, selection, rows, trained
):
    limits = {"retry_unusable_calls": 2, "selection_policy": selection}
    loop, policy = build(environment, [CLICK_ABOUT, BROKEN, "no call", FINISH], **limits)
    outputs = await loop.run({}, **ROW)
    assert policy.prompts[1] == policy.prompts[2] == policy.prompts[3]
    assert len(outputs) == rows
    written = "".join(trained_text(tokenizer, o) for o in outputs)
    assert sorted(written.split("<|im_end|>")) == sorted([*trained, ""])
    assert trained_text(tokenizer, outputs[-1]).endswith(f"{FINISH}<|im_end|>")
    assert "not valid JSON" not in text_of(tokenizer, outputs[-1].response_ids)
    assert outputs[0].extra_fields["reward_extra_info"]["turns"] == 2
    records, _ = read_episodes(tmp_path)
    assert (records[-1]["discarded_calls"], records[-1]["unusable_calls"]) == (2, 2)


async def test_last_of_the_retries_is_kept_and_answered(build, environment, tokenizer):
    loop, policy = build(environment, [BROKEN, "no call", CLICK_ABOUT, FINISH], retry_unusable_calls=1)
    (output,) = await loop.run({}, **ROW)
    assert policy.prompts[0] == policy.prompts[1]
    assert "There was no tool call" in text_of(tokenizer, policy.prompts[2])
    assert output.reward_score == 1.0


NONSENSE = {
    "select_nothing": "selected no call",
    "select_unknown": "never recorded: 'nope'",
    "select_orphan": r"\('1', '0'\)",
    "raise_error": "RuntimeError: out of ideas",
}


def select_nothing(forest):
    return []


def select_unknown(forest):
    return ["nope"]


def select_orphan(forest):
    return [forest.records[-1].call_id]


def raise_error(forest):
    raise RuntimeError("out of ideas")


@pytest.mark.parametrize(("name", "words"), NONSENSE.items())
async def test_forest_that_cannot_be_planned_makes_the_rollout_invalid_with_a_kind_of_its_own(
    build, environment, tmp_path, name, words
):
    loop, _ = build(environment, [CLICK_ABOUT, FINISH], selection_policy=f"{__name__}:{name}")
    assert await loop.run({}, **ROW) == []
    (record,), _ = read_episodes(tmp_path)
    assert (record["failure_kind"], record["reward"], record["rows"]) == ("rows_not_planned", None, 0)
    assert loop.gate.reports[-1].reward is None
    assert re.search(words, record["failure_evidence"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"context_policy": "forget"}, "there are append, window, summary"),
        ({"selection_policy": "best"}, "returned_history, all_captured, main_chain"),
        ({"selection_policy": "no_such_module:select"}, "no_such_module"),
        ({"context_budget_tokens": 0}, "context_budget_tokens=0"),
        ({"window_observations": 0}, "window_observations=0"),
        ({"max_rows_per_rollout": 0}, "max_rows_per_rollout=0"),
        ({"retry_unusable_calls": -1}, "of at least 0"),
        ({"retry_unusable_calls": True}, "of at least 0"),
        ({"context_policy": "summary", "max_summary_tokens": 900}, "beside a summary of 900"),
    ],
)
async def test_impossible_settings_are_refused_by_name(build, environment, given, words):
    with pytest.raises(LimitsError, match=words):
        build(environment, [FINISH], **given)
