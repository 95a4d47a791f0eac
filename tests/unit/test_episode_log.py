"""Every attempt leaves one line; a log that can't be written costs no rollout, and no secret gets into it."""

import asyncio
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import threading
from dataclasses import asdict, fields
from pathlib import Path

import pytest

import episode_log
import line_file
from episode_log import AttemptRecord, EpisodeLog, iter_episodes, read_episodes
from episode_record import AttemptOutcome, ObservationRecord, TurnRecord
from line_file import LineFile, LineWriter
from secret_masking import MASK, Masker
from tests.episode_samples import write_samples


@pytest.fixture(autouse=True)
def fresh_writers(monkeypatch):
    """A writer warns once in its life, and they live as long as their process."""
    monkeypatch.setattr(episode_log, "_writers", {})


def turn(text: str = "", **given) -> TurnRecord:
    return TurnRecord(turn=1, action="click", observation=ObservationRecord(text=text), **given)


def only_record(folder: Path) -> dict:
    (record,), problems = read_episodes(folder)
    assert problems == []
    return record


def test_each_attempt_is_one_line_in_the_order_of_its_end(tmp_path):
    log = EpisodeLog(tmp_path / "episodes")
    log.write(AttemptRecord(task_id="a", reward=0.0, answer="zwei\nZeilen \ud800 \u2028 \x85"))
    log.write(AttemptRecord(task_id="b", failure_kind="session_lost"))
    records, problems = read_episodes(tmp_path / "episodes")
    assert problems == []
    assert [(r["task_id"], r["reward"], r["failure_kind"]) for r in records] == [
        ("a", 0.0, ""),
        ("b", None, "session_lost"),
    ]
    assert records[0]["answer"] == "zwei\nZeilen \ud800 \u2028 \x85"
    assert records[0]["ended_at"] <= records[1]["ended_at"]


