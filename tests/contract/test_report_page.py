"""A person can use a run's page in a real Chromium: with the keyboard, on a phone, in the dark, without a network."""

import json
import os
import subprocess
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

import episode_report
from cpu.gym_server import BROWSERS_DIR, GYM_VENV
from episode_record import AttemptRecord, ObservationRecord, TurnRecord
from tests.episode_samples import write_samples
from tests.report_pages import PageReader

HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(2)><b onclick=alert(3)>{{ 7*7 }}\u2028"'


def hostile_record():
    page = ObservationRecord("0" * 64, 10, HOSTILE, "javascript:alert(4)")
    turn = TurnRecord(1, "navigate", {"url": "javascript:alert(5)"}, HOSTILE, error=HOSTILE, reply=HOSTILE)
    names = dict.fromkeys(("uid", "task_id", "site", "question", "failure_kind", "failure_evidence", "answer"), HOSTILE)
    return AttemptRecord(ended_at=1.0, turns=1, start_page=page, turn_records=[turn], **names)


def records_of(folder):
    """Return the lines of all files by uid, rollout and attempt."""
    lines = [line for path in folder.iterdir() for line in path.read_text().split("\n") if line.endswith("}")]
    return {(r["uid"], r["rollout"], r["attempt"]): r for r in map(json.loads, lines)}


