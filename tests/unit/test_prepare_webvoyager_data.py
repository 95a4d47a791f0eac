"""Tasks become rows: chosen, dated, scored and split as the flags say, nothing lost or changed without a word."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prepare_webvoyager_data
from prepare_webvoyager_data import main
from rollout_rows import SCORING_KEYS, read_file
from task_rows import split_of
from tests.prepared_lists import FILES, Prepared, a_task, file_of, lines

PROGRAM = Path(prepare_webvoyager_data.__file__)


def original_list():
    """Return 643 tasks like the original's: 15 sites, spaces in ids, stray spaces, non-ASCII, dates."""
    tasks = []
    for n in range(643):
        site = ("Google Flights", "Booking", "Allrecipes", "Cambridge Dictionary")[n] if n < 4 else f"Site {n % 15}"
        when = " from Jan 1 to Jan 4, 2024" if n % 8 == 0 else ""
        question = f"{' ' if n == 5 else ''}Find item {n} at the café{when}.{' ' if n == 9 else ''}"
        tasks.append(a_task(web_name=site, id=f"{site}--{n}", ques=question, web=f"https://www.s{n % 15}.example/"))
    return tasks


def test_the_original_list_becomes_rows(prepare):
    tasks = original_list()
    done = prepare(lines(*tasks), "--today", "2026-12-01")
    report = done.report
    assert (done.code, done.err) == (0, "")
    assert report["counts"]["read"] == 643
    assert report["counts"]["left_out"] == {"expired": 81}
    assert sum(report["counts"]["written"].values()) == len(done.all) == 643 - 81
    assert {e["id"]: e["edits"] for e in report["edited"]} == {
        t["id"]: ["white space dropped at an end of the question"] for t in (tasks[5], tasks[9])
    }
    assert done.all[tasks[9]["id"]] == {
        "responses_create_params": {
            "input": [{"role": "user", "content": "Find item 9 at the café."}],
            "metadata": {
                "task_id": tasks[9]["id"],
                "web_name": "Site 9",
                "split": split_of(tasks[9]["id"], 0.1),
                "scored_by": "judge",
            },
        },
        "initial_url": "https://www.s9.example/",
    }
    assert all(note["reason"] == "expired" and "Jan 4, 2024" in note["detail"] for note in report["left_out"])
    assert "Site 9" in done.out
    assert "left out, expired: 81" in done.out


def test_the_split_of_a_row_says_which_file_it_is_in(prepare):
    done = prepare([a_task(n) for n in range(60)], "--val-fraction", "0.5")
    for name, split in (("train.jsonl", "train"), ("val.jsonl", "validation")):
        assert {row["responses_create_params"]["metadata"]["split"] for row in done.rows(name)} == {split}


USAGE = [
    ((), "either --input"),
    (("--input", "l", "--dataset", "d"), "either --input"),
    (("--dataset", "d"), "--split"),
    (("--input", "l", "--split", "test"), "belongs to --dataset"),
    (("--input", "l", "--today", "2026-02-30"), "YYYY-MM-DD"),
    (("--input", "l", "--today", "20260201"), "YYYY-MM-DD"),
    (("--input", "l", "--val-fraction", "nan"), "from 0 to 1"),
    (("--input", "l", "--val-fraction", "10"), "from 0 to 1"),
    (("--input", "l", "--limit", "0"), "at least 1"),
    (("--input", "l", "--sites", ","), "names nothing"),
    (("--input", "l", "--expired", "drop"), "drop"),
]


@pytest.mark.parametrize(("flags", "want"), USAGE)
def test_wrong_usage_exits_with_2(capsys, flags, want):
    with pytest.raises(SystemExit) as e:
        main(["--output-dir", "out", *flags])
    assert e.value.code == 2
    assert want in capsys.readouterr().err


def test_a_list_is_never_overwritten_by_its_own_rows(prepare, capsys):
    with pytest.raises(SystemExit):
        prepare([a_task()], name="train.jsonl", folder=".")
    assert "would overwrite" in capsys.readouterr().err


def test_ids_can_be_made_and_do_not_depend_on_the_place(prepare):
    tasks = [a_task(n, id=None) for n in range(3)]
    one = prepare(tasks, "--make-ids")
    assert one.report["counts"]["edits"] == {"id made from site, question and start page": 3}
    assert set(one.all) == set(prepare(tasks[::-1], "--make-ids").all)
    assert all(task_id.startswith("Site A--") for task_id in one.all)


