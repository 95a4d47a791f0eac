"""Rollout rows: what is read, what is refused, and that every fault is named with file, line, key and fix."""

import json
import pickle

import pytest

from browser_prompts import SYSTEM_PROMPT
from rollout_rows import SCORING_KEYS, SERVER_TOOLS, RowsError, read_file, read_rows, start_page_problem

TASK = "Open the About page, read the secret code, report it via finish(answer=...)."
SERVER_PROMPT = "You are a web agent operating a live browser through tools. Call browser_observe to see the page."
ABSENT = object()


def function_tools(*names):
    return [{"type": "function", "name": name, "parameters": {}, "strict": True} for name in names]


def a_row(**changes):
    """Return a row of the released shape; a keyword replaces a key (dots as __), ABSENT drops it."""
    row = {
        "responses_create_params": {
            "input": [{"role": "system", "content": SERVER_PROMPT}, {"role": "user", "content": TASK}],
            "tools": function_tools(*sorted(SERVER_TOOLS)),
        },
        "initial_url": "site/index.html",
        "verifier_metadata": {"answer_equals": "ALPHA-42"},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = row
        for name in parents:
            target = target[name]
        if value is ABSENT:
            del target[last]
        else:
            target[last] = value
    return row


@pytest.fixture
def rows_file(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def one(path):
    (row,) = read_rows([path])
    return row


def test_a_released_row_is_read_whole(rows_file):
    row = one(rows_file(a_row()))
    assert row.task == TASK
    assert row.messages == [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": TASK}]
    assert row.initial_url == "site/index.html"
    assert dict(row.verifier_metadata) == {"answer_equals": "ALPHA-42"}
    assert (row.task_id, row.data_source, row.split) == ("rows.jsonl:1", "site", "")


def test_a_row_of_the_sibling_recipe_is_read_alike(rows_file):
    row = a_row(
        initial_url="https://shop.example:8443/start",
        responses_create_params__tools=ABSENT,
        responses_create_params__temperature=1.0,
        responses_create_params__parallel_tool_calls=True,
    )
    row |= {"agent_ref": {"type": "responses_api_agents", "name": "browser"}, "task_source": "shop", "note": 3}
    read = one(rows_file(row))
    assert (read.task, read.data_source) == (TASK, "shop.example")


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        ({"task_id": "T1", "data_source": "wiki", "split": "train"}, ("T1", "wiki", "train")),
        ({"id": "Allrecipes--3", "web_name": "Allrecipes"}, ("Allrecipes--3", "Allrecipes", "")),
        ({"task_id": "T1", "taskset": "practice"}, ("T1", "practice", "")),
        ({"task_id": "T1", "id": "other", "data_source": "a", "web_name": "b"}, ("T1", "a", "")),
        (None, ("rows.jsonl:1", "site", "")),
    ],
    ids=["own", "webvoyager", "taskset", "own-first", "null"],
)
def test_names_come_from_the_metadata(rows_file, metadata, want):
    row = one(rows_file(a_row(responses_create_params__metadata=metadata)))
    assert (row.task_id, row.data_source, row.split) == want


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, SYSTEM_PROMPT),
        ({"responses_create_params__tools": function_tools("browser_finish")}, SYSTEM_PROMPT),
        ({"responses_create_params__tools": [{"function": {"name": "browser_click"}}]}, SYSTEM_PROMPT),
        ({"responses_create_params__tools": ABSENT}, SERVER_PROMPT),
        ({"responses_create_params__tools": function_tools("browser")}, SERVER_PROMPT),
        ({"responses_create_params__input": [{"role": "user", "content": TASK}]}, SYSTEM_PROMPT),
        ({"responses_create_params__input": TASK, "responses_create_params__tools": []}, SYSTEM_PROMPT),
    ],
    ids=["five-tools", "one-of-five", "chat-form", "no-tools", "policy-tool", "no-system", "plain-string"],
)
def test_a_system_prompt_for_tools_that_the_policy_lacks_is_replaced_and_no_other(rows_file, changes, want):
    row = one(rows_file(a_row(**changes)))
    assert (row.system_prompt, row.task) == (want, TASK)


def test_content_in_text_parts_is_joined(rows_file):
    parts = [{"type": "input_text", "text": "Buy "}, {"type": "text", "text": "milk."}]
    row = a_row(responses_create_params__input=[{"type": "message", "role": "user", "content": parts}])
    assert one(rows_file(row)).task == "Buy milk."


@pytest.mark.parametrize("key", SCORING_KEYS)
def test_each_scoring_key_alone_is_taken(rows_file, key):
    value = "https://example.com/" if key == "final_url" else "x"
    assert dict(one(rows_file(a_row(verifier_metadata={key: value}))).verifier_metadata) == {key: value}


