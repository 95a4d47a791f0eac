"""Mini-batches of patched trainers: verl's own trainer and workers over stand-ins for TransferQueue and engine."""

import inspect
import logging
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import verl_mini_batches
from tests.verl_trainer import V1_BALANCE, V1_UPDATE, Queue, flagged, patched_verl, row, valid

pytestmark = pytest.mark.timeout(240)  # the first of these tests imports verl's trainers


@pytest.fixture(scope="module")
def verl():
    return patched_verl()


def config(prompts=64, mini=64, n=8, actor=None, rollout=None, ref=None, **sections):
    from omegaconf import OmegaConf

    stock_actor = {
        "ppo_mini_batch_size": mini,
        "ppo_epochs": 1,
        "use_dynamic_bsz": True,
        "ppo_micro_batch_size_per_gpu": None,
        "calculate_entropy": False,
        "entropy_coeff": 0.0,
        "data_loader_seed": 42,
        "shuffle": False,
        "loss_agg_mode": "token-mean",
        "rollout_n": "${actor_rollout_ref.rollout.n}",
    }
    stock_rollout = {"n": n, "temperature": 0.75, "log_prob_use_dynamic_bsz": True}
    made = OmegaConf.create(
        {
            "data": {"train_batch_size": prompts},
            "trainer": {"critic_warmup": 0},
            "critic": {"ppo_mini_batch_size": mini},
            "actor_rollout_ref": {
                "actor": stock_actor | (actor or {}),
                "rollout": stock_rollout | (rollout or {}),
                "ref": {"log_prob_use_dynamic_bsz": True} | (ref or {}),
            },
            **sections,
        }
    )
    OmegaConf.set_struct(made, True)  # as verl gets it from Hydra
    return made