def test_lines_of_several_processes_are_merged_by_their_ends(tmp_path):
    for name, ends in (("a", (1.0, 4.0)), ("b", (2.0, 3.0, 5.0))):
        lines = [json.dumps({"ended_at": end}) for end in ends]
        (tmp_path / f"episodes-{name}.jsonl").write_text("\n".join(lines))
    assert [record["ended_at"] for record in iter_episodes(tmp_path)] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_reading_holds_one_line_of_a_file_at_a_time(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(episode_log, "completed", lambda record: read.append(1) or record)
    write_samples(tmp_path, 50)
    assert next(iter_episodes(tmp_path))["ended_at"] > 0
    assert len(read) <= 3


@pytest.mark.parametrize(
    "line",
    ['{"ended_at": 2, "ta', "[1, 2]", '{"task_id": "x"}', '"text"', "\x00\x00", '{"a":' * 100_000],
    ids=["half a line", "a list", "no end", "a text", "zeros", "nested too deep"],
)
def test_a_broken_line_is_named_and_costs_only_itself(tmp_path, line):
    path = tmp_path / "episodes-host-1.jsonl"
    path.write_text(f'{{"ended_at": 1, "task_id": "a"}}\n{line}\n\n{{"ended_at": 3, "task_id": "c"}}\n')
    records, problems = read_episodes(tmp_path)
    assert [r["task_id"] for r in records] == ["a", "c"]
    assert len(problems) == 1 and problems[0].startswith(f"{path}:2: ")


def test_a_line_of_schema_1_gets_what_it_lacks(tmp_path):
    line = {"schema": 1, "ended_at": 1.0, "reward": 1.0, "failure_kind": "", "turns": 2}
    (tmp_path / "episodes-old.jsonl").write_text(json.dumps(line))
    record = only_record(tmp_path)
    assert set(record) == {field.name for field in fields(AttemptRecord)}
    assert (record["outcome"], record["turns"], record["turn_records"], record["schema"]) == ("success", 2, [], 1)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    EpisodeLog(None).write(AttemptRecord())
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_valid_json_whatever_the_policy_wrote(tmp_path):
    EpisodeLog(tmp_path).write(AttemptRecord(actions=["click", "!no_call"], answer='"}\n{'))
    (path,) = tmp_path.iterdir()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["answer"] == '"}\n{'


@pytest.mark.parametrize(
    ("reward", "failure_kind", "outcome"),
    [
        (1.0, "", "success"),
        (2.0, "", "success"),
        (0.5, "", "partial"),
        (0.0, "", "failure"),
        (-1.0, "", "failure"),
        (None, "session_lost", "invalid"),
        (None, "", "invalid"),
        (1.0, "rows_not_planned", "invalid"),
    ],
)
def test_what_was_not_measured_is_no_failure(reward, failure_kind, outcome):
    assert AttemptOutcome.of(reward, failure_kind) == outcome


# --- Texts ---


def test_no_secret_gets_into_any_text_of_a_line(tmp_path):
    secret, key = "hunter2!", "sk-of-the-judge-1234"
    page = f"URL: https://a.example/?password={secret}\nTITLE: {secret}"
    given = {"arguments": {"text": secret, "element_id": 1}, "element": secret, "error": f'fill("{secret}")'}
    record = AttemptRecord(
        question=f"Log in with {secret}.",
        answer=secret,
        failure_evidence=f"{secret} {key}",
        judge_reason=f"401: {key}",
        start_page=ObservationRecord(text=page, url=f"https://a.example/?password={secret}"),
        turn_records=[turn(page, reply=json.dumps({"text": secret}), summary=secret, **given)],
    )
    EpisodeLog(tmp_path, Masker((key,))).write(record, [secret])
    (path,) = tmp_path.iterdir()
    assert secret not in path.read_text() and key not in path.read_text()
    assert only_record(tmp_path)["turn_records"][0]["arguments"] == {"text": MASK, "element_id": 1}


def test_a_digest_is_of_the_whole_masked_text(tmp_path):
    text = "page of bob:  https://bob:pw@a.example " + "x" * 3000
    EpisodeLog(tmp_path).write(AttemptRecord(start_page=ObservationRecord(text=text)))
    shown = only_record(tmp_path)["start_page"]
    masked = text.replace("bob:pw", MASK)
    assert shown["sha256"] == hashlib.sha256(masked.encode()).hexdigest()
    assert shown["chars"] == len(masked)
    assert shown["text"] == f"{masked[:2000]} [cut: {len(masked)} characters]"


def test_a_secret_at_the_place_of_the_cut_is_masked_whole(tmp_path):
    text = "x" * (episode_log.TEXT_CHARS - 4) + "hunter2!"
    EpisodeLog(tmp_path).write(AttemptRecord(turn_records=[turn(reply=text)]), ["hunter2!"])
    assert "hunt" not in only_record(tmp_path)["turn_records"][0]["reply"]


# --- Bounds ---


@pytest.mark.parametrize(
    ("line_bytes", "file_bytes", "turns", "texts_left_out"),
    [
        (1 << 20, 1 << 20, 3, ""),
        (8_000, 1 << 20, 3, "line_too_long"),
        (1_900, 1 << 20, 0, "line_too_long"),
        (1 << 20, 1, 3, "file_full"),
    ],
    ids=["all of it", "no texts", "no turns", "file full"],
)
def test_a_line_and_a_file_are_bounded_and_every_attempt_is_counted(
    tmp_path, monkeypatch, line_bytes, file_bytes, turns, texts_left_out
):
    monkeypatch.setattr(episode_log, "LINE_BYTES", line_bytes)
    monkeypatch.setattr(episode_log, "FILE_BYTES", file_bytes)
    log = EpisodeLog(tmp_path)
    log.write(AttemptRecord(task_id="the first one of the file"))
    log.write(AttemptRecord(turns=3, turn_records=[turn("a" * 3000, reply="b" * 3000)] * 3))
    first, second = read_episodes(tmp_path)[0]
    assert first["texts_left_out"] == ""
    assert (len(second["turn_records"]), second["texts_left_out"], second["turns"]) == (turns, texts_left_out, 3)
    assert all(bool(t["reply"]) == (not texts_left_out) for t in second["turn_records"])
    assert all(t["observation"]["chars"] == 3000 for t in second["turn_records"])
    (path,) = tmp_path.iterdir()
    assert all(len(line) <= line_bytes for line in path.read_bytes().splitlines())


# --- What goes wrong ---


class Unwritable:
    """A record's value that JSON has no form for."""


def test_a_log_that_cannot_be_written_warns_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        EpisodeLog(tmp_path / "file" / "episodes").write(AttemptRecord())
        EpisodeLog(tmp_path / "file" / "episodes").write(AttemptRecord())
    assert len(caplog.records) == 1


async def test_a_record_that_cannot_be_a_line_costs_only_itself(tmp_path, caplog):
    log = EpisodeLog(tmp_path)
    with caplog.at_level(logging.WARNING):
        await log.append(AttemptRecord(task_id="bad", actions=[Unwritable()]))
        await log.append(AttemptRecord(task_id="good"))
    assert [r["task_id"] for r in read_episodes(tmp_path)[0]] == ["good"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"Lines are missing in {log._writer.file.path}, and training goes on without them"
    ]
    assert "not JSON serializable" in caplog.text


async def test_a_full_disk_costs_lines_and_nothing_else(caplog):
    writer = LineWriter(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        await writer.append(lambda size: b"a line")
        await writer.append(lambda size: b"another")
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text


@pytest.mark.parametrize("end", ["", "t"], ids=["nothing of the line", "half of it"])
def test_after_a_full_disk_the_next_line_is_whole(tmp_path, monkeypatch, end):
    path = tmp_path / "lines"
    file = LineFile(path)
    assert file.append(b"one")

    class FullDisk:
        """A file on a full disk: it takes the first bytes of what is written, and then none."""

        def __init__(self, real):
            self.real = real

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.real.close()

        def seek(self, *args):
            return self.real.seek(*args)

        def write(self, content):
            if not end:
                raise OSError(28, "No space left on device")
            return self.real.write(end.encode())

    real_open = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *args, **kwargs: FullDisk(real_open(self, *args, **kwargs)))
        assert not file.append(b"two")
    assert file.append(b"three")
    assert path.read_bytes().split() == [b"one", *([end.encode()] if end else []), b"three"]


def test_a_line_follows_a_half_line_that_was_there(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"ha")
    assert LineFile(path).append(b"whole")
    assert path.read_bytes() == b"ha\nwhole\n"


async def test_a_disk_that_hangs_is_waited_for_once_and_loses_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(line_file, "PATIENCE_S", 0.05)
    writer, goes_on = LineWriter(tmp_path / "lines"), threading.Event()

    def first(size: int) -> bytes:
        goes_on.wait(300)
        return b"first"

    try:
        with caplog.at_level(logging.WARNING):
            await writer.append(first)
            monkeypatch.setattr(line_file, "PATIENCE_S", 1000.0)
            async with asyncio.timeout(20):
                for number in range(20):
                    await writer.append(lambda size, n=number: b"%d" % n)
    finally:
        goes_on.set()
    assert len(caplog.records) == 1 and "longer than" in caplog.text
    await writer.append(lambda size: b"last")
    await asyncio.to_thread(writer.thread.close)
    assert (tmp_path / "lines").read_bytes().split() == [b"first", *(b"%d" % n for n in range(20)), b"last"]


async def test_lines_that_wait_for_the_disk_are_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(line_file, "PATIENCE_S", 0.01)
    monkeypatch.setattr(line_file, "MOST_WAITING", 3)
    writer, goes_on = LineWriter(tmp_path / "lines"), threading.Event()
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            await writer.append(lambda size: goes_on.wait(30) and b"line" or b"line")
    goes_on.set()
    await asyncio.to_thread(writer.thread.close)
    assert (tmp_path / "lines").read_bytes().count(b"line") == 3
    assert "wait for the disk; some are given up" in caplog.text


async def test_the_event_loop_goes_on_while_a_line_is_made(tmp_path):
    writer, goes_on = LineWriter(tmp_path / "lines"), threading.Event()
    appending = asyncio.create_task(writer.append(lambda size: b"%d" % goes_on.wait(30)))
    await asyncio.sleep(0)
    assert not appending.done()
    goes_on.set()
    await appending
    assert (tmp_path / "lines").read_bytes() == b"1\n"


def _log_and_die(folder: Path) -> None:
    async def work() -> None:
        for number in range(5):
            await EpisodeLog(folder).append(AttemptRecord(task_id=f"{number}"))
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(work())


def _log_many(folder: Path, name: str) -> None:
    log = EpisodeLog(folder)
    for _ in range(50):
        log.write(AttemptRecord(task_id=name, turn_records=[turn("x" * 1500)]))


def test_a_killed_worker_leaves_a_line_of_every_attempt_that_it_finished(tmp_path):
    worker = multiprocessing.get_context("spawn").Process(target=_log_and_die, args=(tmp_path,))
    worker.start()
    worker.join(40)
    assert worker.exitcode == -signal.SIGKILL
    records, problems = read_episodes(tmp_path)
    assert [r["task_id"] for r in records] == list("01234") and problems == []


def test_workers_that_write_at_once_do_not_disturb_each_other(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_log_many, args=(tmp_path, f"{number}")) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(40)
    records, problems = read_episodes(tmp_path)
    assert problems == [] and len(records) == 150
    assert {r["task_id"] for r in records} == {"0", "1", "2"}


# --- The made-up logs ---


def test_the_samples_are_of_this_schema_and_go_together(tmp_path):
    count = write_samples(tmp_path, 200, seed=3)
    records, problems = read_episodes(tmp_path)
    assert len(records) == count and len(problems) == 1
    assert {r["outcome"] for r in records} == {"success", "failure", "invalid"}
    assert {key for record in records for key in record} == set(asdict(AttemptRecord()))
    for record in records:
        turns, calls, rows = record["turn_records"], record["call_records"], record["row_records"]
        assert record["turns"] == len(turns) == len(record["actions"])
        assert record["rows"] == len(rows) and record["prompt_tokens"] == sum(r["prompt_tokens"] for r in rows)
        trained = {id_: number for number, row in enumerate(rows) for id_ in row["trains"]}
        assert {call["id"]: call["row"] for call in calls if call["row"] is not None} == trained
        assert record["outcome"] == AttemptOutcome.of(record["reward"], record["failure_kind"])
        assert sum(call["kind"] == "discarded" for call in calls) == record["discarded_calls"]
        assert {turn["call"] for turn in turns} == {call["id"] for call in calls if call["kind"] == "turn"}


def test_the_same_seed_gives_the_same_samples(tmp_path):
    for name in ("a", "b"):
        write_samples(tmp_path / name, 40, seed=5)
    texts = [[path.read_text() for path in sorted((tmp_path / name).iterdir())] for name in ("a", "b")]
    assert texts[0] == texts[1]
