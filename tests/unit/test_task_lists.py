"""Task lists are read in every form that they are published in, and every fault is named with its place and its fix."""

import csv
import io
import json
import os

import pytest

from tests.prepared_lists import FILES, a_task, lines

VARIANTS = {
    "webvoyager": a_task(),
    "gaia": {
        "task_id": "Site A--0",
        "Level": 1,
        "Final answer": "7",
        "ques": "Find thing 0.",
        "web": "https://a.example/",
    },
    "mind2web": {
        "task_id": "Site A--0",
        "confirmed_task": "Find thing 0.",
        "website": "https://a.example/",
        "reference_length": 3,
        "level": "easy",
    },
    "webarena": {"task_id": "Site A--0", "intent": "Find thing 0.", "start_url": "https://a.example/"},
    "ours": {"id": "Site A--0", "question": "Find thing 0.", "initial_url": "https://a.example/", "site": "Site A"},
    "two_alike": a_task(task_id="Site A--0", question="Find thing 0."),
    "metadata_literal": {
        "task": "Find thing 0.",
        "metadata": "{'id': 'Site A--0', 'web': 'https://a.example/', 'note': None}",
    },
    "metadata_json": {"task": "Find thing 0.", "metadata": '{"id": "Site A--0", "web": "https://a.example/"}'},
    "metadata_object": {"task": "Find thing 0.", "metadata": {"id": "Site A--0", "web": "https://a.example/"}},
    "metadata_is_second": a_task(metadata="{'id': 'other', 'ques': 'other'}"),
    "metadata_note": a_task(metadata="a note"),
    "blank_alias": a_task(task="", question=" ", website=None),
}


@pytest.mark.parametrize("task", VARIANTS.values(), ids=VARIANTS)
def test_a_column_is_found_under_its_many_names(prepare, task):
    done = prepare([task])
    assert (done.code, done.err) == (0, "")
    (row,) = done.all.values()
    assert done.questions == ["Find thing 0."]
    assert row["initial_url"] == "https://a.example/"
    assert set(done.all) == {"Site A--0"}
    named = "web_name" in task or "site" in task
    assert row["responses_create_params"]["metadata"]["web_name"] == ("Site A" if named else "a.example")


def test_a_number_as_id_is_taken_as_text(prepare):
    assert set(prepare([a_task(id=17)]).all) == {"17"}


def test_flags_name_columns(prepare):
    task = {"q": "Find it.", "u": "https://b.example/x", "key": "k", "place": "P", "ques": "other", "web": 3, "id": []}
    flags = ("--question-column", "q", "--url-column", "u", "--id-column", "key", "--site-column", "place")
    done = prepare([task], *flags)
    (row,) = done.all.values()
    assert (done.questions, row["initial_url"], set(done.all)) == (["Find it."], "https://b.example/x", {"k"})
    assert row["responses_create_params"]["metadata"]["web_name"] == "P"


APPENDED = "Find thing 0. Use https://a.example/x."


@pytest.mark.parametrize(
    ("task", "flags", "question", "url"),
    [
        (a_task(ques=APPENDED, web=None), (), APPENDED, "https://a.example/x"),
        (a_task(ques=APPENDED, web=None), ("--strip-appended-url",), "Find thing 0.", "https://a.example/x"),
        (a_task(ques="Find it. Use <https://a.example/x>.", web=None), (), None, "https://a.example/x"),
        (a_task(ques=APPENDED, web="https://a.example/x/"), ("--strip-appended-url",), "Find thing 0.", None),
        (a_task(ques=APPENDED, web="https://b.example/"), ("--strip-appended-url",), APPENDED, "https://b.example/"),
        (a_task(ques=APPENDED), (), APPENDED, "https://a.example/"),
    ],
)
def test_an_appended_address_is_the_start_page_and_stays_in_the_text(prepare, task, flags, question, url):
    done = prepare([task], *flags)
    (row,) = done.all.values()
    assert done.questions == [question or task["ques"]]
    assert row["initial_url"] == (url or task["web"])
    edits = done.report["counts"]["edits"]
    assert ("appended address dropped from the question" in edits) == (done.questions != [task["ques"]])
    assert ("start page taken from the address appended to the question" in edits) == ("web" not in task)


def as_csv(*tasks, **options):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(tasks[0]), **options)
    writer.writeheader()
    writer.writerows(tasks)
    return text.getvalue()


QUOTED = a_task(0, ques='Find "thing, one"\nthen stop.')
GOOD_FILES = {
    "no_final_newline": ("l.jsonl", lines(a_task(0), a_task(1))),
    "bom_crlf_blank_lines": (
        "l.jsonl",
        b"\xef\xbb\xbf\r\n" + lines(a_task(0), a_task(1)).replace("\n", "\r\n\r\n").encode(),
    ),
    "bom_mid_file": ("l.jsonl", lines(a_task(0)) + "\n\ufeff" + lines(a_task(1))),
    "separator_in_text": ("l.txt", lines(a_task(0, ques="a\u2028b"), a_task(1))),
    "array": ("l.json", json.dumps([a_task(0), a_task(1)], indent=2)),
    "array_bom": ("l.jsonl", "\ufeff\n" + json.dumps([a_task(0), a_task(1)])),
    "csv": ("l.csv", as_csv(QUOTED, a_task(1))),
    "csv_lf_bom": ("L.CSV", "\ufeff" + as_csv(a_task(0), a_task(1), lineterminator="\n")),
    "csv_quote_all": ("l.csv", as_csv(a_task(0), a_task(1), quoting=csv.QUOTE_ALL).rstrip()),
}