class Workers:
    """The worker group of the actor: `ranks` of two processes each. It keeps what it is given."""

    def __init__(self, ranks: int):
        self.ranks, self.given, self._dispatch_info = ranks, [], {}

    def _query_dispatch_info(self, role):
        return [process // 2 for process in range(2 * self.ranks)]

    def update_actor(self, batch):
        self.given.append((list(batch.keys), dict(batch.extra_info)))
        return {"metrics": {"mfu": [0.5], "lr": [1e-6]}}


def trainer_of(verl, ranks=8, critic=False, global_steps=1, parameter_sync_step=1, **given):
    """verl's synchronous V1 trainer, without what its constructor builds."""
    trainer = object.__new__(verl.PPOTrainerSync)
    trainer.config = config(**given)
    trainer.use_critic, trainer.use_reference_policy = critic, False
    trainer.global_steps, trainer.parameter_sync_step = global_steps, parameter_sync_step
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    trainer.actor_rollout_wg = Workers(ranks)
    return trainer


@pytest.fixture
def batch_of(verl, monkeypatch):
    """A function that puts rows into a stand-in queue and returns their batch, each with a length of its own."""

    def batch_of(rows: dict[str, dict]):
        queue = batch_of.queue = Queue(rows)
        calls = SimpleNamespace(kv_batch_get=queue.kv_batch_get, kv_batch_put=queue.kv_batch_put)
        for module in (verl.trainer_base, verl.padding_utils):
            monkeypatch.setattr(module, "tq", calls)
        lengths = random.Random(0)
        tags = [{"seq_len": lengths.randrange(100, 9000)} for _ in rows]
        return verl.trainer_base.KVBatchMeta(keys=list(rows), tags=tags, partition_id="train")

    return batch_of


def rows_of(training: int, invalid: int = 0, per_group: int = 8) -> dict[str, dict]:
    """Rows of groups of rollouts with a row each, the invalid ones spread over them."""
    kinds = [False] * training + [True] * invalid
    random.Random(1).shuffle(kinds)
    keys = [f"g{i // per_group}_{i % per_group}_0" for i in range(len(kinds))]
    return {key: (flagged if bad else valid)(key.split("_")[0], 0.0) for key, bad in zip(keys, kinds, strict=True)}


def step(trainer, batch):
    """What a step of verl does with a batch, as far as rows and mini-batches go; returns the batch and the metrics."""
    metrics: dict = {}
    batch = trainer._balance_batch(batch, metrics=metrics)
    return trainer._update_actor(batch, metrics=metrics), metrics


def as_verl_has_it(verl, trainer):
    """The trainer with verl's own two functions."""
    for target in (V1_BALANCE, V1_UPDATE):
        setattr(trainer, target.rpartition(".")[2], verl.stock[target].__get__(trainer))
    return trainer


def trained(verl, trainer, batch) -> list[list[list[str]]]:
    """Keys of the rows in each step and on each rank, dispatched by KVBatchMeta and cut by verl's own worker."""
    import torch
    from tensordict import TensorDict

    loop = inspect.unwrap(verl.trainer_base.TrainingWorker.train_mini_batch)
    ranks = trainer.actor_rollout_wg.ranks
    _, sent = trainer.actor_rollout_wg.given[-1]
    steps_of_rank = []
    for rank, part in enumerate(batch.chunk(ranks)):
        data = TensorDict({"row": torch.arange(len(part.keys))}, batch_size=len(part.keys))
        for name in ("mini_batch_size", "epochs", "seed", "dataloader_kwargs"):
            verl.trainer_base.tu.assign_non_tensor(data, **{name: sent[name]})
        steps: list[list[str]] = []
        worker = SimpleNamespace(
            engine=SimpleNamespace(
                get_data_parallel_size=lambda: ranks,
                get_data_parallel_rank=lambda rank=rank: rank,
                train_mode=lambda **_: nullcontext(),
                is_mp_src_rank_with_outputs=lambda: False,
            ),
            profiler=SimpleNamespace(step=lambda: None),
            train_batch=lambda data, part=part, steps=steps: steps.append([part.keys[i] for i in data["row"].tolist()]),
        )
        loop(worker, data)
        steps_of_rank.append(steps)
    return [list(shares) for shares in zip(*steps_of_rank, strict=True)]


# --- Steps and padding, whatever the rows ---


@pytest.mark.parametrize(
    ("rows", "given", "steps", "size"),
    [
        pytest.param((512, 0), {}, 1, 512, id="as many rows as verl expects"),
        pytest.param((513, 0), {}, 1, 520, id="a row more"),
        pytest.param((513, 0), {"mini": 32}, 2, 528, id="a row more, two steps"),
        pytest.param((30, 0), {"prompts": 5, "mini": 5, "n": 67, "ranks": 1}, 1, 30, id="30 rows of 335"),
        pytest.param((1300, 0), {"mini": 32}, 2, 1312, id="several rows a rollout"),
        pytest.param((100, 412), {"mini": 16}, 4, 512, id="most rows are flagged"),
        pytest.param((3, 61), {"mini": 16, "ranks": 2}, 1, 64, id="three rows train"),
        pytest.param((1, 0), {"mini": 16}, 1, 8, id="one row"),
        pytest.param((0, 9), {"mini": 16, "ranks": 2}, 1, 10, id="no row trains"),
        pytest.param((500, 0), {"mini": 48}, 2, 512, id="prompts that the mini-batch does not divide"),
        pytest.param((100, 0), {"prompts": 64, "mini": 8, "parameter_sync_step": 4}, 2, 112, id="a quarter a sample"),
    ],
)
def test_a_batch_gets_its_steps_and_less_than_a_row_a_rank_and_step_of_padding(
    verl, batch_of, rows, given, steps, size
):
    trainer = trainer_of(verl, **given)
    batch, metrics = step(trainer, batch_of(rows_of(*rows)))
    assert len(batch.keys) == len(set(batch.keys)) == size
    keys, sent = trainer.actor_rollout_wg.given[-1]
    assert keys == batch.keys
    assert (sent["mini_batch_size"], sent["global_batch_size"]) == (size // steps, size // steps)
    mini_batches = trained(verl, trainer, batch)
    assert len(mini_batches) == steps
    training = [
        sum(not batch_of.queue.rows[key]["extra_fields"]["env_invalid"] for key in sum(shares, []) if key[0] == "g")
        for shares in mini_batches
    ]
    assert sum(training) == rows[0]
    assert {count - rows[0] // steps for count in training} <= {0, 1}
    assert min(training) >= min(2, rows[0])
    assert metrics["browser/rows"] == sum(rows)
    assert metrics["browser/padding_rows"] == size - sum(rows)
    assert metrics["browser/optimizer_steps"] == steps


def test_verl_itself_gives_a_step_to_a_lone_row(verl, batch_of):
    trainer = as_verl_has_it(verl, trainer_of(verl, ranks=1))
    batch, _ = step(trainer, batch_of(rows_of(513)))
    rows = [sum(key[0] == "g" for key in sum(shares, [])) for shares in trained(verl, trainer, batch)]
    assert (len(batch.keys), sorted(rows)) == (1024, [1, 512])


@pytest.mark.parametrize("seed", range(6))
def test_ranks_get_equal_rows_and_about_equal_work_in_each_step(verl, batch_of, seed):
    chance = random.Random(seed)
    ranks = chance.choice([2, 4, 8])
    trainer = trainer_of(verl, ranks=ranks, mini=chance.choice([16, 32, 64]))
    given = batch_of(rows_of(chance.randrange(200, 900), chance.randrange(300)))
    lengths = {key: tag["seq_len"] for key, tag in zip(given.keys, given.tags, strict=True)}
    batch, metrics = step(trainer, given)
    assert set(lengths) <= set(batch.keys)
    assert {key: tag["seq_len"] for key, tag in zip(batch.keys, batch.tags, strict=True) if key in lengths} == lengths
    for shares in trained(verl, trainer, batch):
        assert len({len(share) for share in shares}) == 1
        tokens = [sum(lengths.get(key, 128) for key in share) for share in shares]
        assert max(tokens) - min(tokens) < 0.05 * max(tokens)
    whole = [sum(tag["seq_len"] for tag in part.tags) for part in batch.chunk(ranks)]
    assert (metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]) == (min(whole), max(whole))
    assert max(whole) - min(whole) < 0.05 * max(whole)


def test_each_pass_over_the_batch_takes_the_steps_again(verl, batch_of):
    trainer = trainer_of(verl, mini=32, actor={"ppo_epochs": 3})
    batch, metrics = step(trainer, batch_of(rows_of(513)))
    assert metrics["browser/optimizer_steps"] == len(trained(verl, trainer, batch)) == 6


def test_verls_metrics_of_the_balance_before_it_are_unchanged(verl, batch_of):
    metrics = {}
    for trainer in (trainer_of(verl), as_verl_has_it(verl, trainer_of(verl))):
        _, metrics[len(metrics)] = step(trainer, batch_of(rows_of(512)))
    for name in ("min", "max", "minmax_diff", "mean"):
        assert metrics[0][f"global_seqlen/{name}"] == metrics[1][f"global_seqlen/{name}"]
    assert metrics[0]["actor/lr"] == metrics[1]["actor/lr"]


def test_the_rows_of_a_rollout_and_the_rollouts_of_a_group_share_a_step(verl, batch_of):
    keys = [f"g{group}_{rollout}_{i}" for i in range(2) for rollout in range(4) for group in range(4)]
    trainer = trainer_of(verl, prompts=4, mini=1, n=4, ranks=2)
    batch, _ = step(trainer, batch_of({key: valid(key.split("_")[0], 0.0) for key in keys}))
    groups = [{key.split("_")[0] for key in sum(shares, [])} for shares in trained(verl, trainer, batch)]
    assert groups == [{"g0"}, {"g1"}, {"g2"}, {"g3"}]


def test_keys_of_another_format_stay_in_their_order():
    assert verl_mini_batches._neighbours(["b", "a_0_1", "b", "a_0_0", "pad_0_0"]) == [0, 2, 1, 3, 4]


@pytest.mark.parametrize(
    ("given", "reference", "size"),
    [
        ({"actor": {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 4}}, False, 528),
        ({"actor": {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": None}}, False, 516),
        ({"actor": {"use_dynamic_bsz": True, "ppo_micro_batch_size_per_gpu": 4}}, False, 516),
        ({"rollout": {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 7}}, False, 532),
        ({"ref": {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 5}}, True, 520),
        ({"ref": {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 5}}, False, 516),
        (
            {
                "actor": {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 4},
                "rollout": {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 6},
            },
            False,
            528,
        ),
    ],
    ids=["actor", "actor without size", "by tokens", "log probs", "reference", "no reference", "two sizes"],
)
def test_micro_batches_of_a_fixed_number_of_rows_divide_what_a_rank_gets(verl, batch_of, given, reference, size):
    trainer = trainer_of(verl, mini=32, ranks=2, **given)
    trainer.use_reference_policy = reference
    batch, _ = step(trainer, batch_of(rows_of(513)))
    assert len(batch.keys) == size


# --- What is left to verl ---


def without_flags(count: int) -> dict[str, dict]:
    return {f"g{i // 8}_{i % 8}_0": row(f"g{i // 8}", 0.0) for i in range(count)}


@pytest.mark.parametrize(
    ("rows", "given", "fetches"),
    [
        pytest.param(without_flags(20), {}, 1, id="no flags"),
        pytest.param(rows_of(20), {"critic": True}, 0, id="a critic"),
        pytest.param(rows_of(20), {"trainer": {"critic_warmup": 5}}, 0, id="warm-up of a critic"),
    ],
)
def test_other_batches_get_verls_own_result_by_verls_own_calls(verl, batch_of, rows, given, fetches):
    def run(stock):
        trainer = trainer_of(verl, prompts=4, mini=2, n=4, ranks=2, **given)
        if stock:
            as_verl_has_it(verl, trainer)
        batch, metrics = step(trainer, batch_of(dict(rows)))
        assert not set(vars(trainer)) & {verl_mini_batches._ARRANGED, verl_mini_batches._WARNED}
        sent = trainer.actor_rollout_wg.given[-1][1]
        # The padding's keys are random.
        return [key for key in batch.keys if key[0] == "g"], metrics, sent, [c[0] for c in batch_of.queue.calls]

    *ours, calls = run(stock=False)
    *stocks, stock_calls = run(stock=True)
    assert ours == stocks
    assert calls == ["get"] * fetches + stock_calls


def test_every_trainer_mode_takes_both_functions_from_the_class_that_is_patched(verl):
    base = verl.trainer_base.PPOTrainer
    modes = [mode for mode in base.__subclasses__() if mode.__module__.startswith("verl.trainer.ppo.v1")]
    assert {mode.__name__ for mode in modes} == {"PPOTrainerSync", "PPOTrainerColocateAsync", "PPOTrainerSeparateAsync"}
    for mode in modes:
        for name in ("_balance_batch", "_update_actor", "_get_required_batch_multiple"):
            assert getattr(mode, name) is getattr(base, name)


# --- From one function to the other ---


def test_the_config_of_the_trainer_is_not_changed(verl, batch_of):
    from omegaconf import OmegaConf

    trainer = trainer_of(verl, mini=32)
    OmegaConf.set_readonly(trainer.config, True)
    before = OmegaConf.to_yaml(trainer.config)
    step(trainer, batch_of(rows_of(513)))
    assert OmegaConf.to_yaml(trainer.config) == before
    assert trainer.actor_rollout_wg.given[-1][1]["mini_batch_size"] == 264


def test_a_batch_that_was_not_arranged_is_updated_as_verl_does(verl, batch_of):
    trainer = trainer_of(verl)
    batch, _ = step(trainer, batch_of(rows_of(513)))
    trainer._update_actor(batch, {})
    assert [sent["mini_batch_size"] for _, sent in trainer.actor_rollout_wg.given] == [520, 512]


def test_a_batch_that_never_reached_the_actor_leaves_nothing_for_the_next(verl, batch_of):
    trainer = trainer_of(verl, prompts=4, mini=2, n=4, ranks=2)
    trainer._balance_batch(batch_of(rows_of(9)), metrics={})
    step(trainer, batch_of(without_flags(16)))
    assert trainer.actor_rollout_wg.given[-1][1]["mini_batch_size"] == 8


def test_rows_that_change_on_the_way_to_the_actor_stop_training(verl, batch_of):
    trainer = trainer_of(verl)
    batch = trainer._balance_batch(batch_of(rows_of(20)), metrics={})
    batch.reorder(list(reversed(range(len(batch.keys)))))
    with pytest.raises(RuntimeError, match="rows of the batch changed between .*_balance_batch and _update_actor"):
        trainer._update_actor(batch, {})
    assert trainer.actor_rollout_wg.given == []


def test_a_stand_in_is_the_trainer_but_for_what_is_replaced():
    trainer = SimpleNamespace(kept=1, replaced=1)
    stand_in = verl_mini_batches._StandIn(trainer, replaced=2)
    stand_in.new = 3
    assert (stand_in.kept, stand_in.replaced, trainer.replaced, trainer.new) == (1, 2, 1, 3)
    with pytest.raises(AttributeError, match="missing"):
        _ = stand_in.missing


# --- Loss aggregation ---


@pytest.mark.parametrize(
    ("mode", "browser", "times"),
    [
        ("seq-mean-token-mean", {"context_policy": "summary"}, 1),
        ("token-mean", {"context_policy": "summary"}, 0),
        ("seq-mean-token-mean", None, 0),
    ],
)
def test_a_loss_that_sees_how_rollouts_are_split_is_warned_of_once(verl, batch_of, caplog, mode, browser, times):
    sections = {} if browser is None else {"browser": browser}
    trainer = trainer_of(verl, actor={"loss_agg_mode": mode}, **sections)
    with caplog.at_level(logging.WARNING, "verl_mini_batches"):
        for _ in range(2):
            step(trainer, batch_of(rows_of(20)))
    texts = [record.getMessage() for record in caplog.records if record.name == "verl_mini_batches"]
    assert [text.split(" ")[0] for text in texts] == [f"actor_rollout_ref.actor.loss_agg_mode={mode}"] * times
