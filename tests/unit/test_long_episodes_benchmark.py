"""The benchmark of long episodes compares what it says, and a sweep can be stopped and started."""

import json
from dataclasses import asdict, dataclass

import pytest

from benchmarks.learning import runs
from benchmarks.long_episodes import plot
from benchmarks.long_episodes.train import Condition, outcome
from context_policy import ContextPolicy
from cpu.long_context import ContextLimits
from cpu.training_run import RunFolder
from episode_log import AttemptRecord

RESULT = {"wall_s": 7, "curve": [{"step": 0, "valid_rollouts": 0, "success": 0.25, "se": 0.1}]}


@dataclass(frozen=True)
class _Named:
    name: str


@pytest.fixture(autouse=True)
def _own_signals(monkeypatch):
    """Leave the test program's own signals alone."""
    monkeypatch.setattr(runs.signal, "signal", lambda number, handler: None)


def _wanted(*names):
    return {name: _Named(name) for name in names}


def test_the_context_policy_is_all_that_differs_between_the_runs_of_a_seed(tmp_path):
    overrides = {p: set(Condition(p, 0, 12).overrides(tmp_path)) for p in ContextPolicy}
    for policy, own in overrides.items():
        assert own - set.intersection(*overrides.values()) == {f"browser.context_policy={policy}"}


def test_overrides_hold_every_limit_under_the_key_that_the_loop_reads():
    limits = ContextLimits(ContextPolicy.SUMMARY, 1, 2, 3, 4, 5, 6, 7, 8)
    assert dict(override.split("=") for override in limits.overrides()) == {
        "browser.context_policy": "summary",
        "browser.context_budget_tokens": "1",
        "browser.window_observations": "2",
        "data.max_prompt_length": "3",
        "data.max_response_length": "4",
        "browser.max_summary_tokens": "5",
        "browser.max_tokens_per_turn": "6",
        "browser.max_turns": "7",
        "browser.max_unusable_calls": "8",
    }


def test_every_run_has_a_name_of_its_own():
    assert len({Condition(policy, seed, 12).name for policy in ContextPolicy for seed in (0, 1)}) == 6


def _log(folder, episodes):
    folder.episodes.mkdir()
    lines = [json.dumps(asdict(record) | more) + "\n" for record, more in episodes]
    (folder.episodes / "episodes-a-1.jsonl").write_text("".join(lines))


def test_a_runs_outcome_counts_valid_rollouts_and_not_rows_or_spoiled_attempts(tmp_path):
    folder = RunFolder(tmp_path)
    train = {"split": "train", "stop_reason": "finished"}
    _log(
        folder,
        [
            (AttemptRecord(global_step=0, split="validation", uid="a", reward=1.0), {"rows": 4, "compactions": 3}),
            (AttemptRecord(global_step=0, split="validation", uid="a", reward=0.0), {"rows": 4, "compactions": 3}),
            (AttemptRecord(global_step=0, split="validation", uid="b", reward=0.0), {"rows": 1, "compactions": 0}),
            (AttemptRecord(global_step=0, split="validation", uid="b", reward=0.0), {"rows": 1, "compactions": 0}),
            (AttemptRecord(global_step=1, **train, reward=1.0), {"rows": 4, "compactions": 3}),
            (AttemptRecord(global_step=1, split="train", failure_kind="session_lost"), {"rows": 0, "compactions": 9}),
            (AttemptRecord(global_step=2, split="train", reward=0.0, stop_reason="context_full"),
             {"rows": 1, "compactions": 0}),
            (AttemptRecord(global_step=1, split="validation", uid="c", reward=1.0), {"rows": 1, "compactions": 0}),
        ],
    )  # fmt: skip
    found = outcome(folder)
    curve = found.pop("curve")
    assert found == {"rows_per_rollout": 2.5, "compactions_per_episode": 1.5, "context_full_share": 0.5}
    assert [(p["step"], p["valid_rollouts"], p["success"], p["se"]) for p in curve] == [
        (0, 0, 0.25, 0.25),
        (1, 1, 1.0, 0.0),
    ]


def test_only_runs_without_a_result_are_run(tmp_path, capsys):
    (tmp_path / "one.json").write_text("{}")
    ran = []

    def run(condition):
        ran.append(condition.name)
        return RESULT

    assert runs.run_missing(_wanted("one", "two"), tmp_path, run) == 0
    assert ran == ["two"] and json.loads((tmp_path / "two.json").read_text()) == RESULT
    assert "success 0.250 -> 0.250" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(RuntimeError("no memory"), 1, "error: no memory"), (KeyboardInterrupt(), 130, "stopped; the same command")],
    ids=["fails", "is stopped"],
)
def test_a_run_that_fails_or_is_stopped_leaves_no_result_and_ends_the_sweep(tmp_path, capsys, error, code, said):
    def run(condition):
        raise error

    assert runs.run_missing(_wanted("one", "two"), tmp_path, run) == code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@dataclass
class _Tree:
    exit_code: int | None

    def log_tail(self):
        return "out of memory"


@dataclass
class _Training:
    tree: _Tree
    folder: RunFolder
    stopped: bool = False

    def start(self):
        pass

    def stop(self):
        self.stopped = True


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_training_is_stopped_whatever_came_of_it(tmp_path, exit_code):
    training = _Training(_Tree(exit_code), RunFolder(tmp_path))
    if exit_code:
        with pytest.raises(RuntimeError, match="window-seed0: out of memory"):
            runs.train(training, "window-seed0")
    else:
        runs.train(training, "window-seed0")
    assert training.stopped


def test_the_figure_is_drawn_from_the_results(tmp_path):
    point = {"step": 3, "valid_rollouts": 90, "success": 0.5, "se": 0.1}
    for seed in (0, 1):
        result = {"policy": "window", "rows_per_rollout": 4.0, "curve": [RESULT["curve"][0], point]}
        (tmp_path / f"window-seed{seed}.json").write_text(json.dumps(result))
    plot.draw(plot.load(tmp_path), tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")


def test_without_results_the_plot_says_what_to_run(tmp_path):
    with pytest.raises(SystemExit, match="train.py first"):
        plot.load(tmp_path)
