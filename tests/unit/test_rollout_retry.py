"""Invalid rollouts: tried again, dropped or flagged, reported; and what is not theirs but the policy's."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from browser_task import TaskError
from episode_log import read_episodes
from tests.agent_loop_harness import CLICK_ABOUT, FINISH, ROW, call, make_loop
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.fake_site import Page


async def test_a_spoiled_attempt_is_tried_again_in_a_fresh_session_and_leaves_no_token(build, environment, tokenizer):
    environment.faults = [Fault(Do.LOSE_SESSION, path="/browser_click", session=1)]
    loop, policy = build(environment, [CLICK_ABOUT, CLICK_ABOUT, FINISH])
    (output,) = await loop.run({}, **ROW)
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
    (output,) = await loop.run({}, **ROW)
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


async def test_every_attempt_is_reported_with_the_action_before_its_end(build, environment):
    environment.faults = [Fault(Do.LOSE_SESSION, path="/browser_click", session=1)]
    loop, _ = build(environment, [CLICK_ABOUT, CLICK_ABOUT, FINISH])
    await loop.run({}, **ROW)
    [report] = loop.gate.reports
    assert (report.uid, report.rollout, report.global_step, report.reward, report.valid) == ("u-1", 2, 7, 1.0, True)
    assert [(a.failure_kind, a.fault, a.last_action) for a in report.attempts] == [
        ("session_lost", "environment", "click"),
        ("", "", "click"),
    ]


async def test_an_invalid_rollout_is_reported_without_a_reward(build, environment):
    environment.faults = [Fault(Do.STATUS, path="/seed_session", text="BrowserType.launch: no")]
    loop, _ = build(environment, [FINISH], max_attempts=1)
    await loop.run({}, **ROW)
    [report] = loop.gate.reports
    assert (report.reward, report.failure_kind) == (None, "browser_launch_failed")


FLAGGED = {"settings": {"drop_invalid": False}}


async def test_flagged_mode_returns_a_row_that_trains_nothing_and_says_why(build, environment, tokenizer):
    environment.faults = [Fault(Do.LOSE_SESSION, path="/browser_click")]
    loop, policy = build(environment, [CLICK_ABOUT], max_attempts=2, **FLAGGED)
    (output,) = await loop.run({}, **ROW)
    assert (output.response_mask, output.reward_score, output.response_logprobs) == ([0], 0.0, [0.0])
    # Not one token of the spoiled attempts.
    assert set(output.prompt_ids + output.response_ids) == {tokenizer.eos_token_id}
    flags = {"env_invalid": True, "failure_kind": "session_lost", "rollout_row": 0, "rollout_rows": 1, "attempts": 2}
    assert {key: output.extra_fields[key] for key in flags} == flags
    assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 7


async def test_a_flagged_row_has_the_fields_of_a_valid_one(build, environment):
    """verl takes the columns of a batch from its first row, whichever that is."""
    loop, _ = build(environment, [CLICK_ABOUT, FINISH], **FLAGGED)
    (valid,) = await loop.run({}, **ROW)
    environment.faults = [Fault(Do.STATUS, path="/seed_session")]
    loop, _ = build(environment, [FINISH], max_attempts=1, **FLAGGED)
    (flagged,) = await loop.run({}, **ROW)
    assert flagged.as_dict().keys() == valid.as_dict().keys()
    assert flagged.extra_fields.keys() == valid.extra_fields.keys()
    assert flagged.extra_fields["reward_extra_info"].keys() == valid.extra_fields["reward_extra_info"].keys()


async def test_flagged_mode_leaves_valid_rollouts_as_they_are(build, environment):
    loop, _ = build(environment, [CLICK_ABOUT, FINISH], **FLAGGED)
    (output,) = await loop.run({}, **ROW)
    assert (output.reward_score, output.extra_fields["env_invalid"]) == (1.0, False)


POLICYS_OWN = [
    ("walked to a dead host", [call(action="navigate", url="http://no-such-host.invalid/"), FINISH]),
    ("gave up", [FINISH]),
    ("never made a call", ["no call"]),
]


@pytest.mark.parametrize("replies", [replies for _, replies in POLICYS_OWN], ids=[name for name, _ in POLICYS_OWN])
async def test_the_policys_own_failure_is_never_tried_again(build, environment, replies):
    loop, _ = build(environment, replies)
    (output,) = await loop.run({}, **ROW)
    assert output.reward_score == 0.0
    assert output.extra_fields["attempts"] == 1
    assert environment.seen.seeded == {1}


async def test_a_policy_that_wrecks_its_browser_is_scored_0_and_not_tried_again(build, environment, tmp_path):
    environment.faults = [Fault(Do.HANG, path="/browser_navigate")]
    elsewhere = call(action="navigate", url="http://tarpit.test/")
    loop, _ = build(environment, [elsewhere], settings={"act_timeout_s": 0.2})
    (output,) = await loop.run({}, **ROW)
    environment.release()
    assert (output.reward_score, output.extra_fields["env_invalid"], output.extra_fields["attempts"]) == (0.0, False, 1)
    records, _ = read_episodes(tmp_path)
    assert [(r["stop_reason"], r["failure_kind"]) for r in records] == [("browser_wrecked", "")]


async def test_all_attempts_together_keep_the_deadline(build, environment, monkeypatch, tmp_path):
    environment.faults = [Fault(Do.LOSE_SESSION, path="/browser_click")]
    loop, policy = build(environment, [CLICK_ABOUT], max_attempts=9, episode_deadline_s=50.0)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("episode.time", SimpleNamespace(monotonic=lambda: clock.now))

    async def slow_generate(*args, original=policy.generate, **kwargs):
        clock.now += 20.0
        return await original(*args, **kwargs)

    policy.generate = slow_generate
    assert await loop.run({}, **ROW) == []
    records, _ = read_episodes(tmp_path)
    # 20 s, 20 s, and in the third attempt no turn fits any more: the environment has lost the time, not the policy.
    assert [r["failure_kind"] for r in records] == ["session_lost", "session_lost", "session_lost"]


@pytest.mark.parametrize(("lost_s", "kind"), [(30.0, "episode_deadline"), (5.0, None)], ids=["environment", "policy"])
async def test_time_that_spoiled_attempts_used_up_is_the_environments(build, environment, monkeypatch, lost_s, kind):
    environment.faults = [Fault(Do.LOSE_SESSION, path="/browser_click", session=1)]
    loop, policy = build(environment, [CLICK_ABOUT], episode_deadline_s=lost_s + 19.0, max_turns=9)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("episode.time", SimpleNamespace(monotonic=lambda: clock.now))
    seconds = [lost_s, 20.0]

    async def slow_generate(*args, original=policy.generate, **kwargs):
        clock.now += seconds.pop(0)
        return await original(*args, **kwargs)

    policy.generate = slow_generate
    await loop.run({}, **ROW)
    [report] = loop.gate.reports
    assert [attempt.failure_kind for attempt in report.attempts] == ["session_lost", kind or ""]


async def test_the_action_before_a_failed_scoring_is_the_one_before_finish(build, environment):
    environment.faults = [Fault(Do.LOSE_SESSION, path="/verify")]
    loop, _ = build(environment, [CLICK_ABOUT, FINISH], max_attempts=1)
    await loop.run({}, **ROW)
    assert [(a.failure_kind, a.last_action) for a in loop.gate.reports[0].attempts] == [("session_lost", "click")]


async def test_a_flagged_row_keeps_the_prompt_length(build, environment):
    environment.faults = [Fault(Do.STATUS, path="/seed_session")]
    loop, _ = build(environment, [FINISH], max_attempts=1, prompt_length=4, **FLAGGED)
    (output,) = await loop.run({}, **ROW)
    assert 0 < len(output.prompt_ids) <= 4


async def test_a_provider_that_says_when_is_not_asked_before(build, environment, monkeypatch):
    full = Fault(Do.STATUS, path="/seed_session", status=429, text="Too many concurrent active sessions", times=1)
    environment.faults = [replace(full, retry_after="7")]
    loop, _ = build(environment, [CLICK_ABOUT, FINISH])
    waits = []

    async def note(seconds):
        waits.append(seconds)

    monkeypatch.setattr("browser_agent_loop.asyncio.sleep", note)
    (output,) = await loop.run({}, **ROW)
    assert output.extra_fields["attempts"] == 2
    assert 7.0 in waits


async def test_the_wait_before_a_retry_doubles_up_to_a_cap_with_jitter(build, environment):
    loop, _ = build(environment, [FINISH], retry_backoff_s=2.0)
    for attempt, longest in [(1, 2.0), (2, 4.0), (3, 8.0), (9, 60.0)]:
        waits = {loop._backoff_s(attempt) for _ in range(50)}
        assert longest / 2 <= min(waits) <= max(waits) <= longest
        assert len(waits) > 1


async def test_a_human_check_on_the_start_page_makes_the_rollout_invalid_not_a_zero(build, tmp_path):
    site = {"http://shop.test/": Page("Just a moment...", "Verify you are human by completing the action below.")}
    tools_kwargs = {"browser": ROW["tools_kwargs"]["browser"] | {"initial_url": "http://shop.test/"}}
    async with FakeEnvironment(site=site) as environment:
        loop, _ = build(environment, [FINISH], max_attempts=1)
        assert await loop.run({}, **ROW | {"tools_kwargs": tools_kwargs}) == []
    records, _ = read_episodes(tmp_path)
    assert records[0]["failure_kind"] == "page_blocked"


async def test_a_done_answer_ends_the_episode_whatever_the_action(build, environment):
    environment.faults = [
        Fault(Do.ANSWER, path="/browser_click", body={"observation": "", "done": True, "error": None})
    ]
    loop, policy = build(environment, [CLICK_ABOUT])
    (output,) = await loop.run({}, **ROW)
    assert len(policy.prompts) == 1
    assert output.reward_score == 0.0


@pytest.mark.parametrize("dataset_cls", [None, dict], ids=["none", "another"])
async def test_rows_of_another_dataset_are_refused(base_config, tokenizer, tmp_path, monkeypatch, dataset_cls):
    monkeypatch.setenv("NEMO_GYM_URL", "http://127.0.0.1:1")
    with pytest.raises(TaskError, match="data.custom_cls.name=NeMoGymBrowserDataset"):
        make_loop(base_config, tokenizer, None, "http://127.0.0.1:1", tmp_path, dataset_cls=dataset_cls)