def test_repeated_tasks_stand_once(prepare):
    tasks = [a_task(0), a_task(1), a_task(0), a_task(2, ques="Find thing 1.")]
    done = prepare(tasks)
    assert set(done.all) == {"Site A--0", "Site A--1"}
    assert [(n["id"], n["line"], n["reason"]) for n in done.report["left_out"]] == [
        ("Site A--0", 3, "repeated"),
        ("Site A--2", 4, "same question and start page as another task"),
    ]


def test_two_files_are_one_list(prepare):
    Path("more.jsonl").write_text(lines(a_task(1), a_task(2)))
    done = prepare([a_task(0), a_task(1)], "--input", "more.jsonl")
    assert len(done.all) == 3
    assert (
        done.report["left_out"][0] | {"file": "more.jsonl", "line": 1, "detail": "as list.jsonl:2"}
        == (done.report["left_out"][0])
    )


SITES = [a_task(n, web_name=("Site A", "Site B")[n % 2]) for n in range(6)]


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (("--sites", "site b"), [1, 3, 5]),
        (("--sites", "Site B,SITE A"), [0, 1, 2, 3, 4, 5]),
        (("--ids", "Site A--4, Site A--1"), [1, 4]),
        (("--ids", "@ids.txt"), [0, 2]),
        (("--exclude-ids", "ids.txt"), [1, 3, 4, 5]),
        (("--exclude-ids", "ids.txt", "--limit", "2"), [1, 3]),
        (("--sites", "Site A", "--limit", "2"), [0, 2]),
    ],
)
def test_filters_choose_in_the_order_of_the_list(prepare, flags, want):
    file_of("ids.txt", "# two\nSite A--2\n\n  Site A--0\r\n")
    done = prepare(SITES, "--val-fraction", "0", *flags)
    assert list(done.all) == [f"Site A--{n}" for n in want]
    assert sum(done.report["counts"]["left_out"].values()) == 6 - len(want) == len(done.report["left_out"])


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (("--sites", "Site C"), "'Site C'; it has Site A, Site B"),
        (("--ids", "Site A--9"), "'Site A--9'"),
        (("--ids", "@none.txt"), "none.txt: cannot be read"),
        (("--exclude-ids", "blank.txt"), "names no id"),
        (("--sites", "Site A", "--ids", "Site A--1"), "No task is left"),
        (("--system-prompt", "blank.txt"), "is blank"),
    ],
)
def test_a_filter_that_cannot_be_meant_is_refused(prepare, flags, want):
    file_of("blank.txt", "\n")
    done = prepare(SITES, *flags)
    assert (done.code, done.folder.exists()) == (2, False)
    assert want in done.err


def test_an_unknown_id_to_exclude_is_a_warning(prepare):
    done = prepare(SITES, "--exclude-ids", file_of("ids.txt", "Site A--0\nold\n"))
    assert done.report["warnings"][:1] == [
        {"id": "old", "file": "ids.txt", "line": 2, "text": "--exclude-ids names an id that the list does not have"}
    ]


DATED = [
    a_task(0, ques="A room from Jan 1 to Jan 4, 2024, bill A92024"),
    a_task(1, ques="A flight on 29 February 2024"),
    a_task(2, ques="A flight on 24 December 2026"),
    a_task(3, ques="A flight on May 4, latest"),
    a_task(4, ques="A flight on 31 February 2024"),
]


@pytest.mark.parametrize(
    ("expired", "want"),
    [("skip", [2, 3, 4]), ("keep", [0, 1, 2, 3, 4]), ("shift", [0, 2, 3, 4])],
)
def test_expired_tasks_are_skipped_kept_or_moved(prepare, expired, want):
    done = prepare(DATED, "--today", "2026-12-01", "--expired", expired, "--val-fraction", "0")
    assert list(done.all) == [f"Site A--{n}" for n in want]
    moved = [
        DATED[n]["ques"].replace("Jan 4, 2024", "Jan 4, 2027") if expired == "shift" else DATED[n]["ques"] for n in want
    ]
    assert done.questions == moved
    report = done.report
    assert report["counts"]["dates"] == {"dated": 3, "undated": 1, "ambiguous": 0, "relative": 1, "expired": 2}
    assert any("'31 February 2024', which no calendar has" in w["text"] for w in report["warnings"])
    if expired == "shift":
        assert report["shifted"] == [
            {
                "id": "Site A--0",
                "file": "list.jsonl",
                "line": 1,
                "original": DATED[0]["ques"],
                "text": moved[0],
                "dates": ["Jan 1", "Jan 4, 2024"],
                "years": 3,
                "reason": "'Jan 1', 'Jan 4, 2024' lies before 2026-12-01",
            }
        ]
        assert [(n["id"], n["reason"]) for n in report["left_out"]] == [("Site A--1", "expired and not shiftable")]


