"""The agent loop over the fake environment, with verl's own token builder and a scripted policy."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.tools.tool_registry import initialize_tools_from_config
from verl.workers.rollout.replica import TokenOutput

from browser_agent_loop import BrowserTool, BrowserToolAgentLoop
from browser_task import TaskError
from cpu.policy_tokenizer import build_tokenizer, tool_schema
from cpu.training_run import REPO_ROOT
from environment_gate import EnvironmentGate
from episode_limits import EpisodeLimits, LimitsError
from episode_log import read_episodes
from recipe_settings import RecipeSettings
from tests.fake_environment import Do, FakeEnvironment, Fault

TOOL_CONFIG = REPO_ROOT / "configs" / "browser_tool.yaml"
ROW = {
    "raw_prompt": [{"role": "system", "content": "Browse."}, {"role": "user", "content": "Open About."}],
    "tools_kwargs": {
        "browser": {
            "initial_url": "site/index.html",
            "verifier_metadata_json": '{"url_contains": "about"}',
            "task": "Open About.",
        }
    },
    "extra_info": {"index": 0, "task_id": "about", "split": "train"},
    "data_source": "gym",
    "uid": "u-1",
    "session_id": 2,
    "global_steps": 7,
}


def call(**arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'browser', 'arguments': arguments})}\n</tool_call>"


CLICK_ABOUT = call(action="click", element="About")
FINISH = call(action="finish", answer="ALPHA-42")


class ScriptedPolicy:
    """Stands in for verl's engine client: replies in turn, each token with log-probability -0.5."""

    def __init__(self, tokenizer, replies):
        self.tokenizer = tokenizer
        self.replies = list(replies)
        self.prompts, self.request_ids, self.max_tokens = [], [], []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.prompts.append(list(prompt_ids))
        self.request_ids.append(request_id)
        self.max_tokens.append(sampling_params["max_tokens"])
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        ids = self.tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)[: sampling_params["max_tokens"]]
        fields = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), num_preempted=0, extra_fields=fields)


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(tool_schema())


@pytest.fixture(scope="session")
def base_config():
    with initialize_config_dir(str(REPO_ROOT / "configs"), version_base=None):
        return compose("cpu_practice")


@pytest.fixture
def build(tokenizer, base_config, tmp_path):
    """Return a function that builds the loop as verl's worker does, and the scripted policy that it talks to."""

    def build(environment, replies, prompt_length=512, response_length=1024, **limits):
        config = base_config.copy()
        config.actor_rollout_ref.rollout.prompt_length = prompt_length
        config.actor_rollout_ref.rollout.response_length = response_length
        policy = ScriptedPolicy(tokenizer, replies)
        loop = BrowserToolAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=policy,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3",
            tools=ToolListWrap(initialize_tools_from_config(str(TOOL_CONFIG))),
        )
        loop.limits = EpisodeLimits(**{"retry_backoff_s": 0.001, "max_turns": 5} | limits)
        loop.settings = RecipeSettings(
            environment_url=environment.url, act_timeout_s=20.0, close_timeout_s=20.0, outage_patience_s=0.5
        )
        loop.gate = EnvironmentGate(loop.settings)
        loop.episode_log = type(loop.episode_log)(tmp_path)
        return loop, policy

    return build


@pytest.fixture(autouse=True)
def environment_url(monkeypatch):
    monkeypatch.setenv("NEMO_GYM_URL", "http://127.0.0.1:1")


@pytest.fixture
async def environment():
    async with FakeEnvironment() as environment:
        yield environment


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids)


async def test_a_finished_episode_is_one_row_with_the_environments_own_reward(build, environment, tokenizer):
    loop, policy = build(environment, [CLICK_ABOUT, FINISH])
    output = await loop.run({"temperature": 1.0}, **ROW)
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
    output = await loop.run({}, **ROW)
    prompt = text_of(tokenizer, output.prompt_ids)
    assert "Open About.\n\nURL: " in prompt and "[1] a: About" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    assert policy.prompts[0] == output.prompt_ids


async def test_only_generated_tokens_have_mask_1_and_their_log_probs(build, environment, tokenizer):
    loop, policy = build(environment, [CLICK_ABOUT, FINISH])
    output = await loop.run({}, **ROW)
    generated = [t for t, m in zip(output.response_ids, output.response_mask, strict=True) if m]
    assert text_of(tokenizer, generated) == f"{CLICK_ABOUT}<|im_end|>{FINISH}<|im_end|>"
    assert output.response_logprobs == [-0.5 if m else 0.0 for m in output.response_mask]
    # What the engine saw at the second turn is what the row holds: nothing was rendered anew.
    assert (output.prompt_ids + output.response_ids)[: len(policy.prompts[1])] == policy.prompts[1]
    shown = text_of(tokenizer, [t for t, m in zip(output.response_ids, output.response_mask, strict=True) if not m])
    assert "<tool_response>\nURL: " in shown and "Secret code: ALPHA-42" in shown


async def test_incremental_tokens_equal_the_whole_conversation_rendered_at_once(build, environment, tokenizer):
    loop, _ = build(environment, [CLICK_ABOUT, FINISH])
    output = await loop.run({}, **ROW)
    whole = text_of(tokenizer, output.prompt_ids + output.response_ids)
    assert tokenizer.encode(whole, add_special_tokens=False) == output.prompt_ids + output.response_ids


async def test_finish_ends_the_episode_at_once(build, environment):
    loop, policy = build(environment, [FINISH, CLICK_ABOUT])
    output = await loop.run({}, **ROW)
    assert output.reward_score == 0.0
    assert len(policy.prompts) == 1
    assert "/browser_click" not in environment.seen.paths()