@pytest.mark.parametrize("spec", [ABSENT, None], ids=["absent", "null"])
@pytest.mark.parametrize(
    ("metadata", "reference"),
    [({}, ""), ({"scored_by": "judge"}, ""), ({"reference_answer": "42 EUR"}, "42 EUR")],
    ids=["silent", "scored-by", "reference"],
)
def test_a_row_without_a_spec_is_judged(rows_file, spec, metadata, reference):
    path = rows_file(a_row(verifier_metadata=spec, responses_create_params__metadata=metadata))
    row = one(path)
    assert (row.scoring.judged, dict(row.verifier_metadata), row.scoring.reference_answer) == (True, {}, reference)
    assert read_file(path).scored_by == {"judge": 1}
    assert "42" not in str(row.messages)


INPUT = "responses_create_params.input"
FAULTS = {
    "no-params": ({"responses_create_params": ABSENT}, "responses_create_params", "is missing"),
    "params-list": ({"responses_create_params": []}, "responses_create_params", "not an object"),
    "no-input": ({"responses_create_params__input": ABSENT}, INPUT, "is missing"),
    "no-messages": ({"responses_create_params__input": []}, INPUT, "not a list of messages"),
    "system-only": ({"responses_create_params__input": [{"role": "system", "content": "x"}]}, INPUT, '["system"]'),
    "two-users": ({"responses_create_params__input": [{"role": "user", "content": "x"}] * 2}, INPUT, "exactly one"),
    "odd-item": ({"responses_create_params__input": ["x"]}, INPUT, "[null]"),
    "blank-task": ({"responses_create_params__input": " \n"}, f"{INPUT}[0].content", "not blank"),
    "null-content": (
        {"responses_create_params__input": [{"role": "user", "content": None}]},
        f"{INPUT}[0].content",
        "is null",
    ),
    "image": (
        {"responses_create_params__input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        f"{INPUT}[0].content",
        "not text",
    ),
    "instructions": (
        {"responses_create_params__instructions": "Be brief."},
        "responses_create_params.instructions",
        "is not read",
    ),
    "foreign-tool": (
        {"responses_create_params__tools": function_tools("python", "browser_click")},
        "responses_create_params.tools",
        '["python"], which the policy does not have',
    ),
    "metadata-number": (
        {"responses_create_params__metadata": {"id": 3}},
        "responses_create_params.metadata",
        "not an object of strings",
    ),
    "no-url": ({"initial_url": ABSENT}, "initial_url", "is missing"),
    "about-blank": ({"initial_url": "about:blank"}, "initial_url", "neither an http(s) address"),
    "no-scheme": ({"initial_url": "www.example.com/"}, "initial_url", "neither an http(s) address"),
    "file": ({"initial_url": "file:///etc/passwd"}, "initial_url", "neither an http(s) address"),
    "other-folder": ({"initial_url": "data/example.jsonl"}, "initial_url", "neither an http(s) address"),
    "climbing": ({"initial_url": "site/../data/example.jsonl"}, "initial_url", "neither an http(s) address"),
    "no-host": ({"initial_url": "https:///path"}, "initial_url", "names no usable host"),
    "bad-port": ({"initial_url": "http://host:port/"}, "initial_url", "names no usable host"),
    "space": ({"initial_url": "https://example.com/a b"}, "initial_url", "white space"),
    "no-spec-for-the-environment": (
        {"verifier_metadata": ABSENT, "responses_create_params__metadata": {"scored_by": "environment"}},
        "verifier_metadata",
        "the metadata says that the environment scores the task",
    ),
    "scored-by-nobody": (
        {"responses_create_params__metadata": {"scored_by": "me"}},
        "responses_create_params.metadata.scored_by",
        'is "me"',
    ),
    "spec-and-judge": (
        {"responses_create_params__metadata": {"scored_by": "judge"}},
        "responses_create_params.metadata.scored_by",
        "a task is scored by one of them",
    ),
    "spec-and-reference-answer": (
        {"responses_create_params__metadata": {"reference_answer": "42"}},
        "responses_create_params.metadata.reference_answer",
        "a task is scored by one of them",
    ),
    "text-spec": ({"verifier_metadata": "x"}, "verifier_metadata", "not an object"),
    "empty-spec": ({"verifier_metadata": {}}, "verifier_metadata", "neither the environment nor the judge"),
    "misspelled": ({"verifier_metadata": {"answer_equal": "x"}}, "verifier_metadata.answer_equal", "no scoring key"),
    "extra-key": (
        {"verifier_metadata": {"answer_equals": "x", "id": "1"}},
        "verifier_metadata.id",
        "is no scoring key",
    ),
    "two-keys": (
        {"verifier_metadata": {"url_contains": "a", "answer_equals": "x"}},
        "verifier_metadata",
        "the server scores answer_equals alone",
    ),
    "empty-answer": ({"verifier_metadata": {"answer_equals": ""}}, "verifier_metadata.answer_equals", "is blank"),
    "blank-answer": ({"verifier_metadata": {"answer_equals": " \t"}}, "verifier_metadata.answer_equals", "is blank"),
    "empty-dom": ({"verifier_metadata": {"dom_contains": ""}}, "verifier_metadata.dom_contains", "is blank"),
    "number": ({"verifier_metadata": {"answer_equals": 42}}, "verifier_metadata.answer_equals", "42, a number"),
    "null-value": ({"verifier_metadata": {"answer_equals": None}}, "verifier_metadata.answer_equals", "a null"),
    "relative-final": (
        {"verifier_metadata": {"final_url": "form.html"}},
        "verifier_metadata.final_url",
        "never equals",
    ),
    "bare-host": (
        {"verifier_metadata": {"final_url": "https://example.com"}},
        "verifier_metadata.final_url",
        "never equals",
    ),
    "stray-key": ({"url_contains": "x"}, "url_contains", "where the server does not look"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_file_line_key_reason_and_fix(rows_file, name):
    changes, key, reason = FAULTS[name]
    path = rows_file(a_row(), a_row(**changes))
    with pytest.raises(RowsError) as error:
        read_rows([path])
    (problem,) = error.value.problems
    assert (problem.file, problem.line, problem.key) == (str(path), 2, key)
    assert reason in problem.reason and problem.fix
    assert str(error.value).endswith(f"{path}:2: {key}: {problem.reason}. Fix: {problem.fix}.")


def test_a_flat_scoring_key_without_a_spec_is_told_where_to_go_and_not_sent_to_the_judge(rows_file):
    (problem,) = read_file(rows_file(a_row(verifier_metadata=ABSENT, url_contains="x"))).problems
    assert (problem.key, problem.fix) == ("url_contains", "move it to verifier_metadata.url_contains")


def test_all_faults_of_all_files_are_listed_in_one_error(rows_file):
    first = rows_file(a_row(initial_url=ABSENT, verifier_metadata={}), a_row(), a_row(initial_url=3), name="1.jsonl")
    second = rows_file(a_row(verifier_metadata=3), name="2.jsonl")
    with pytest.raises(RowsError) as error:
        read_rows([first, second, "missing.jsonl"])
    assert [(p.file, p.line, p.key) for p in error.value.problems] == [
        (str(first), 1, "initial_url"),
        (str(first), 1, "verifier_metadata"),
        (str(first), 3, "initial_url"),
        (str(second), 1, "verifier_metadata"),
        ("missing.jsonl", None, ""),
    ]
    assert all(str(problem) in str(error.value) for problem in error.value.problems)
    again = pickle.loads(pickle.dumps(error.value))
    assert again.problems == error.value.problems and str(again) == str(error.value)


def test_bom_crlf_blank_lines_and_a_missing_final_newline_are_no_faults(tmp_path):
    line = json.dumps(a_row()).encode()
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \r\n\xef\xbb\xbf" + line + b"\n\n" + line)
    assert [row.line for row in read_rows([path])] == [1, 4, 6]


def test_line_separators_inside_a_string_do_not_cut_the_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = a_row(responses_create_params__input="one\u2028two\u0085three")
    path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert one(path).task == "one\u2028two\u0085three"


@pytest.mark.parametrize(
    ("data", "line", "key", "reason"),
    [
        (b'{"a": ', 1, "", "is not JSON"),
        (b"\n[1]\n", 2, "", "is a JSON array, not an object"),
        (b"null", 1, "", "is a JSON null, not an object"),
        (b'{"a": "\xff"}', 1, "", "is not UTF-8 (byte 8 of the line)"),
        ("{}".encode("utf-16"), 1, "", "is not UTF-8"),
        (b'{"a": 1' + b"0" * 5000 + b"}", 1, "", "is not JSON"),
        (b"[" * 100000, 1, "", "is not JSON"),
        (b'{"v": {"dom_contains": "x", "dom_contains": "y"}}', 1, "dom_contains", "stands twice"),
        (b'{"a": "\\ud800"}', 1, "", "half of a surrogate pair"),
        (b"", None, "", "holds no row"),
        (b"\n \r\n", None, "", "holds no row"),
    ],
    ids=[
        "cut", "array", "null", "latin1", "utf16", "huge-number", "deep", "repeated", "surrogate", "empty", "blank",
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_one_problem_of_its_line(tmp_path, data, line, key, reason):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    (problem,) = read_file(path).problems
    assert (problem.line, problem.key) == (line, key) and reason in problem.reason


def test_a_folder_and_a_missing_file_are_problems_of_the_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl"):
        (problem,) = read_file(path).problems
        assert problem.line is None and "cannot be read" in problem.reason


def test_a_file_counts_its_good_rows(rows_file):
    good = a_row(verifier_metadata={"url_contains": "x"}, initial_url="http://a.example/")
    file = read_file(rows_file(a_row(), good, good, a_row(initial_url=1)))
    assert file.scored_by == {"answer_equals": 1, "url_contains": 2}
    assert file.data_sources == {"a.example": 2, "site": 1}
    assert len(file.problems) == 1


def test_messages_are_fresh_so_that_one_rollout_cannot_change_the_next(rows_file):
    row = one(rows_file(a_row()))
    row.messages[1]["content"] += " (page)"
    assert row.messages[1]["content"] == TASK


@pytest.mark.parametrize("url", ["http://[::1]:8000/x", "https://bücher.example/ä?q=1#f", "site/form.html"])
def test_a_usable_start_page_has_no_problem(url):
    assert start_page_problem(url) is None