@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_date_asks_for_the_day_of_reference(prepare, number):
    done = prepare(DATED[number : number + 1])
    assert (done.code, done.folder.exists()) == (2, False)
    assert f"list.jsonl:1: Site A--{number}: {DATED[number]['ques']}" in done.err
    assert "--today YYYY-MM-DD" in done.err


@pytest.mark.parametrize("flags", [("--ids", "Site A--9"), ("--exclude-ids", "dated.txt")])
def test_only_the_dates_of_wanted_tasks_ask_for_it(prepare, flags):
    file_of("dated.txt", "".join(f"{task['id']}\n" for task in DATED[:4]))
    assert prepare([*DATED, a_task(9)], *flags).code == 0


def test_tasks_that_become_one_by_moving_stand_once(prepare):
    tasks = [a_task(n, ques=f"A flight on May 4, {2024 + n}") for n in range(2)]
    done = prepare(tasks, "--today", "2026-12-01", "--expired", "shift")
    assert done.questions == ["A flight on May 4, 2027"]


def test_specs_are_the_environments_and_leave_no_answer(prepare):
    specs = {f"Site A--{n}": {key: "https://a.example/x"} for n, key in enumerate(SCORING_KEYS)}
    answers = {"Site A--0": "zero", "Site A--4": "four", "Site A--77": "none"}
    flags = ("--verifier", file_of("specs.json", specs), "--reference-answers", file_of("answers.json", answers))
    done = prepare([a_task(n) for n in range(6)], *flags)
    for task_id, row in done.all.items():
        metadata = row["responses_create_params"]["metadata"]
        assert row.get("verifier_metadata") == specs.get(task_id)
        assert metadata.get("scored_by") == (None if task_id in specs else "judge")
        assert metadata.get("reference_answer") == (answers.get(task_id) if task_id not in specs else None)
    counts = done.report["counts"]
    assert counts["scored_by"] == {"environment": 4, "judge": 2, "judge_with_reference_answer": 1}
    assert counts["reference_answers_not_used"] == 1
    assert "1 answer(s) are of tasks that the list does not have" in done.out


def test_rows_without_specs_are_judged_by_the_recipe(prepare):
    answers = file_of("answers.json", json.dumps({"Site A--0": "seven"}))
    done = prepare([a_task(0), a_task(1)], "--reference-answers", answers, "--val-fraction", "0")
    read = read_file(done.folder / "train.jsonl")
    assert read.problems == ()
    assert [(row.scoring.judged, row.scoring.reference_answer) for row in read.rows] == [(True, "seven"), (True, "")]
    assert "seven" not in str([row.messages for row in read.rows])


def test_rows_with_specs_are_what_the_recipe_reads(prepare):
    specs = "\n".join(json.dumps({"id": f"Site A--{n}", "verifier_metadata": {"answer_equals": "x"}}) for n in range(4))
    prompt = file_of("system.txt", "Browse well.\n")
    flags = ("--verifier", file_of("specs.jsonl", specs), "--system-prompt", prompt, "--val-fraction", "0.5")
    done = prepare([a_task(n) for n in range(4)], *flags)
    for name, split in (("train.jsonl", "train"), ("val.jsonl", "validation")):
        read = read_file(done.folder / name)
        assert read.problems == ()
        for row in read.rows:
            assert (row.system_prompt, row.initial_url, row.split) == ("Browse well.", "https://a.example/", split)
            assert (row.data_source, row.scoring.spec) == ("Site A", {"answer_equals": "x"})
            assert done.all[row.task_id]["responses_create_params"]["input"][1]["content"] == row.task


WEBVOYAGER_ANSWERS = {
    "Site A": {"notice": "n", "answers": [{"id": 0, "type": "golden", "ans": "SECRET"}, {"id": 7, "ans": "x"}]}
}


