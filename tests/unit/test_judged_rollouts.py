"""Rollouts that the judge scores: what it is shown, and what becomes of a rollout without a verdict."""

import pytest

from browser_task import TaskError
from episode_log import read_episodes
from failure_symptoms import FailureKind
from judge import Judgement, Outcome, Verdict
from tests.agent_loop_harness import CLICK_ABOUT, FINISH, ROW, call
from tests.fake_environment import Do, Fault

JUDGED = {**ROW["tools_kwargs"]["browser"], "verifier_metadata_json": "{}", "judged": True, "reference_answer": "ALPHA"}
JUDGED_ROW = ROW | {"tools_kwargs": {"browser": JUDGED}}
SETTINGS = {"judge_url": "http://127.0.0.1:1/v1", "judge_model": "judge"}


class ScriptedJudge:
    """Gives one verdict, and keeps what it was asked."""

    def __init__(self, outcome=Outcome.SUCCESS, kind=None, calls=1):
        self.judgement = Judgement(Verdict(outcome, "because", kind), calls, 700, 20, 1.5, (kind,) * (kind is not None))
        self.asked = []

    async def score(self, task, answer, evidence, reference=None):
        self.asked.append((task, answer, evidence, reference))
        return self.judgement


@pytest.fixture
def judged(build, environment):
    def judged(replies, judge, settings=None, **given):
        loop, policy = build(environment, replies, settings=SETTINGS | (settings or {}), **given)
        loop.judge = judge
        return loop

    return judged


@pytest.mark.parametrize(("outcome", "reward"), [(Outcome.SUCCESS, 1.0), (Outcome.FAILURE, 0.0)])
async def test_verdict_is_the_reward_and_the_environment_is_not_asked(judged, environment, tmp_path, outcome, reward):
    judge = ScriptedJudge(outcome)
    (output,) = await (loop := judged([CLICK_ABOUT, FINISH], judge)).run({}, **JUDGED_ROW)
    assert output.reward_score == reward
    assert "/verify" not in environment.seen.paths()
    (record,), _ = read_episodes(tmp_path)
    told = (record["scored_by"], record["judge_reason"], record["judge_calls"], record["judge_s"])
    assert told == ("judge", "because", 1, 1.5)
    report = loop.gate.reports[-1].attempts[-1].judge
    assert (report.calls, report.tokens, report.unusable) == (1, 720, ())


async def test_judge_is_shown_task_answer_actions_pages_and_reference(judged):
    judge = ScriptedJudge()
    await judged([CLICK_ABOUT, "no call", FINISH], judge).run({}, **JUDGED_ROW)
    ((task, answer, evidence, reference),) = judge.asked
    assert (task, answer, reference) == ("Open About.", "ALPHA-42", "ALPHA")
    assert evidence.actions == ("click [1] a: About", "finish")
    start, about = evidence.observations
    assert "site/index.html" in start and "about" in about.lower() and start != about


async def test_page_after_the_last_action_is_shown_even_if_no_turn_followed(judged):
    judge = ScriptedJudge()
    await judged([CLICK_ABOUT], judge, max_turns=1).run({}, **JUDGED_ROW)
    ((_, answer, evidence, _),) = judge.asked
    assert answer is None
    assert len(evidence.observations) == 2 and "Secret code: ALPHA-42" in evidence.observations[-1]


async def test_browser_is_closed_before_the_judge_is_asked(judged, environment):
    class WatchingJudge(ScriptedJudge):
        async def score(self, *args):
            self.closed = "/close_session" in environment.seen.paths()
            return await super().score(*args)

    judge = WatchingJudge()
    await judged([FINISH], judge).run({}, **JUDGED_ROW)
    assert judge.closed


KINDS = [kind for kind in FailureKind if kind.startswith("judge_")]


@pytest.mark.parametrize("kind", KINDS)
async def test_rollout_without_a_verdict_is_invalid_with_its_kind_and_no_browser_is_opened_again(
    judged, environment, tmp_path, kind
):
    loop = judged([FINISH], ScriptedJudge(Outcome.UNUSABLE, kind, calls=3))
    assert await loop.run({}, **JUDGED_ROW) == []
    (record,), _ = read_episodes(tmp_path)
    assert (record["failure_kind"], record["reward"], record["failure_evidence"]) == (kind, None, "because")
    assert environment.seen.paths().count("/seed_session") == 1
    report = loop.gate.reports[-1]
    assert (report.reward, report.attempts[-1].judge.unusable) == (None, (kind,))


async def test_task_with_a_scoring_spec_is_never_judged(judged, environment):
    judge = ScriptedJudge(Outcome.FAILURE)
    (output,) = await judged([CLICK_ABOUT, FINISH], judge).run({}, **ROW)
    assert (output.reward_score, judge.asked) == (1.0, [])
    assert "/verify" in environment.seen.paths()


async def test_attempt_that_the_environment_spoiled_is_not_judged(judged, environment, tmp_path):
    environment.faults = [Fault(Do.LOSE_SESSION, path="/browser_click", session=1)]
    judge = ScriptedJudge()
    (output,) = await judged([CLICK_ABOUT, CLICK_ABOUT, FINISH], judge).run({}, **JUDGED_ROW)
    assert (output.reward_score, len(judge.asked)) == (1.0, 1)
    first, second = read_episodes(tmp_path)[0]
    assert (first["judge_calls"], second["judge_calls"]) == (0, 1)


async def test_policy_that_wrecks_its_browser_is_scored_0_and_no_judge_is_asked(judged, environment):
    environment.faults = [Fault(Do.HANG, path="/browser_navigate")]
    judge = ScriptedJudge()
    loop = judged([call(action="navigate", url="http://tarpit.test/")], judge, settings={"act_timeout_s": 0.2})
    (output,) = await loop.run({}, **JUDGED_ROW)
    environment.release()
    assert (output.reward_score, output.extra_fields["env_invalid"], judge.asked) == (0.0, False, [])


async def test_judged_task_without_a_judge_is_refused(build, environment):
    loop, _ = build(environment, [call(action="observe")])
    with pytest.raises(TaskError, match="NEMO_GYM_BROWSER_JUDGE_URL"):
        await loop.run({}, **JUDGED_ROW)
