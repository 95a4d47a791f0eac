"""The agent loop over the fake environment, with verl's own token builder and a scripted policy."""

import pytest
from verl.tools.tool_registry import initialize_tools_from_config

from browser_agent_loop import BrowserTool
from browser_task import TaskError
from episode_limits import LimitsError
from episode_log import read_episodes
from tests.agent_loop_harness import CLICK_ABOUT, FINISH, ROW, TOOL_CONFIG, call


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids)


async def test_a_finished_episode_is_one_row_with_the_environments_own_reward(build, environment, tokenizer):
    loop, policy = build(environment, [CLICK_ABOUT, FINISH])
    (output,) = await loop.run({"temperature": 1.0}, **ROW)
    assert output.reward_score == 1.0
    assert output.num_turns == 5
    flags = {"env_invalid": False, "failure_kind": "", "rollout_row": 0, "rollout_rows": 1, "attempts": 1}
    assert {key: output.extra_fields[key] for key in flags} == flags
    assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 7
    assert environment.seen.paths() == [
        "/seed_session", "/browser_observe", "/browser_click", "/browser_finish", "/verify", "/close_session"
    ]  # fmt: skip
    assert environment.open_sessions == set()


async def test_the_first_observation_is_part_of_the_prompt(build, environment, tokenizer):
    loop, policy = build(environment, [FINISH])
    (output,) = await loop.run({}, **ROW)
    prompt = text_of(tokenizer, output.prompt_ids)
    assert "Open About.\n\nURL: " in prompt and "[1] a: About" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    assert policy.prompts[0] == output.prompt_ids


async def test_only_generated_tokens_have_mask_1_and_their_log_probs(build, environment, tokenizer):
    loop, policy = build(environment, [CLICK_ABOUT, FINISH])
    (output,) = await loop.run({}, **ROW)
    generated = [t for t, m in zip(output.response_ids, output.response_mask, strict=True) if m]
    assert text_of(tokenizer, generated) == f"{CLICK_ABOUT}<|im_end|>{FINISH}<|im_end|>"
    assert output.response_logprobs == [-0.5 if m else 0.0 for m in output.response_mask]
    # What the engine saw at the second turn is what the row holds: nothing was rendered anew.
    assert (output.prompt_ids + output.response_ids)[: len(policy.prompts[1])] == policy.prompts[1]
    shown = text_of(tokenizer, [t for t, m in zip(output.response_ids, output.response_mask, strict=True) if not m])
    assert "<tool_response>\nURL: " in shown and "Secret code: ALPHA-42" in shown


async def test_incremental_tokens_equal_the_whole_conversation_rendered_at_once(build, environment, tokenizer):
    loop, _ = build(environment, [CLICK_ABOUT, FINISH])
    (output,) = await loop.run({}, **ROW)
    whole = text_of(tokenizer, output.prompt_ids + output.response_ids)
    assert tokenizer.encode(whole, add_special_tokens=False) == output.prompt_ids + output.response_ids


async def test_finish_ends_the_episode_at_once(build, environment):
    loop, policy = build(environment, [FINISH, CLICK_ABOUT])
    (output,) = await loop.run({}, **ROW)
    assert output.reward_score == 0.0
    assert len(policy.prompts) == 1
    assert "/browser_click" not in environment.seen.paths()


async def test_the_action_of_the_last_turn_is_run_and_scored(build, environment):
    loop, policy = build(environment, [CLICK_ABOUT], max_turns=1)
    (output,) = await loop.run({}, **ROW)
    assert (output.reward_score, len(policy.prompts)) == (1.0, 1)
    assert output.response_mask == [1] * len(output.response_ids)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("I think I am done", "There was no tool call"),
        (call(action="click", element=99), "There is no element 99"),
        (call(action="navigate", url="file:///etc/passwd"), "must begin with http"),
        ('<tool_call>{"name": "browser", "arguments": null}</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name": "browser", "arguments": {}}{}</tool_call>', "more than one JSON object"),
    ],
)
async def test_a_wrong_call_comes_back_to_the_policy_and_the_episode_goes_on(
    build, environment, tokenizer, reply, words
):
    loop, policy = build(environment, [reply, CLICK_ABOUT, FINISH])
    (output,) = await loop.run({}, **ROW)
    assert words in text_of(tokenizer, policy.prompts[1])
    assert output.reward_score == 1.0
    assert output.extra_fields["reward_extra_info"]["unusable_calls"] == 1
    assert environment.seen.paths().count("/browser_click") == 1