@pytest.mark.parametrize(
    "answers",
    [
        json.dumps(WEBVOYAGER_ANSWERS, indent=2),
        '\ufeff{"Site A--0": "SECRET"}',
        '{"id": "Site A--0", "answer": "SECRET"}',
        '{"id": "Site A--0", "answer": "SECRET"}\n{"id": "Site A--7", "answer": "x"}',
    ],
    ids=["webvoyager", "flat", "line", "lines"],
)
def test_reference_answers_stand_in_the_metadata_alone(prepare, answers):
    done = prepare([a_task(0), a_task(1)], "--reference-answers", file_of("answers.json", answers))
    params = done.all["Site A--0"]["responses_create_params"]
    assert params["metadata"]["reference_answer"] == "SECRET"
    assert "SECRET" not in json.dumps(params["input"])
    assert "SECRET" not in json.dumps(done.all["Site A--1"])


def test_gaias_final_answer_is_a_reference_answer(prepare):
    task = {"id": "GAIA--0", "Level": 2, "Final answer": "SECRET", "ques": "Two\nlines.", "web": "https://g.example/"}
    params = prepare([task]).all["GAIA--0"]["responses_create_params"]
    assert params["metadata"]["reference_answer"] == "SECRET"
    assert params["input"] == [{"role": "user", "content": "Two\nlines."}]


SPEC_LINE = json.dumps({"id": "Site A--0", "verifier_metadata": {"answer_equals": "x"}})


@pytest.mark.parametrize(
    ("flag", "content", "want"),
    [
        ("--verifier", {"Site A--9": {"answer_equals": "x"}}, "Site A--9: is no task of the list"),
        ("--verifier", {"Site A--0": {}}, "Site A--0.verifier_metadata: has no scoring key"),
        ("--verifier", {"Site A--0": {"answer_equals": "x", "url_contains": "y"}}, "scores answer_equals alone"),
        ("--verifier", {"Site A--0": {"answer": "x"}}, "is no scoring key of the server"),
        ("--verifier", {"Site A--0": {"answer_equals": 3}}, "not a string"),
        ("--verifier", {"Site A--0": None}, "is no object"),
        ("--verifier", '{"id": "Site A--0", "spec": {}}\n' * 2, "x.json:1: verifier_metadata: is missing"),
        ("--verifier", f"{SPEC_LINE}\n{SPEC_LINE}", "x.json:2: Site A--0: stands twice"),
        ("--verifier", '{"Site A--0": {"answer_equals": "x"},\n"Site A--0": {}}', "'Site A--0' twice"),
        ("--verifier", '{\n"Site A--0": {"answer_equals": }}', "x.json:2: is not JSON"),
        ("--verifier", '{"Site A--0": {"answer_equals": "\\ud800"}}', "is not usable JSON"),
        ("--verifier", "", "holds no task"),
        ("--reference-answers", {"Site A--0": 3}, "Site A--0: has no text as answer"),
        ("--reference-answers", {"Site A": {"answers": 3}}, "Site A.answers: is no list"),
        ("--reference-answers", {"Site A": {"answers": [{"id": 0}]}}, "Site A.answers[0]: lacks"),
        ("--reference-answers", {"Site A": {"answers": [{"id": 0, "ans": "x"}] * 2}}, "Site A--0: stands twice"),
        ("--reference-answers", {"Site A--0": "other"}, "list.jsonl:1: Final answer: 'Site A--0' has another answer"),
    ],
)  # fmt: skip
def test_a_fault_of_a_scoring_file_is_named(prepare, flag, content, want):
    done = prepare([a_task(0, **{"Final answer": "mine"})], flag, file_of("x.json", content))
    assert (done.code, done.folder.exists()) == (2, False)
    assert want in done.err
    assert "Fix: " in done.err


def test_the_same_input_gives_the_same_bytes(prepare):
    flags = ("--today", "2026-12-01", "--expired", "shift")
    first, second = (prepare(original_list() + DATED, *flags, folder=folder) for folder in ("one", "two"))
    for name in FILES:
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()
    assert str(first.folder) not in (first.folder / "report.json").read_text()


def test_another_seed_is_another_split(prepare):
    tasks = [a_task(n) for n in range(40)]
    one, two = (prepare(tasks, "--val-fraction", "0.5", "--split-seed", seed) for seed in ("", "b"))
    assert two.report["options"]["split_seed"] == "b"
    assert {row["initial_url"] for row in two.rows("val.jsonl")} == {"https://a.example/"}
    assert set(one.all) == set(two.all)
    for task_id, row in two.all.items():
        assert row["responses_create_params"]["metadata"]["split"] == split_of(task_id, 0.5, "b")


