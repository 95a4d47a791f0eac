"""The terminal's view of a running training says what its log says, what is stuck, and fits 80 columns."""

import io
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

import episode_report
from episode_record import AttemptOutcome, AttemptRecord
from report_follow import STUCK_S, FollowedRun, follow, plain_lines, session_text, span, stuck, view
from tests.episode_samples import write_samples

NOW = 1_760_000_000.0
WON = AttemptRecord(
    ended_at=NOW,
    global_step=1,
    uid="u",
    split="train",
    task_id="t",
    reward=1.0,
    outcome=AttemptOutcome.SUCCESS,
    turns=3,
)
LOST = replace(WON, reward=None, outcome=AttemptOutcome.INVALID, failure_kind="session_lost", turns=1)


def append(run, *records, process=1):
    path = run / "episodes" / f"episodes-node1-{process}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(record)) + "\n" for record in records)


def followed(run):
    result = FollowedRun(run)
    result.read_new()
    return result


def shown(run, now=NOW):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(view(followed(run), now))
    return console.file.getvalue()


def follow_for(run, rounds, terminal=False, between=lambda number: None):
    """Follow for some refreshes, then press Ctrl-C; return the exit status and what was printed."""
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
    passed = []

    def wait(seconds):
        between(len(passed))
        passed.append(seconds)
        if len(passed) == rounds:
            raise KeyboardInterrupt

    status = follow(run, interval_s=3.0, console=console, wait=wait)
    assert passed == [3.0] * rounds
    return status, console.file.getvalue()


def test_steps_success_and_failures_are_those_of_the_log(tmp_path):
    append(tmp_path, WON, replace(WON, rollout=1, reward=0.0, outcome=AttemptOutcome.FAILURE), replace(LOST, rollout=2))
    append(tmp_path, replace(WON, split="validation", global_step=2), process=2)
    text = shown(tmp_path)
    assert "4 attempts; rollouts: 3 valid, 1 invalid, 0 unfinished" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "train", "0.500", "(1/2)", "0.333", "(1/3)", "1", "2.3", "0.0"] in rows
    assert ["2", "val", "1.000", "(1/1)", "1.000", "(1/1)", "0", "3.0", "0.0"] in rows
    assert ["session_lost", "1", "1"] in rows
    assert "STUCK" not in text


def test_the_view_fits_80_columns_and_a_small_terminal(tmp_path):
    write_samples(tmp_path / "episodes", episodes=400)
    lines = shown(tmp_path).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 30


def test_only_what_is_new_is_read(tmp_path):
    append(tmp_path, WON)
    run = FollowedRun(tmp_path)
    assert run.read_new() == 1
    path = tmp_path / "episodes" / "episodes-node1-1.jsonl"
    size = path.stat().st_size
    path.write_bytes(b"x" * size)  # what was read is not read again
    append(tmp_path, replace(WON, rollout=1))
    assert run.read_new() == 1 and run.files.unreadable == 0
    assert run.read_new() == 0


def test_a_run_whose_log_is_not_there_yet_is_waited_for(tmp_path):
    status, text = follow_for(tmp_path, 3, between=lambda number: append(tmp_path, WON) if number == 1 else None)
    first, second, *rest = [line.partition(" ")[2] for line in text.splitlines()]
    assert status == 0
    assert first == "waiting for the first attempt to end"
    assert second.startswith("step 1 training: success over valid 1.000 (1/1), over all 1.000 (1/1), 0 invalid")
    assert [line for line in rest if not line.startswith("STUCK: no attempt has ended")] == []


def test_without_a_terminal_each_change_is_a_line_and_nothing_is_said_twice(tmp_path):
    append(tmp_path, WON)
    more = {2: replace(LOST, rollout=1)}
    _, text = follow_for(tmp_path, 5, between=lambda n: append(tmp_path, more[n]) if n in more else None)
    steps = [line for line in text.splitlines() if " step 1 " in line]
    assert len(steps) == 2
    assert "over valid 1.000 (1/1), over all 0.500 (1/2), 1 invalid" in steps[1] and "session_lost 1" in steps[1]
    assert sum("no attempt has ended" in line for line in text.splitlines()) == 1
    assert "\x1b" not in text


def test_in_a_terminal_the_view_is_drawn_until_ctrl_c(tmp_path):
    append(tmp_path, WON)
    status, text = follow_for(tmp_path, 2, terminal=True)
    assert status == 0 and "last steps" in text