async def test_too_many_wrong_calls_in_a_row_end_the_episode_which_is_scored(build, environment):
    loop, policy = build(environment, ["nothing", CLICK_ABOUT, "nothing", "nothing"], max_unusable_calls=2)
    (output,) = await loop.run({}, **ROW)
    assert len(policy.prompts) == 4
    assert output.reward_score == 1.0


async def test_of_two_calls_the_first_is_run_and_the_policy_is_told(build, environment, tokenizer):
    loop, policy = build(environment, [CLICK_ABOUT + CLICK_ABOUT, FINISH])
    await loop.run({}, **ROW)
    assert "Only the first of your 2 calls was run.\nURL: " in text_of(tokenizer, policy.prompts[1])
    assert environment.seen.paths().count("/browser_click") == 1


async def test_the_servers_error_is_what_the_policy_reads(build, environment, tokenizer):
    dead = call(action="navigate", url="http://no-such-host.invalid/")
    loop, policy = build(environment, [dead, FINISH])
    (output,) = await loop.run({}, **ROW)
    assert output.reward_score == 0.0
    assert "The action failed." in text_of(tokenizer, policy.prompts[1])


async def test_a_response_length_that_fits_no_turn_is_refused(build, environment):
    with pytest.raises(LimitsError, match="data.max_response_length=16"):
        build(environment, [FINISH], response_length=16)


async def test_no_row_is_longer_than_the_response_length(build, environment):
    many = {"max_unusable_calls": 99, "max_turns": 99}
    loop, policy = build(environment, [CLICK_ABOUT, "x" * 400], response_length=120, **many)
    (output,) = await loop.run({}, **ROW)
    assert len(output.response_ids) == len(output.response_mask) <= 120
    assert output.response_mask[-1] == 1
    assert all(0 < limit <= 120 for limit in policy.max_tokens)


async def test_the_start_page_is_cut_so_that_the_prompt_fits(build, environment, tokenizer):
    loop, _ = build(environment, [FINISH])
    full = len((await loop.run({}, **ROW))[0].prompt_ids)
    loop, _ = build(environment, [FINISH], prompt_length=full - 3)
    prompt_ids = (await loop.run({}, **ROW))[0].prompt_ids
    assert len(prompt_ids) <= full - 3
    prompt = text_of(tokenizer, prompt_ids)
    assert "[cut at " in prompt and "Browse." in prompt and "Open About." in prompt


async def test_a_task_longer_than_the_prompt_is_invalid_not_cut(build, environment, tmp_path):
    loop, _ = build(environment, [FINISH], prompt_length=8)
    assert await loop.run({}, **ROW) == []
    records, _ = read_episodes(tmp_path)
    assert [r["failure_kind"] for r in records] == ["prompt_too_long"]


async def test_long_observations_are_cut_by_tokens_with_a_mark(build, environment, tokenizer):
    loop, policy = build(environment, [CLICK_ABOUT, FINISH], max_observation_tokens=40)
    (output,) = await loop.run({}, **ROW)
    shown = text_of(tokenizer, [t for t, m in zip(output.response_ids, output.response_mask, strict=True) if not m])
    observation = shown.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
    assert "[cut at " in observation
    assert len(tokenizer.encode(observation)) <= 40


async def test_a_row_that_is_no_browser_task_is_an_error_that_says_which_dataset_to_use(build, environment):
    loop, _ = build(environment, [FINISH])
    with pytest.raises(TaskError, match="pkg://dataset"):
        await loop.run({}, raw_prompt=ROW["raw_prompt"], tools_kwargs={})
    assert environment.seen.calls == []


async def test_the_tool_alone_says_which_agent_loop_it_needs():
    (tool,) = initialize_tools_from_config(str(TOOL_CONFIG))
    assert isinstance(tool, BrowserTool) and tool.name == "browser"
    with pytest.raises(RuntimeError, match="default_agent_loop=browser_tool_agent"):
        await tool.execute("id", {})