@pytest.mark.parametrize(("fraction", "train", "validation"), [("0", 20, 0), ("1", 0, 20)])
def test_a_split_may_be_empty_and_says_so(prepare, fraction, train, validation):
    done = prepare([a_task(n) for n in range(20)], "--val-fraction", fraction)
    assert (len(done.rows("train.jsonl")), len(done.rows("val.jsonl"))) == (train, validation)
    assert [w["text"] for w in done.report["warnings"]] == ["holds no row"]


def test_the_split_takes_the_share_that_it_was_given():
    ids = [f"Site--{n}" for n in range(4000)]
    share = sum(split_of(i, 0.1) == "validation" for i in ids) / len(ids)
    assert 0.08 < share < 0.12
    assert [split_of(i, 0.5) for i in ids] != [split_of(i, 0.5, "other") for i in ids]
    # The very choice is part of what the tool promises: a newer version must not move tasks.
    assert [n for n in range(40) if split_of(f"Site--{n}", 0.1) == "validation"] == [19, 25, 39]


@given(
    st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=30),
    st.text(min_size=1),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_new_task_moves_no_other_and_a_greater_share_only_adds(ids, new, one, two):
    def validation(of, fraction):
        return {i for i in of if split_of(i, fraction) == "validation"}

    assert validation(ids | {new}, one) - {new} == validation(ids, one) - {new}
    assert validation(ids, min(one, two)) <= validation(ids, max(one, two))


def test_counts_can_be_had_as_json(prepare):
    done = prepare([a_task()], "--json")
    assert json.loads(done.out) == done.report["counts"]


def test_ctrl_c_ends_with_130_and_leaves_nothing(prepare, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_webvoyager_data, "row", stopped)
    done = prepare([a_task()])
    assert done.code == 130
    assert os.listdir(done.folder) == []


def test_a_folder_that_cannot_be_written_is_named(prepare):
    Path("out").write_text("a file")
    done = prepare([a_task()])
    assert done.code == 2
    assert "--output-dir out: cannot be written" in done.err


def run_program(folder, *flags, **variables):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    env |= variables
    command = [sys.executable, str(PROGRAM), "--output-dir", "out", *flags]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=55, check=False)


def test_a_terminal_without_the_characters_gets_a_summary_too(tmp_path):
    (tmp_path / "list.jsonl").write_text(lines(a_task(web_name="Café 中")), encoding="utf-8")
    done = run_program(tmp_path, "--input", "list.jsonl", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Caf\\xe9 \\u4e2d" in done.stdout


def test_a_dataset_is_read_from_its_folder_without_the_hub(tmp_path):
    (tmp_path / "ds").mkdir()
    tasks = [
        {"task": f"Find {n}. Use https://a.example/.", "metadata": str({"id": f"A--{n}", "web_name": "A"}), "web": None}
        for n in range(3)
    ]
    (tmp_path / "ds" / "test.jsonl").write_text(lines(*tasks, {"task": None, "metadata": "{}"}))
    done = run_program(tmp_path, "--dataset", "ds", "--split", "test", "--skip-bad-rows", "--strip-appended-url")
    assert done.returncode == 0, done.stderr
    assert "ds[test]:4: ques|question|task" in done.stderr
    made = Prepared(0, tmp_path / "out", done.stdout, done.stderr)
    assert sorted(made.all) == ["A--0", "A--1", "A--2"]
    assert sorted(made.questions) == ["Find 0.", "Find 1.", "Find 2."]
    assert made.report["options"]["dataset"] == "ds"


@pytest.mark.parametrize(
    ("name", "split", "want"),
    [("ds", "train", "Unknown split"), ("owner/none", "test", "owner/none"), ("other", "test", "none of its columns")],
)
def test_a_dataset_that_cannot_be_loaded_is_named(tmp_path, name, split, want):
    for folder, row in (("ds", a_task()), ("other", {"x": 1})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.jsonl").write_text(lines(row))
    done = run_program(tmp_path, "--dataset", name, "--split", split)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert want in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_preparing_loads_neither_torch_nor_a_client():
    heavy = {"torch", "verl", "aiohttp", "datasets", "tqdm"}
    code = f"import sys, prepare_webvoyager_data; print(sorted({heavy} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PROGRAM.parent, capture_output=True, text=True, timeout=55, check=True)
    assert done.stdout.strip() == "[]"
