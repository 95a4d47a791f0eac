"""The benchmark of learning under failures compares what it says: its loop with failures as zeros, its bookkeeping."""

import json
from dataclasses import asdict

import pytest

from benchmarks.learning.broken_seeds import BrokenSeeds
from benchmarks.learning.failures_as_zeros import NO_SESSION, SEED_FAILED, FailuresAsZerosLoop
from benchmarks.learning.sweep import METHODS, Condition, curve
from cpu.training_run import RunFolder
from environment_gate import EnvironmentGate
from environment_session import ActionName, BrowserAction, BrowserSession
from episode_log import AttemptRecord, read_episodes
from recipe_settings import RecipeSettings
from tests.agent_loop_harness import CLICK_ABOUT, FINISH, ROW
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.fake_site import Page

ZEROS = {"build_with": {"loop_cls": FailuresAsZerosLoop}}


async def test_a_failed_seed_arrives_as_a_trained_row_with_reward_0(build, environment, tokenizer, tmp_path):
    environment.faults = [Fault(Do.STATUS, path="/seed_session")]
    loop, policy = build(environment, [CLICK_ABOUT, FINISH], **ZEROS)
    (output,) = await loop.run({}, **ROW)
    assert output.reward_score == 0.0
    assert sum(output.response_mask) > 0
    assert NO_SESSION in tokenizer.decode(output.prompt_ids)
    assert environment.seen.paths() == ["/seed_session", "/close_session"]
    # Nothing tells the row from a measured one, so that verl's own code computes its advantage.
    assert not {"env_invalid", "failure_kind"} & output.extra_fields.keys()
    records, _ = read_episodes(tmp_path)
    assert [(r["reward"], r["actions"][0]) for r in records] == [(0.0, SEED_FAILED)]


async def test_a_rollout_that_nothing_broke_is_the_recipes_own(build, environment):
    loop, _ = build(environment, [CLICK_ABOUT, FINISH], **ZEROS)
    (zeros,) = await loop.run({}, **ROW)
    loop, _ = build(environment, [CLICK_ABOUT, FINISH])
    (own,) = await loop.run({}, **ROW)
    assert (zeros.response_ids, zeros.response_mask, zeros.reward_score) == (
        own.response_ids,
        own.response_mask,
        own.reward_score,
    )


@pytest.mark.parametrize(
    ("site", "kind"),
    [("http://train.test", "browser_launch_failed"), ("http://other.test", None)],
    ids=["its", "other"],
)
async def test_the_proxy_breaks_the_seeds_of_its_site_and_passes_everything_else(site, kind):
    pages = {f"{host}/": Page("Home", "Hello") for host in ("http://train.test", "http://other.test")}
    async with FakeEnvironment(site=pages) as server, BrokenSeeds(server.url, "http://train.test", 1.0, 0) as proxy:
        settings = RecipeSettings(environment_url=proxy.url)
        gate = EnvironmentGate(settings)
        async with BrowserSession(settings, gate) as session:
            failure = await session.seed(f"{site}/", {"url_contains": site})
            assert (failure and failure.kind) == kind
            if failure is None:
                page = await session.act(BrowserAction(ActionName.OBSERVE))
                assert "TITLE: Home" in page.observation
                assert (await session.verify()).reward == 1.0
        await gate.drain(5.0)
        assert server.open_sessions == set()


def test_the_proxy_breaks_its_share():
    proxy = BrokenSeeds("http://nowhere", "http://train.test", 0.5, 3)
    body = json.dumps({"initial_url": "http://train.test/"}).encode()
    struck = sum(proxy._strikes("/seed_session", body) for _ in range(2000))
    assert 900 < struck < 1100


@pytest.mark.parametrize(("rate", "rollouts"), [(0.0, 6), (0.5, 12), (0.91, 67)])
def test_every_rate_leaves_six_valid_rollouts_in_a_group(tmp_path, rate, rollouts):
    overrides = Condition("dropped", rate, 0, 12).overrides(tmp_path)
    assert f"actor_rollout_ref.rollout.n={rollouts}" in overrides


def test_the_methods_are_one_run_where_nothing_fails_and_have_names_of_their_own_elsewhere():
    assert len({Condition(method, 0.0, 1, 12).name for method in METHODS}) == 1
    assert len({Condition(method, 0.5, 1, 12).name for method in METHODS}) == len(METHODS)


def test_only_failures_as_zeros_uses_the_stock_estimator(tmp_path):
    stock = "algorithm.adv_estimator=grpo"
    assert [stock in Condition(method, 0.5, 0, 12).overrides(tmp_path) for method in METHODS] == [False, False, True]


def test_the_curve_counts_valid_training_rollouts_until_each_validation(tmp_path):
    folder = RunFolder(tmp_path)
    folder.episodes.mkdir()
    folder.validations.mkdir()
    episodes = [
        AttemptRecord(global_step=1, split="train", reward=1.0, actions=["click"]),
        AttemptRecord(global_step=1, split="train", failure_kind="session_lost"),
        AttemptRecord(global_step=1, split="train", reward=0.0, actions=[SEED_FAILED, "observe"]),
        AttemptRecord(global_step=2, split="train", reward=0.0, actions=["finish"]),
        AttemptRecord(global_step=2, split="validation", reward=1.0, actions=["finish"]),
    ]
    (folder.episodes / "episodes-a-1.jsonl").write_text("".join(json.dumps(asdict(e)) + "\n" for e in episodes))
    for step, scores in {0: [0.0, 1.0], 1: [1.0, 1.0], 2: [0.0, 0.0]}.items():
        lines = [json.dumps({"uid": f"{n}_0_0", "score": score}) + "\n" for n, score in enumerate(scores)]
        (folder.validations / f"{step}.jsonl").write_text("".join(lines))
    points = [(p["step"], p["valid_rollouts"], p["success"]) for p in curve(folder)]
    assert points == [(0, 0, 0.5), (1, 1, 1.0), (2, 2, 0.0)]