@pytest.fixture(scope="module")
def clicked(tmp_path_factory):
    """Return the log's records, the attempts that were opened by name, and what was seen of the page."""
    run = tmp_path_factory.mktemp("runs") / "clicked"
    write_samples(run / "episodes", episodes=600)
    with (run / "episodes" / "episodes-node3-1.jsonl").open("w") as file:
        file.write(json.dumps(asdict(hostile_record())) + "\n")
    records = records_of(run / "episodes")
    retried = next(key for key, r in records.items() if r["attempt"] == 2 and r["turns"] > 3)
    forest = max(records, key=lambda key: (bool(records[key]["discarded_calls"]), records[key]["rows"]))
    include = [retried[0], forest[0], HOSTILE]
    page = episode_report.write_report(run, details=60, include=include)
    index = PageReader(page.read_text(encoding="utf-8")).index()
    columns = index["columns"]
    uids = [index["names"]["uid"][number] for number in columns["uid"]]
    number_of = {key: n for n, key in enumerate(zip(uids, columns["rollout"], columns["attempt"], strict=True))}
    other = next(n for n in range(len(uids)) if n not in index["details"])
    opened = {"retried": retried, "forest": forest, "hostile": (HOSTILE, 0, 1)}
    arguments = [str(number_of[key]) for key in opened.values()] + [str(other)]
    result = subprocess.run(
        [GYM_VENV / "bin/python", Path(__file__).with_name("report_clicks.py"), page, *arguments],
        env={**os.environ, "PLAYWRIGHT_BROWSERS_PATH": str(BROWSERS_DIR)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return records, {name: records[key] for name, key in opened.items()}, json.loads(result.stdout)


pytestmark = pytest.mark.timeout(300)


def test_search_and_filters_leave_what_they_name(clicked):
    records, _, seen = clicked
    shown = seen["list"]
    kettles = [r for r in records.values() if "kettle" in r["task_id"] and r["failure_kind"] == "session_lost"]
    assert shown["all"] == f"{len(records)} of {len(records)} attempts" and shown["first page"] == 50
    assert shown["slash focuses"] == "search"
    assert shown["search found"] == f"{len(kettles)} of {len(records)} attempts" and kettles
    assert all("kettle" in row and "session_lost" in row for row in shown["search rows"])
    assert shown["nothing found"] == [f"0 of {len(records)} attempts", 0]
    invalid = [r for r in records.values() if r["outcome"] == "invalid" and r["split"] == "train"]
    assert shown["invalid found"] == f"{len(invalid)} of {len(records)} attempts"
    assert all("! invalid" in row for row in shown["invalid rows"])
    assert shown["seconds"] == sorted(shown["seconds"], reverse=True) and len(set(shown["seconds"])) > 1


def test_the_list_is_walked_and_an_episode_opened_and_left_with_the_keyboard(clicked):
    shown = clicked[2]["list"]
    assert shown["walked"] == ["tr 1", "tr 2", "tr 3", "tr 2", "tr 1"]
    assert shown["second page"].startswith("page 2 of ")
    row, address, focus, overview = shown["enter opens"]
    assert row == address and focus == "viewer-title" and not overview
    assert shown["next episode"] != address and shown["previous episode"] == address
    assert shown["escape"] == [True, False, "tr 1"]


def came_back(turn):
    return turn["observation"]["text"] if turn["observation"] else turn["error"] or turn["mistake"]


def test_turns_are_walked_and_show_what_was_seen_answered_and_came_back(clicked):
    _, opened, seen = clicked
    record, shown = opened["retried"], seen["episode"]
    first, second = record["turn_records"][:2]
    column = record["attempt"] - 1
    assert record["start_page"]["text"] in shown["first turn"]["columns"][column]
    assert first["reply"] in shown["first turn"]["columns"][column]
    assert first["action"] in shown["first turn"]["columns"][column]
    assert second["reply"] in shown["right"]["columns"][column]
    saw, _, rest = shown["right"]["columns"][column].partition("What it answered")
    assert came_back(first) in saw
    assert came_back(second) in rest.partition("What came back")[2]
    turns = shown["first turn"]["turn"].removeprefix("turn 1 of ")
    assert (shown["right"]["turn"], shown["j"]) == (f"turn 2 of {turns}", f"turn 3 of {turns}")
    assert shown["back at the first"] == [f"turn 1 of {turns}", True]
    assert shown["last turn"] == [f"turn {turns} of {turns}", True] and int(turns) >= record["turns"]


def test_attempts_at_a_rollout_and_the_groups_others_stand_side_by_side(clicked):
    records, opened, seen = clicked
    record, shown = opened["retried"], seen["episode"]
    group = [r for r in records.values() if r["uid"] == record["uid"]]
    same = sorted(r["attempt"] for r in group if r["rollout"] == record["rollout"])
    again = {r["attempt"]: "" if r["final"] else " (tried again)" for r in group if r["rollout"] == record["rollout"]}
    assert shown["attempts"] == [f"rollout {record['rollout']}, attempt {n}{again[n]}" for n in same]
    assert len(same) > 1
    assert shown["choices"] == shown["all beside"] == len(group) and shown["in one line"]


def test_an_episode_that_the_page_does_not_hold_names_its_line_and_how_to_get_it(clicked):
    shown = clicked[2]["episode"]["not held"]
    assert "--include" in shown and ".jsonl, line " in shown


def test_the_call_forest_shows_every_call_what_it_continues_and_which_row_has_its_loss(clicked):
    _, opened, seen = clicked
    record, shown = opened["forest"], seen["forest"]
    calls = {call["id"]: call for call in record["call_records"]}
    drawn = {call["id"]: call for call in shown["calls"]}
    assert record["rows"] > 1 and record["discarded_calls"] and list(drawn) == list(calls)
    for id_, call in calls.items():
        owner = "no loss" if call["row"] is None else f"row {call['row']}"
        assert drawn[id_]["words"][2] == owner
        assert ("trained" in drawn[id_]["class"]) == (call["row"] is not None)
        assert ("now" in drawn[id_]["class"].split()) == (call["turn"] == 1)
    assert shown["edges"] == sum(call["parent"] is not None for call in calls.values())
    assert len({(call["x"], call["y"]) for call in drawn.values()}) == len(calls)
    kept = {call["y"] for id_, call in drawn.items() if calls[id_]["kind"] != "discarded"}
    assert all(call["y"] not in kept for id_, call in drawn.items() if calls[id_]["kind"] == "discarded")
    for row in record["row_records"]:
        assert len({drawn[id_]["y"] for id_ in row["calls"]}) == 1, "a context's calls lie in one lane"
    assert [[int(n) for n in text.split("\t")[1:4]] for text in shown["rows"]] == [
        [len(row["calls"]), len(row["trains"]), len(row["calls"]) - len(row["trains"])] for row in record["row_records"]
    ]
    assert shown["marked"] == record["row_records"][0]["calls"]


def test_hostile_texts_are_shown_as_texts_and_run_nothing(clicked):
    _, _, seen = clicked
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in seen["hostile"]["text"]
    assert seen["hostile"]["images"] == 0


def test_nothing_is_loaded_and_nothing_goes_wrong(clicked):
    assert clicked[2]["said"] == []
    assert clicked[2]["requests"] == []


def test_light_and_dark_follow_the_system_and_the_button(clicked):
    shown = clicked[2]["colours"]
    assert shown["system light"] == shown["chosen light"]
    assert shown["system dark"] == shown["chosen dark"]
    assert shown["button"] == "Colours: light"
    assert Counter(len(set(pair)) for pair in zip(shown["system light"], shown["system dark"], strict=True)) == {2: 3}
    for ground, ink, chart_ink in (shown["system light"], shown["system dark"]):
        assert contrast(ground, ink) >= 7 and contrast(ground, chart_ink) >= 7


def contrast(one, other):
    """Return the contrast of two colours such as `rgb(1, 2, 3)`. Source: WCAG 2.2, relative luminance."""

    def luminance(colour):
        parts = [int(n) / 255 for n in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("part", ["overview", "retried", "forest"])
def test_a_phone_never_scrolls_sideways(clicked, part):
    assert clicked[2]["phone"][part] <= 0