@pytest.mark.parametrize(("name", "content"), GOOD_FILES.values(), ids=GOOD_FILES)
def test_a_file_is_read_in_every_form(prepare, name, content):
    done = prepare(content, name=name)
    assert (done.code, done.err, set(done.all)) == (0, "", {"Site A--0", "Site A--1"})
    if name == "l.csv" and "then stop" in content:
        assert QUOTED["ques"] in done.questions


DEEP = '{"id": "x", "ques": ' + "[" * 100_000 + "]" * 100_000 + "}"
GOOD = lines(a_task(1))
BAD_FILES = {
    "no_question": (
        "l.jsonl",
        GOOD + "\n" + lines(a_task(ques=None)),
        "l.jsonl:2: ques|question",
        "is missing (columns",
    ),
    "blank_question": ("l.jsonl", lines(a_task(ques=" \t ")), "l.jsonl:1: ques|", "is blank"),
    "question_type": ("l.jsonl", lines(a_task(ques=["a"])), "l.jsonl:1: ques: is ['a'], not text", ""),
    "no_start_page": ("l.jsonl", lines(a_task(web=None)), "l.jsonl:1: web|website|", "--url-column"),
    "broken_address": ("l.jsonl", lines(a_task(web="a.example")), "l.jsonl:1: web:", "neither an http(s) address"),
    "spaced_address": ("l.jsonl", lines(a_task(web="https://a.example/ ")), "l.jsonl:1: web:", "white space at an end"),
    "no_id": ("l.jsonl", lines(a_task(id=None)), "l.jsonl:1: id|task_id: is missing", "--make-ids"),
    "id_type": ("l.jsonl", lines(a_task(id=True)), "l.jsonl:1: id: is True, not text", ""),
    "two_values": ("l.jsonl", lines(a_task(task="Other.")), "l.jsonl:1: ques, task: differ", "--question-column"),
    "two_ids": ("l.jsonl", lines(a_task(task_id="u-1")), "l.jsonl:1: id, task_id: differ", "--id-column"),
    "metadata_broken": (
        "l.jsonl",
        lines({"task": "x", "metadata": "{'id': open('x')}"}),
        "l.jsonl:1: metadata",
        "ValueError",
    ),
    "broken_json": ("l.jsonl", GOOD + '\n{"id": "x"', "l.jsonl:2: is not JSON", ""),
    "nested_quotes": ("l.jsonl", '{"id": "x", "ques": "say "hi""}', "l.jsonl:1: is not JSON", "column 27"),
    "nan": ("l.jsonl", '{"id": "x", "score": NaN}', "l.jsonl:1: is not usable JSON (holds NaN", ""),
    "repeated_key": ("l.jsonl", '{"id": "x", "id": "y"}', "l.jsonl:1: names the key 'id' twice", ""),
    "not_an_object": ("l.jsonl", GOOD + "\n[1]", "l.jsonl:2: is a JSON array", ""),
    "surrogate": ("l.jsonl", GOOD + '\n{"ques": "\\ud800"}', "l.jsonl:2: escapes half of a surrogate pair", ""),
    "surrogate_in_metadata": (
        "l.jsonl",
        lines({"task": "x", "metadata": '{"id": "\\ud800", "web": "https://a.example"}'}),
        "l.jsonl:1: id: holds half",
        "",
    ),
    "not_utf8": ("l.jsonl", GOOD.encode() + b'\n{"ques": "\xff"}', "l.jsonl:2: is not UTF-8 (byte 11", ""),
    "deep": ("l.jsonl", GOOD + "\n" + DEEP, "l.jsonl:2: is nested too deeply", ""),
    "deep_array": ("l.json", "[" + GOOD + ",\n" + DEEP + "]", "l.json:2: [1]: is nested too deeply; the elements", ""),
    "long_number": ("l.jsonl", '{"id": ' + "1" * 5000 + "}", "l.jsonl:1: is not usable JSON", ""),
    "huge_question": ("l.jsonl", lines(a_task(ques="a" * 2_000_000)), "l.jsonl:1: question: has 2000000 char", ""),
    "huge_csv_question": ("l.csv", as_csv(a_task(ques="a" * 2_000_000)), "l.csv:2: is not CSV (field larger", ""),
    "wide_csv_line": (
        "l.csv",
        as_csv(a_task()) + "a," * 100_000 + "a\n",
        "l.csv:3: has 100001 fields, and the header 4",
        "",
    ),
    "wide_csv_header": ("l.csv", ",".join(map(str, range(100_000))) + "\n" + "," * 99_999, "l.csv:2: ques|", "..."),
    "short_csv_line": ("l.csv", as_csv(a_task()) + "a,b\n", "l.csv:3: has 2 fields", ""),
    "csv_header_twice": ("l.csv", "id,id\n1,2\n", "l.csv:1: id: stands twice in the header", ""),
    "csv_open_quote": ("l.csv", as_csv(a_task()) + 'a,"b\nc,d\n', "l.csv:3: is not CSV (unexpected end", ""),
    "csv_bad_quote": ("l.csv", as_csv(a_task()) + 'a,"b"c,d,e\n', "l.csv:3: is not CSV", ""),
    "csv_line_of_record": ("l.csv", as_csv(QUOTED) + "a,b\n", "l.csv:4: has 2 fields", ""),
    "csv_not_utf8": ("l.csv", as_csv(a_task()).encode() + b"a,\xff,c,d\n", "l.csv:3: is not UTF-8", ""),
    "csv_only_header": ("l.csv", "web_name,id,ques,web\n", "l.csv: holds no task", ""),
    "empty": ("l.jsonl", "\ufeff \r\n", "l.jsonl: holds no task", ""),
    "empty_array": ("l.json", " [ ]", "l.json: holds no task", ""),
    "array_element": ("l.json", f"[{GOOD},\n\n 3]", "l.json:3: [1]: is a JSON number", ""),
    "array_key": ("l.json", f"[{GOOD},\n" + lines(a_task(ques=None)) + "]", "l.json:2: [1].ques|question", ""),
    "array_cut": ("l.json", f"[{GOOD},\n" + '{"id": "x"', "l.json:2: [1]: is not JSON", ""),
    "array_not_ended": ("l.json", f"[{GOOD}", "l.json:1: [0]: is not followed by", ""),
    "array_trailing": ("l.json", f"[{GOOD}]\n[]", "goes on behind the end of the array", ""),
    "array_not_utf8": ("l.json", b"[\n\xff]", "l.json:2: is not UTF-8 (byte 3", ""),
    "one_object": ("l.json", json.dumps(a_task(), indent=2), "l.json:1: begins one JSON object over several lines", ""),
    "utf16": ("l.jsonl", GOOD.encode("utf-16"), "l.jsonl: is UTF-16", ""),
    "gzip": ("l.jsonl", b"\x1f\x8b\x08", "l.jsonl: is compressed", ""),
    "no_suffix": ("l.txt", "web_name,id,ques,web\n", "l.txt:1: begins with b'w'", ".csv"),
    "same_id": (
        "l.jsonl",
        lines(a_task(1), a_task(1, ques="Other.")),
        "l.jsonl:2: id: 'Site A--1' stands in l.jsonl:1",
        "question",
    ),
}