@pytest.mark.parametrize(
    ("records", "later_s", "sentence"),
    [
        ([WON], STUCK_S + 60, "no attempt has ended for 11 min"),
        (
            [replace(LOST, final=False), replace(WON, uid="v", ended_at=NOW + 900)],
            900,
            "rollouts to be tried again that have not ended: 1, for up to 15 min (step 1, t)",
        ),
        ([replace(LOST, rollout=n) for n in range(4)], 0, "task t: none of 4 valid (session_lost 4)"),
        ([WON], STUCK_S - 60, None),
        ([replace(LOST, final=False)], 60, None),
        ([replace(LOST, rollout=n) for n in range(3)] + [replace(WON, rollout=3)], 0, None),
    ],
    ids=["silence", "retry-never-ended", "hopeless-task", "no-silence-yet", "retry-under-way", "one-was-valid"],
)  # fmt: skip
def test_what_is_stuck_is_named_and_what_moves_is_not(tmp_path, records, later_s, sentence):
    append(tmp_path, *records)
    sentences = stuck(followed(tmp_path), NOW + later_s)
    assert [s.startswith(sentence or "") for s in sentences] == ([True] if sentence else [])


@pytest.mark.parametrize(("old_step", "named"), [(5, True), (2, False)], ids=["of-this-step", "of-an-earlier-start"])
def test_a_process_that_went_silent_is_named_while_others_write(tmp_path, old_step, named):
    append(tmp_path, replace(WON, global_step=old_step), process=1)
    append(tmp_path, replace(WON, global_step=5, uid="v", ended_at=NOW + STUCK_S + 120), process=2)
    sentences = stuck(followed(tmp_path), NOW + STUCK_S + 120)
    assert sentences == (["episodes-node1-1.jsonl: its process has logged nothing for 12 min"] if named else [])


def test_sessions_are_the_trainers_where_it_counted_them(tmp_path):
    append(tmp_path, replace(WON, last_call="verify"), replace(LOST, rollout=1, turns=0, last_call="seed"))
    assert session_text(followed(tmp_path)) == "sessions: 1 opened and closed in the log"
    data = {"browser/sessions_opened": 9.0, "browser/sessions_closed": 8.0, "browser/sessions_open": 1.0}
    (tmp_path / "metrics-000.jsonl").write_text(json.dumps({"step": 4, "data": data}) + "\n")
    assert session_text(followed(tmp_path)) == "sessions in step 4: closed 8, open 1, opened 9"
    assert session_text(followed(tmp_path)) in plain_lines(followed(tmp_path), NOW)


def test_texts_of_the_log_cannot_control_the_terminal(tmp_path):
    evil = "\x1b[2J\x1b]0;title\x07[bold]x[/]\n\u202e"
    append(tmp_path, *(replace(LOST, rollout=n, failure_kind=evil, task_id=evil) for n in range(4)))
    text = shown(tmp_path) + "".join(plain_lines(followed(tmp_path), NOW))
    assert not set(text.replace("\n", "")) & {"\x1b", "\x07", "\u202e"} and "[bold]x[/]" in text


def test_a_line_that_cannot_be_read_is_said_and_following_goes_on(tmp_path):
    append(tmp_path, WON)
    with (tmp_path / "episodes" / "episodes-node1-1.jsonl").open("a") as file:
        file.write('{"ended_at": 1, "call_records": [{}]}\nbroken\n')
    append(tmp_path, replace(WON, rollout=1))
    text = shown(tmp_path)
    assert "2 attempts" in text and "2 lines of the log can't be read" in text


def test_a_file_that_cannot_be_read_now_is_said_and_read_later(tmp_path):
    append(tmp_path, WON)
    run = followed(tmp_path)
    path = tmp_path / "episodes" / "episodes-node1-1.jsonl"
    away = path.rename(tmp_path / "away")
    assert run.read_new() == 0
    assert stuck(run, NOW) == [f"can't read {path}: No such file or directory"[:200]]
    away.rename(path)
    append(tmp_path, replace(WON, rollout=1))
    assert run.read_new() == 1 and stuck(run, NOW) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2.0 h")], ids=str
)
def test_spans_read_in_the_unit_that_fits(seconds, text):
    assert span(seconds) == text


def test_the_program_follows_the_folder_that_it_is_given(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("report_follow.follow", lambda *arguments: calls.append(arguments) or 0)
    assert episode_report.main([str(tmp_path), "--follow", "--interval", "2"]) == 0
    assert calls == [(tmp_path, None, 2.0)]
