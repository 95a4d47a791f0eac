"""The demo's figures come from the files of a run; its errors are one line that says what to do."""

import json
import socket

import pytest

from cpu import demo
from cpu.demo_summary import Success, summarize, summary_text, validation_success
from cpu.processes import free_port
from cpu.training_run import RunFolder, TrainingRun
from episode_log import AttemptRecord, EpisodeLog


def validation_dump(path, scores_by_task):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"uid": f"{task}_{rollout}_0", "score": score})
        for task, scores in scores_by_task.items()
        for rollout, score in enumerate(scores)
    ]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("scores", "success"),
    [
        ({"a": [1, 1], "b": [0, 0]}, Success(0.5, 0.5, 4, 2)),
        ({"a": [1, 0], "b": [0, 1]}, Success(0.5, 0.0, 4, 2)),
        ({"a": [1, 1, 1], "b": [0]}, Success(0.75, 0.5, 4, 2)),
        ({"a": [1]}, Success(1.0, 0.0, 1, 1)),
    ],
    ids=["all of the spread is between tasks", "none of it is", "an invalid sample is missing", "one task"],
)
def test_validation_success_has_its_standard_error_over_tasks(tmp_path, scores, success):
    path = tmp_path / "0.jsonl"
    validation_dump(path, scores)
    assert validation_success(path) == success


@pytest.fixture
def finished_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    validation_dump(folder.validations / "0.jsonl", {"a": [0, 0], "b": [1, 0]})
    validation_dump(folder.validations / "12.jsonl", {"a": [1, 1], "b": [1, 0]})
    for number, steps in enumerate([range(1, 9), range(7, 13)]):
        path = folder.next_metrics_path()
        assert path.name == f"metrics-00{number}.jsonl"
        path.write_text(
            "".join(f'{{"step":{n},"data":{{"browser/reward_over_valid/mean":{n / 10}}}}}\n' for n in steps)
        )
    log = EpisodeLog(folder.episodes)
    log.write(AttemptRecord(turns=3, reward=1.0, stop_reason="finished"))
    log.write(AttemptRecord(turns=1, failure_kind="session_lost"))
    folder.checkpoints.mkdir()
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text("12")
    return folder


def test_a_runs_figures_are_those_of_its_files(finished_run):
    figures = summarize(finished_run, wall_s=60)
    assert figures["steps"] == 12
    assert figures["validation_gain"] == pytest.approx(0.5)
    assert figures["reward_first_five_steps"] == pytest.approx(0.3)
    assert figures["reward_last_five_steps"] == pytest.approx(1.0)
    assert (figures["attempts"], figures["valid_rollouts"], figures["turns"]) == (2, 1, 4)
    assert figures["failures_by_kind"] == {"session_lost": 1}
    assert figures["checkpoint"].endswith("global_step_12")
    text = summary_text(figures)
    assert "0.250 ± 0.250 (4 samples of 2 tasks)" in text and "gain +0.500" in text and "session_lost 1" in text


def test_what_a_stopped_run_did_not_measure_is_not_reported_as_zero(tmp_path):
    figures = summarize(RunFolder(tmp_path), wall_s=60)
    assert figures["validation_before"] is figures["validation_gain"] is figures["reward_first_five_steps"] is None
    assert "validation after       not measured" in summary_text(figures)


def test_a_line_that_is_still_being_written_is_no_metric(tmp_path):
    (tmp_path / "metrics-000.jsonl").write_text('{"step":1,"data":{"a":1}}\n{"step":2,"da')
    assert RunFolder(tmp_path).metrics() == {1: {"a": 1}}


def test_the_training_command_takes_overrides_last_and_the_environment_holds_no_secret_of_its_own(tmp_path):
    training = TrainingRun(RunFolder(tmp_path), "http://127.0.0.1:1", seed=3, overrides=["data.seed=4"])
    command, environment = training.command(), training.environment()
    assert command[1:3] == ["-m", "verl.trainer.main_ppo"]
    assert command.index("data.seed=3") < command.index("data.seed=4")
    assert environment["NEMO_GYM_URL"] == "http://127.0.0.1:1"
    assert environment["VERL_PLATFORM"] == "cpu"


def test_a_port_in_use_is_one_line_that_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "NEEDED_GIB", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status = demo.main(["--runs", str(tmp_path), "--site-port", str(port), "--gym-port", str(free_port())])
    assert status == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("demo: error: ") and str(port) in line


def test_too_little_memory_is_one_line_that_says_how_much_is_needed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "NEEDED_GIB", 1e6)
    assert demo.main(["--runs", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "GiB of memory are available, 1e+06 are needed" in line


def test_a_finished_run_is_not_resumed(finished_run, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_check_machine", lambda options: None)
    folder = finished_run.root.rename(finished_run.root.with_name("demo-20260101-000000-seed5"))
    (folder / "demo.json").write_text('{"seed": 5, "steps": 12, "overrides": []}')
    assert demo.main(["--runs", str(folder.parent), "--resume"]) == 1
    assert "is finished (12 steps)" in capsys.readouterr().err


def test_a_stopped_run_is_resumed_with_its_own_settings(finished_run, monkeypatch):
    resumed = []
    monkeypatch.setattr(demo, "_check_machine", lambda options: None)
    monkeypatch.setattr(
        demo, "_run", lambda options, folder: resumed.append((options.seed, options.steps, folder)) or 0
    )
    folder = finished_run.root.rename(finished_run.root.with_name("demo-20260101-000000-seed5"))
    (folder / "demo.json").write_text('{"seed": 5, "steps": 30, "overrides": []}')
    assert demo.main(["--runs", str(folder.parent), "--resume"]) == 0
    assert resumed == [(5, 30, RunFolder(folder))]


def test_resuming_without_a_run_says_how_to_start_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_check_machine", lambda options: None)
    assert demo.main(["--runs", str(tmp_path), "--resume"]) == 1
    assert "make demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "status"),
    [(None, 0), (demo.DemoError("training ended"), 1), (KeyboardInterrupt(), 130)],
    ids=["trained", "failed", "stopped"],
)
def test_the_demo_ends_with_the_page_of_its_run_however_it_ends(tmp_path, capsys, monkeypatch, ending, status):
    def run(options, folder):
        EpisodeLog(folder.episodes).write(AttemptRecord(task_id="a", reward=1.0, stop_reason="finished"))
        if ending:
            raise ending
        return 0

    monkeypatch.setattr(demo, "_check_machine", lambda options: None)
    monkeypatch.setattr(demo, "_run", run)
    assert demo.main(["--runs", str(tmp_path)]) == status
    (page,) = tmp_path.glob("demo-*/report.html")
    assert f"demo: report: {page}" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_costs_the_demo_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_check_machine", lambda options: None)
    monkeypatch.setattr(demo, "_run", lambda options, folder: folder.episodes.mkdir() or 0)
    assert demo.main(["--runs", str(tmp_path)]) == 0
    assert "demo: no report: no episodes-*.jsonl in" in capsys.readouterr().out