@pytest.mark.parametrize(("name", "content", "want", "also"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_fault_is_named_with_file_line_and_fix_and_nothing_is_written(prepare, name, content, want, also):
    done = prepare(content, name=name)
    assert done.code == 2
    assert want in done.err
    assert also in done.err
    assert "Fix: " in done.err
    assert all(len(line) < 700 for line in done.err.splitlines())
    assert "Traceback" not in done.err
    assert not done.folder.exists()


def test_all_faults_are_listed_and_earlier_output_stays(prepare):
    before = prepare([a_task()])
    kept = {name: (before.folder / name).read_bytes() for name in FILES}
    done = prepare([a_task(ques=None, web=None), a_task(1), a_task(2, web="nowhere")])
    assert done.code == 2
    assert [line.split(": ")[0] for line in done.err.splitlines()][:2] == ["list.jsonl:1", "list.jsonl:3"]
    assert {name: (done.folder / name).read_bytes() for name in FILES} == kept
    assert sorted(os.listdir(done.folder)) == sorted(FILES)


def test_bad_rows_can_be_left_out_and_are_listed(prepare):
    done = prepare([a_task(1), a_task(2, web="nowhere"), a_task(1, ques="Other.")], "--skip-bad-rows")
    assert (done.code, set(done.all)) == (0, {"Site A--1"})
    assert done.questions == ["Find thing 1."]
    assert [(b["file"], b["line"]) for b in done.report["bad_rows"]] == [("list.jsonl", 2), ("list.jsonl", 3)]
    assert done.report["counts"]["left_out"] == {"bad row": 2}
    assert "list.jsonl:2: web: " in done.err
    assert "left out, bad row: 2" in done.out


@pytest.mark.parametrize("case", ["array_cut", "csv_open_quote", "empty", "utf16", "one_object", "array_not_utf8"])
def test_a_file_that_cannot_be_read_on_is_never_skipped(prepare, case):
    name, content, want, _ = BAD_FILES[case]
    done = prepare(content, "--skip-bad-rows", name=name)
    assert (done.code, done.folder.exists()) == (2, False)
    assert want in done.err


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_list_that_is_no_file_is_named(prepare, name):
    done = prepare(None, name=name)
    assert done.code == 2
    assert done.err.startswith(f"{name}: ")
