"""Every attempt leaves one line; a log that can't be written costs no rollout."""

import json
import logging

from episode_log import AttemptRecord, EpisodeLog, read_episodes


def test_each_attempt_is_one_line_in_the_order_of_its_end(tmp_path):
    log = EpisodeLog(tmp_path / "episodes")
    log.write(AttemptRecord(task_id="a", reward=0.0, answer="zwei\nZeilen \ud800"))
    log.write(AttemptRecord(task_id="b", failure_kind="session_lost"))
    records, problems = read_episodes(tmp_path / "episodes")
    assert problems == []
    assert [(r["task_id"], r["reward"], r["failure_kind"]) for r in records] == [
        ("a", 0.0, ""),
        ("b", None, "session_lost"),
    ]
    assert records[0]["ended_at"] <= records[1]["ended_at"]


def test_a_broken_line_is_named_and_costs_only_itself(tmp_path):
    path = tmp_path / "episodes-host-1.jsonl"
    path.write_text('{"ended_at": 1, "task_id": "a"}\n{"ended_at": 2, "ta\n')
    records, problems = read_episodes(tmp_path)
    assert [r["task_id"] for r in records] == ["a"]
    assert len(problems) == 1 and problems[0].startswith(f"{path}:2: ")


def test_a_log_that_cannot_be_written_warns_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = EpisodeLog(tmp_path / "file" / "episodes")
    with caplog.at_level(logging.WARNING):
        log.write(AttemptRecord())
        log.write(AttemptRecord())
    assert len(caplog.records) == 1


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    EpisodeLog(None).write(AttemptRecord())
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_valid_json_whatever_the_policy_wrote(tmp_path):
    EpisodeLog(tmp_path).write(AttemptRecord(actions=["click", "!no_call"], answer='"}\n{'))
    (path,) = tmp_path.iterdir()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["answer"] == '"}\n{'