async def test_the_action_of_the_last_turn_is_run_and_scored(build, environment):
    loop, policy = build(environment, [CLICK_ABOUT], max_turns=1)
    output = await loop.run({}, **ROW)
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
    output = await loop.run({}, **ROW)
    assert words in text_of(tokenizer, policy.prompts[1])
    assert output.reward_score == 1.0
    assert output.extra_fields["reward_extra_info"]["unusable_calls"] == 1
    assert environment.seen.paths().count("/browser_click") == 1


async def test_too_many_wrong_calls_in_a_row_end_the_episode_which_is_scored(build, environment):
    loop, policy = build(environment, ["nothing", CLICK_ABOUT, "nothing", "nothing"], max_unusable_calls=2)
    output = await loop.run({}, **ROW)
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
    output = await loop.run({}, **ROW)
    assert output.reward_score == 0.0
    assert "The action failed." in text_of(tokenizer, policy.prompts[1])


async def test_a_spoiled_attempt_is_tried_again_in_a_fresh_session_and_leaves_no_token(build, environment, tokenizer):
    environment.faults = [Fault(Do.LOSE_SESSION, path="/browser_click", session=1)]
    loop, policy = build(environment, [CLICK_ABOUT, CLICK_ABOUT, FINISH])
    output = await loop.run({}, **ROW)
    assert output.reward_score == 1.0
    assert output.extra_fields["attempts"] == 2
    assert environment.seen.seeded == {1, 2}
    assert policy.prompts[0] == policy.prompts[1] == output.prompt_ids
    assert len(set(policy.request_ids)) == 2
    assert sum(output.response_mask) == len(tokenizer.encode(f"{CLICK_ABOUT}<|im_end|>{FINISH}<|im_end|>"))


async def test_a_rollout_that_stays_invalid_returns_no_row_and_is_logged_with_its_kind(build, environment, tmp_path):
    environment.faults = [Fault(Do.LOSE_SESSION, path="/browser_click")]
    loop, _ = build(environment, [CLICK_ABOUT], max_attempts=2)
    assert await loop.run({}, **ROW) == []
    records, _ = read_episodes(tmp_path)
    assert [(r["attempt"], r["failure_kind"], r["reward"], r["stop_reason"]) for r in records] == [
        (1, "session_lost", None, ""),
        (2, "session_lost", None, ""),
    ]
    assert [(r["uid"], r["rollout"], r["global_step"], r["task_id"]) for r in records] == [("u-1", 2, 7, "about")] * 2


@pytest.mark.parametrize("error", [RuntimeError("Already borrowed"), OSError("engine is gone")], ids=str)
async def test_an_engine_error_is_no_zero_and_closes_the_session(build, environment, tmp_path, error):
    loop, policy = build(environment, [error])
    assert await loop.run({}, **ROW) == []
    records, _ = read_episodes(tmp_path)
    assert {r["failure_kind"] for r in records} == {"engine_error"}
    assert str(error) in records[0]["failure_evidence"]
    assert environment.open_sessions == set()


async def test_a_deadline_that_the_environment_used_up_makes_the_rollout_invalid(build, environment, tmp_path):
    loop, policy = build(environment, [CLICK_ABOUT], episode_deadline_s=1e-6)
    assert await loop.run({}, **ROW) == []
    records, _ = read_episodes(tmp_path)
    assert records[0]["failure_kind"] == "episode_deadline"


async def test_a_deadline_that_generation_used_up_is_the_policys_and_is_scored(build, environment, monkeypatch):
    loop, policy = build(environment, [CLICK_ABOUT], episode_deadline_s=30.0)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("episode.time", SimpleNamespace(monotonic=lambda: clock.now))

    async def slow_generate(*args, original=policy.generate, **kwargs):
        clock.now += 31.0
        return await original(*args, **kwargs)

    policy.generate = slow_generate
    output = await loop.run({}, **ROW)
    assert output.reward_score == 1.0
    assert len(policy.prompts) == 1


async def test_an_engine_that_never_answers_is_no_zero(build, environment, tmp_path):
    loop, policy = build(environment, [CLICK_ABOUT], episode_deadline_s=0.2)

    async def never(*args, **kwargs):
        await asyncio.Event().wait()

    policy.generate = never
    assert await loop.run({}, **ROW) == []
    records, _ = read_episodes(tmp_path)
    assert [(r["failure_kind"], r["turns"]) for r in records] == [("episode_deadline", 0)]


async def test_a_response_length_that_fits_no_turn_is_refused(build, environment):
    with pytest.raises(LimitsError, match="data.max_response_length=16"):
        build(environment, [FINISH], response_length=16)


async def test_no_row_is_longer_than_the_response_length(build, environment):
    many = {"max_unusable_calls": 99, "max_turns": 99}
    loop, policy = build(environment, [CLICK_ABOUT, "x" * 400], response_length=120, **many)
    output = await loop.run({}, **ROW)
    assert len(output.response_ids) == len(output.response_mask) <= 120
    assert output.response_mask[-1] == 1
    assert all(0 < limit <= 120 for limit in policy.max_tokens)


async def test_the_start_page_is_cut_so_that_the_prompt_fits(build, environment, tokenizer):
    loop, _ = build(environment, [FINISH])
    full = len((await loop.run({}, **ROW)).prompt_ids)
    loop, _ = build(environment, [FINISH], prompt_length=full - 3)
    prompt_ids = (await loop.run({}, **ROW)).prompt_ids
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
    output = await loop.run({}, **ROW)
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
