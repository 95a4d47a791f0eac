"""Advantages and metrics of patched trainers: verl's own methods and DataProto, a stand-in for TransferQueue."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import patches
import verl_patches
from row_flags import fetch_flags
from tests.verl_trainer import LEGACY, V1_INNER, V1_VALIDATION, Trainer, flagged, patched_verl, row, valid

pytestmark = pytest.mark.timeout(240)  # the first of these tests imports verl's trainers

HALF = 1 / math.sqrt(2)  # of two rewards 1 and 0: (1 - 0.5) / std


@pytest.fixture(scope="module")
def verl():
    return patched_verl()


@pytest.fixture
def train(verl, monkeypatch):
    """A function that lets the V1 trainer compute the advantages of rows; it returns the first of each row."""

    def train(rows: dict[str, dict], **given) -> dict[str, float]:
        return {key: fields["advantages"][0] for key, fields in Trainer(verl, monkeypatch, rows, **given).run().items()}

    return train


# --- V1: batches without flags ---


MIXED = {"a_0_0": ("a", 1.0), "a_0_1": ("a", 0.25), "a_1_0": ("a", 0.0), "b_0_0": ("b", 0.5), "b_1_0": ("b", 0.75)}


@pytest.mark.parametrize("algorithm", [{}, {"norm_adv_by_std_in_grpo": False}, {"use_kl_in_reward": True}], ids=str)
@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "rloo", "grpo_env_aware"])
@pytest.mark.parametrize("fields", [{}, {"turn_scores": [1.0]}, None], ids=["empty", "others'", "no extra_fields"])
def test_a_batch_without_flags_gets_verls_own_result_by_verls_own_calls(
    verl, monkeypatch, estimator, algorithm, fields
):
    def run(stock):
        rows = {key: row(*given, **(fields or {})) for key, given in MIXED.items()}
        if fields is None:
            for fields_of_row in rows.values():
                del fields_of_row["extra_fields"]
        trainer = Trainer(verl, monkeypatch, rows, adv_estimator=estimator, **algorithm)
        return trainer.run(stock), trainer.metrics, trainer.queue.calls

    written, metrics, calls = run(stock=False)
    stock_written, stock_metrics, stock_calls = run(stock=True)
    assert written == stock_written  # bit for bit
    assert metrics == stock_metrics
    assert calls == [("get", tuple(MIXED), "train", ("extra_fields",)), *stock_calls]


def test_a_batch_without_flags_reaches_verls_functions_as_the_same_objects(verl):
    outer, inner = [], []
    queue = SimpleNamespace(kv_batch_get=lambda **_: {"extra_fields": [{}]})
    compute_advantage, for_multi_trajectories = verl_patches._wrap_v1(
        SimpleNamespace(tq=queue), [lambda self, batch, metrics: outer.append((self, batch, metrics)), inner.append]
    )
    trainer, batch, metrics, data = object(), SimpleNamespace(keys=["a_0_0"], partition_id="train"), {}, object()
    compute_advantage(trainer, batch, metrics=metrics)
    for_multi_trajectories(data)
    assert outer[0][0] is trainer and outer[0][1] is batch and outer[0][2] is metrics
    assert inner[0] is data


# --- V1: batches with flags ---


@pytest.mark.parametrize("estimator", ["grpo", "grpo_env_aware"])
def test_a_flagged_rollout_has_no_vote_and_gets_0(train, estimator):
    rows = {"a_0_0": valid("a", 1.0), "a_1_0": valid("a", 0.0), "a_2_0": flagged("a"), "a_3_0": flagged("a")}
    got = train(rows, adv_estimator=estimator)
    assert got == pytest.approx({"a_0_0": HALF, "a_1_0": -HALF, "a_2_0": 0.0, "a_3_0": 0.0}, abs=1e-5)


def test_the_enum_of_the_estimator_counts_as_its_name(verl, monkeypatch):
    rows = {"a_0_0": valid("a", 1.0), "a_1_0": valid("a", 0.0), "a_2_0": flagged("a")}
    trainer = Trainer(verl, monkeypatch, rows)
    trainer.trainer.config.algorithm.adv_estimator = verl.core_algos.AdvantageEstimator.GRPO
    assert trainer.run()["a_0_0"]["advantages"] == pytest.approx([HALF, HALF], abs=1e-5)


def test_the_reward_of_a_flagged_rollout_changes_nothing_bit_for_bit(train):
    def run(reward):
        return train({"a_0_0": valid("a", 0.3), "a_1_0": valid("a", 0.1), "a_2_0": flagged("a", reward)})

    assert run(0.0) == run(-100.0) == run(100.0)


@pytest.mark.parametrize("estimator", ["grpo", "grpo_env_aware"])
@pytest.mark.parametrize("normalise", [True, False])
def test_with_nothing_flagged_and_a_row_each_it_is_verls_grpo(verl, monkeypatch, estimator, normalise):
    rewards = {"a_0_0": 1.0, "a_1_0": 0.25, "a_2_0": 0.0, "b_0_0": 0.5, "b_1_0": 0.5}
    algorithm = {"norm_adv_by_std_in_grpo": normalise}
    ours = Trainer(
        verl, monkeypatch, {k: valid(k[0], r) for k, r in rewards.items()}, adv_estimator=estimator, **algorithm
    ).run()
    stock = Trainer(verl, monkeypatch, {k: row(k[0], r) for k, r in rewards.items()}, **algorithm).run(stock=True)
    for key in rewards:
        for field in ("advantages", "returns"):
            assert ours[key][field] == pytest.approx(stock[key][field], abs=1e-6)


def test_a_rollout_of_several_rows_votes_once_and_all_its_rows_get_its_advantage(train):
    rows = {
        "a_0_0": valid("a", 5.0),
        "a_0_10": valid("a", 1.0),  # the highest index, though not in the order of text
        "a_0_9": valid("a", 7.0, (0, 1)),
        "a_1_0": valid("a", 0.0),
    }
    got = train(rows, adv_estimator="grpo_env_aware")
    assert got == pytest.approx({"a_0_0": HALF, "a_0_10": HALF, "a_0_9": 0.0, "a_1_0": -HALF}, abs=1e-5)


@pytest.mark.parametrize(
    ("rewards", "want", "without_signal"),
    [([None, None], [0.0, 0.0], 1.0), ([0.7, None], [0.0, 0.0], 1.0), ([0.0, 0.0, None], [0.0, 0.0, 0.0], 1.0)],
    ids=["none survives", "one survives", "two equals survive"],
)
def test_a_group_without_two_different_rewards_gives_no_signal(verl, monkeypatch, rewards, want, without_signal):
    rows = {f"a_{i}_0": flagged("a") if r is None else valid("a", r) for i, r in enumerate(rewards)}
    trainer = Trainer(verl, monkeypatch, rows)
    assert [fields["advantages"][0] for fields in trainer.run().values()] == want
    assert trainer.metrics["browser/groups_without_signal"] == without_signal


def test_an_empty_mask_alone_is_not_read_as_invalid(train):
    rows = {"a_0_0": valid("a", 1.0), "a_1_0": valid("a", 0.0), "a_2_0": valid("a", 0.0, (0,))}
    assert train(rows)["a_1_0"] == pytest.approx(-1 / math.sqrt(3), abs=1e-5)


def test_groups_of_another_agent_loop_take_part_as_valid(train):
    rows = {"a_0_0": valid("a", 1.0), "a_1_0": flagged("a"), "b_0_0": row("b", 1.0), "b_1_0": row("b", 0.0)}
    assert train(rows)["b_0_0"] == pytest.approx(HALF, abs=1e-5)


def test_verls_padding_copies_the_flags_of_the_first_row_and_takes_no_part(verl, monkeypatch):
    rows = {"a_0_0": flagged("a"), "a_1_0": valid("a", 1.0), "a_2_0": valid("a", 0.0)}
    trainer = Trainer(verl, monkeypatch, rows)
    trainer.batch = verl.padding_utils.upsample_batch_to_divisible_size(trainer.batch, 8, eos_token_id=0)
    trainer.queue.calls.clear()
    pads = trainer.batch.keys[3:]
    assert len(pads) == 5 and all(trainer.queue.rows[key]["extra_fields"]["env_invalid"] for key in pads)
    written = trainer.run()
    assert [written[key]["advantages"] for key in pads] == [[0.0]] * 5
    assert written["a_1_0"]["advantages"] == pytest.approx([HALF, HALF], abs=1e-5)
    assert trainer.metrics["browser/groups"] == 1.0
    assert trainer.metrics["browser/batch_rollouts_valid"] == 2.0
    assert trainer.metrics["browser/batch_rollouts_invalid"] == 1.0


def test_the_flag_of_padding_alone_stops_no_other_estimator(verl, monkeypatch):
    rows = {"a_0_0": valid("a", 1.0), "a_1_0": valid("a", 0.0), "pad_0_0": flagged("pad")}
    tags = [{}, {}, {"is_padding": True}]
    assert Trainer(verl, monkeypatch, rows, tags, adv_estimator="rloo").run()["a_0_0"]["advantages"][0] == 1.0


def test_flags_cost_one_call_of_the_queue(verl, monkeypatch):
    trainer = Trainer(verl, monkeypatch, {"a_0_0": valid("a", 1.0), "a_1_0": flagged("a")})
    trainer.run()
    assert [(kind, names) for kind, _, _, names in trainer.queue.calls if names == ("extra_fields",)] == [
        ("get", ("extra_fields",))
    ]
    assert [kind for kind, *_ in trainer.queue.calls] == ["get", "get", "put"]


@pytest.mark.parametrize("estimator", ["rloo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus"])
def test_another_estimator_is_refused_when_a_rollout_is_flagged(verl, monkeypatch, estimator):
    trainer = Trainer(verl, monkeypatch, {"a_0_0": valid("a", 1.0), "a_1_0": flagged("a")}, adv_estimator=estimator)
    with pytest.raises(RuntimeError, match=rf"adv_estimator={estimator} .*grpo or grpo_env_aware.*DROP_INVALID=1"):
        trainer.run()
    assert trainer.queue.written == {}


def test_another_estimator_runs_as_verl_has_it_when_no_rollout_is_flagged(verl, monkeypatch):
    def run(stock):
        rows = {"a_0_0": valid("a", 1.0), "a_1_0": valid("a", 0.0)}
        trainer = Trainer(verl, monkeypatch, rows, adv_estimator="rloo")
        return trainer.run(stock), trainer.metrics

    assert run(stock=False) == run(stock=True)


def test_kl_in_the_rewards_stays_verls_code_and_leaves_the_metrics_to_the_scores(verl, monkeypatch):
    rows = {"a_0_0": valid("a", 1.0), "a_1_0": valid("a", 1.0, (1, 1, 1)), "a_2_0": flagged("a")}
    trainer = Trainer(verl, monkeypatch, rows, use_kl_in_reward=True)
    written = trainer.run()
    # kl penalty: 0.1 * (old - ref), ref twice and old 1.5 times -1, -2, ...: 0.05 a token and its place
    assert written["a_0_0"]["token_level_rewards"] == pytest.approx([-0.05, 0.9])
    assert written["a_0_0"]["advantages"] == pytest.approx([HALF, HALF], abs=1e-4)
    assert trainer.metrics["browser/reward_over_valid/mean"] == 1.0
    assert trainer.metrics["browser/groups_without_signal"] == 1.0
    assert "actor/reward_kl_penalty" in trainer.metrics


def test_rollout_correction_stays_verls_code(verl, monkeypatch):
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None}
    rows = {"a_0_0": valid("a", 1.0), "a_1_0": valid("a", 0.0), "a_2_0": flagged("a")}
    trainer = Trainer(verl, monkeypatch, rows, rollout_correction=correction)
    written = trainer.run()
    assert set(written["a_0_0"]) == {"advantages", "returns", "response_mask", "rollout_is_weights"}
    assert written["a_0_0"]["advantages"] == pytest.approx([HALF, HALF], abs=1e-5)


def test_the_metrics_of_a_step_pass_verls_aggregator_unchanged(verl, monkeypatch):
    trainer = Trainer(verl, monkeypatch, {"a_0_0": valid("a", 0.25), "a_1_0": valid("a", 1.0), "a_2_0": flagged("a")})
    trainer.run()
    aggregator = verl.trainer_base.MetricsAggregator()
    aggregator.add_step_metrics(trainer.metrics, sample_count=3)
    assert aggregator.get_aggregated_metrics() == trainer.metrics
    assert trainer.metrics == {
        "browser/groups": 1.0,
        "browser/groups_without_signal": 0.0,
        "browser/batch_rollouts_valid": 2.0,
        "browser/batch_rollouts_invalid": 1.0,
        "browser/reward_over_valid/mean": 0.625,
    }


def test_an_error_in_one_step_leaves_no_flags_for_the_next(verl, monkeypatch):
    broken = Trainer(verl, monkeypatch, {"a_0_0": valid("a", math.nan), "a_1_0": valid("a", 1.0)})
    with pytest.raises(ValueError, match="row 0"):
        broken.run()
    assert verl_patches._step.get() is None


# --- V1: flags that cannot be used ---


@pytest.mark.parametrize("form", ["list", "stack", "array", "wrapped", "shared"])
def test_extra_fields_are_read_in_each_form_that_the_queue_gives(verl, form):
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorData, NonTensorStack

    rows = [{"env_invalid": True}, {"env_invalid": form == "shared"}]
    column = {
        "list": TensorDict({"f": NonTensorStack(*rows)}, batch_size=2)["f"],
        "stack": NonTensorStack(*[NonTensorData(fields) for fields in rows]),
        "array": np.array(rows, dtype=object),
        "wrapped": [NonTensorData(fields) for fields in rows],
        "shared": TensorDict({"f": NonTensorData(rows[0], batch_size=[2])}, batch_size=2)["f"],
    }[form]
    queue = SimpleNamespace(kv_batch_get=lambda **_: {"extra_fields": column})
    batch = SimpleNamespace(keys=["a_0_0", "a_1_0"], partition_id="train")
    assert fetch_flags(queue, batch) == [True, form == "shared"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [({}, r"row a_1_0 is None"), ({"env_invalid": None}, "is None"), ({"env_invalid": "False"}, "is 'False'")],
    ids=["lost", "none", "text"],
)
def test_a_row_whose_flag_cannot_be_read_stops_training(train, fields, said):
    with pytest.raises(RuntimeError, match=rf"env_invalid.*{said}.*agent loop must set it"):
        train({"a_0_0": valid("a", 1.0), "a_1_0": row("a", 0.0, **fields)})


@pytest.mark.parametrize("key", ["a-0-0", "a_0", "a_0_x", "_0_0"])
def test_a_key_of_another_format_stops_training(verl, key):
    with pytest.raises(RuntimeError, match=rf"TransferQueue key '{key}'"):
        verl_patches._split_key(key)


def test_a_uid_with_underscores_is_read_as_verls_advantages_read_it():
    assert verl_patches._split_key("a_b_3_12") == ("a_b", "a_b_3", 12)


def test_rows_that_were_reordered_stop_training(verl, monkeypatch):
    rows = {"a_0_0": valid("a", 1.0), "a_1_0": flagged("a")}
    trainer = Trainer(verl, monkeypatch, rows)
    inner = verl.trainer_base.compute_advantage_for_multi_trajectories
    monkeypatch.setattr(
        verl.trainer_base,
        "compute_advantage_for_multi_trajectories",
        lambda data, batch_keys, **given: inner(data, batch_keys=batch_keys[::-1], **given),
    )
    with pytest.raises(RuntimeError, match="reordered"):
        trainer.run()


def test_a_function_that_something_else_put_in_its_place_stops_training(verl, monkeypatch):
    trainer = Trainer(verl, monkeypatch, {"a_0_0": valid("a", 1.0), "a_1_0": flagged("a")})
    monkeypatch.setattr(verl.trainer_base, "compute_advantage_for_multi_trajectories", verl.stock[V1_INNER])
    with pytest.raises(RuntimeError, match="did not call its module's compute_advantage_for_multi_trajectories"):
        trainer.run()
    with pytest.raises(patches.PatchError, match=rf"{V1_INNER} was patched, and something has replaced it since"):
        patches.require_applied()


# --- V1: validation ---


def validate(trainer) -> dict[str, float]:
    return trainer._val_metrics_update(
        ["site", "site"], ["a", "b"], {"reward": [1.0, 0.0]}, [3, 5], expected_acc_counts={("site", "a"): 1}
    )


def test_validation_metrics_of_the_replay_buffer_join_verls(verl):
    trainer = object.__new__(verl.PPOTrainerSync)
    trainer.replay_buffer = SimpleNamespace(pop_validation_metrics=lambda: {"browser/val/rollouts": 2.0})
    got = validate(trainer)
    trainer._val_metrics_update = verl.stock[V1_VALIDATION].__get__(trainer)
    assert got == validate(trainer) | {"browser/val/rollouts": 2.0}


def test_validation_with_verls_own_replay_buffer_is_verls(verl):
    trainer = object.__new__(verl.PPOTrainerSync)
    trainer.replay_buffer = object()
    assert set(validate(trainer)) >= {"val-core/site/reward/mean@1", "val-aux/num_turns/mean"}


# --- The legacy trainer ---


def legacy_batch(verl, flags: list | None, rewards=(1.0, 0.0, 0.5), response_mask: bool = True):
    import torch

    rows = len(rewards)
    tensors = {
        "token_level_rewards": torch.tensor(rewards).unsqueeze(-1) * torch.tensor([[0.0, 1.0]]),
        "responses": torch.zeros(rows, 2, dtype=torch.int64),
        "attention_mask": torch.ones(rows, 5, dtype=torch.int64),
    }
    if response_mask:
        tensors["response_mask"] = torch.ones(rows, 2, dtype=torch.int64)
    columns = {"uid": np.array(["a"] * rows, dtype=object)}
    if flags is not None:
        columns["env_invalid"] = np.array(flags, dtype=object)
    return verl.package.DataProto.from_dict(tensors=tensors, non_tensors=columns)


@pytest.mark.parametrize("response_mask", [True, False])
@pytest.mark.parametrize("estimator", ["grpo", "grpo_env_aware"])
def test_legacy_a_flagged_rollout_has_no_vote_and_gets_0(verl, estimator, response_mask):
    data = legacy_batch(verl, [False, False, True], response_mask=response_mask)
    verl.ray_trainer.compute_advantage(data, adv_estimator=estimator)
    for field in ("advantages", "returns"):
        assert data.batch[field][:, 0].tolist() == pytest.approx([HALF, -HALF, 0.0], abs=1e-5)


def test_legacy_the_division_by_std_can_be_off(verl):
    data = legacy_batch(verl, [False, False, True])
    verl.ray_trainer.compute_advantage(data=data, adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    assert data.batch["advantages"][:, 0].tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("flags", [None, [None, None, None]], ids=["no column", "other agent loops"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "grpo_vectorized"])
def test_legacy_a_batch_without_flags_gets_verls_own_result(verl, flags, estimator):
    ours, stock = legacy_batch(verl, flags), legacy_batch(verl, flags)
    assert verl.ray_trainer.compute_advantage(ours, adv_estimator=estimator) is ours
    verl.stock[LEGACY](stock, adv_estimator=estimator)
    assert ours.batch["advantages"].tolist() == stock.batch["advantages"].tolist()


def test_legacy_a_lost_flag_stops_training(verl):
    with pytest.raises(RuntimeError, match="row 1 is None"):
        verl.ray_trainer.compute_advantage(legacy_batch(verl, [False, None, True]), adv_estimator="grpo")


def test_legacy_another_estimator_is_refused_when_a_rollout_is_flagged(verl):
    with pytest.raises(RuntimeError, match="adv_estimator=rloo"):
        verl.ray_trainer.compute_advantage(legacy_batch(verl, [False, False, True]), adv_estimator="rloo")
    ours, stock = legacy_batch(verl, [False] * 3), legacy_batch(verl, None)
    verl.ray_trainer.compute_advantage(ours, adv_estimator="rloo")
    verl.stock[LEGACY](stock, adv_estimator="rloo")
    assert ours.batch["advantages"].tolist() == stock.batch["advantages"].tolist()
