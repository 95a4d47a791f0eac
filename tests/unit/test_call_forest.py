"""Rows planned from forests of calls: the specification's vectors, properties on random forests, and refusals."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import call_forest
from call_forest import (
    POLICIES,
    CallForest,
    CallForestError,
    CallRecord,
    CallStatus,
    Row,
    find_policy,
    plan_rows,
    rows_for_verl,
)

TESTS = Path(__file__).resolve().parents[1]
VECTORS = json.loads((TESTS / "data" / "call_forest_vectors.json").read_text(encoding="utf-8"))["vectors"]
CASES = [(vector, policy) for vector in VECTORS for policy in POLICIES if policy in vector]
# A busy machine must not fail a property.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def call(call_id: str, parent_id: str | None = None, session_id: str = "main", **fields) -> CallRecord:
    """Return a call with two prompt tokens and one generated token, unless said otherwise."""
    fields = {"prompt_ids": [1, 2], "response_ids": [3]} | fields
    return CallRecord(call_id, parent_id, session_id, **fields)


def calls(*pairs: str, **fields) -> list[CallRecord]:
    """Return calls written as `id` for a root and `id<parent` for what continues another call."""
    return [call(id_, parent or None, **fields) for id_, _, parent in (pair.partition("<") for pair in pairs)]


def written(rows: list[Row]) -> list[list[str]]:
    """Return the rows as the vectors write them."""
    return [[id_ + ("+" if on else ":0") for id_, on in zip(row.call_ids, row.trains, strict=True)] for row in rows]


@pytest.mark.parametrize(("vector", "policy"), CASES, ids=[f"{policy}: {vector['name']}" for vector, policy in CASES])
def test_vectors_of_the_specification(vector, policy):
    records = [
        call(
            id_,
            parent,
            vector.get("session", {}).get(id_, "main"),
            status="failed" if id_ in vector.get("failed", ()) else "ok",
        )
        for id_, parent in vector["records"]
    ]
    want = vector[policy]
    if isinstance(want, dict):
        with pytest.raises(CallForestError, match=want["error"]):
            plan_rows(records, policy=policy, kept=vector["kept"], scored=vector.get("scored"))
    else:
        rows = plan_rows(records, policy=policy, kept=vector["kept"], scored=vector.get("scored"))
        assert written(rows) == want


def test_every_vector_is_run():
    assert len(VECTORS) == 19
    assert len(CASES) == 33


@pytest.mark.parametrize(
    ("known", "want"),
    [
        ({"scored": "c4"}, [["c1+", "c2+", "c4+"]]),
        ({"kept": ["c1", "c3"]}, [["c1+", "c3+"]]),
        ({"kept": ["c1", "c3"], "scored": "c4"}, [["c1+", "c2+", "c4+"]]),
        ({"scored": "c1"}, [["c1+"]]),
        ({"scored": "s2"}, [["s1+", "s2+"]]),
    ],
    ids=["scored", "last kept", "scored wins over kept", "inner call", "other session"],
)
def test_main_chain_is_the_path_to_the_scored_call(known, want):
    records = calls("c1", "c2<c1", "c3<c1", "c4<c2") + [call("s1", None, "sub"), call("s2", "s1", "sub")]
    assert written(plan_rows(records, policy="main_chain", **known)) == want


@pytest.mark.parametrize(
    ("failed", "scored", "want"),
    [
        ("c2 c3 c4", "c1", [["c1+"]]),
        ("c2 c4", "c1", [["c1+", "c2+", "c3+"]]),
        ("c2 c3 c4", "c4", [["c1+", "c2+", "c3+", "c4+"]]),
        ("c2 c3 c4", "c3", [["c1+", "c2+", "c3+"]]),
        ("c1 c2 c3 c4", "c2", [["c1+", "c2+"]]),
        ("c4", None, [["c1+", "c2+", "c3+"]]),
    ],
    ids=["whole tail", "up to an ok call", "scored end", "scored inside", "all failed", "no scored call known"],
)
def test_failed_calls_fall_off_until_none_is_left_to_take_out(failed, scored, want):
    records = [
        call(id_, parent, status="failed" if id_ in failed.split() else "ok")
        for id_, parent in [("c1", None), ("c2", "c1"), ("c3", "c2"), ("c4", "c3")]
    ]
    assert written(plan_rows(records, policy="all_captured", scored=scored)) == want


def test_a_failed_fork_falls_off_when_all_its_branches_do():
    records = calls("c1") + calls("c2<c1", "c3<c2", "c4<c2", status="failed") + calls("c5<c1")
    assert written(plan_rows(records, policy="all_captured", scored="c5")) == [["c1+", "c5+"]]


def test_a_rejected_branch_does_not_own_the_prefix_that_it_shares():
    records = calls("c1", "c2<c1", "c3<c2", "c4<c2")
    assert written(plan_rows(records, kept=["c1", "c2", "c4"])) == [["c1+", "c2+", "c4+"]]


def test_rows_are_ordered_by_their_roots_before_their_ends():
    rows = plan_rows(calls("c1", "c2", "c3<c2", "c4<c1"), policy="all_captured")
    assert written(rows) == [["c1+", "c4+"], ["c2+", "c3+"]]


def test_kept_calls_may_come_in_another_order_than_recorded():
    records = calls("c1", "c2", "c3<c1", "c4<c2")
    assert written(plan_rows(records, kept=["c2", "c4", "c1", "c3"])) == [["c1+", "c3+"], ["c2+", "c4+"]]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_truncated_call_counts_and_is_flagged(policy):
    records = [*calls("c1"), *calls("c2<c1", status="truncated", finish_reason="length")]
    (row,) = plan_rows(records, policy=policy, kept=["c1", "c2"])
    assert row.trains == (True, True)
    assert row.truncated_ids == ("c2",)
    assert [record.truncated for record in row.calls] == [False, True]


def test_a_truncated_leaf_is_not_taken_out_as_a_failed_one_is():
    records = [*calls("c1"), *calls("c2<c1", status="truncated"), *calls("c3<c1", status="failed")]
    assert written(plan_rows(records, policy="all_captured", scored="c1")) == [["c1+", "c2+"]]


def test_a_row_holds_what_its_calls_hold_token_for_token():
    records = [
        call("c1", prompt_ids=[11, 12, 13], response_ids=[14, 15], response_logprobs=[-0.1, -0.2]),
        call("c2", "c1", prompt_ids=[21], response_ids=[22], response_logprobs=[-0.3]),
        call("c3", "c1", prompt_ids=[], response_ids=[31, 32], response_logprobs=[-0.4, -0.5]),
    ]
    first, second = plan_rows(records, kept=["c1", "c2", "c3"])
    assert first.token_ids == [11, 12, 13, 14, 15, 21, 22]
    assert first.loss_mask == [0, 0, 0, 1, 1, 0, 1]
    assert first.logprobs == [0.0, 0.0, 0.0, -0.1, -0.2, 0.0, -0.3]
    assert second.token_ids == [11, 12, 13, 14, 15, 31, 32]
    assert second.loss_mask == [0, 0, 0, 0, 0, 1, 1]
    assert second.logprobs == [0.0, 0.0, 0.0, -0.1, -0.2, -0.4, -0.5]
    assert (second.num_tokens, second.num_trained_tokens) == (7, 2)
    assert (second.prompt_ids, second.response_ids) == ([11, 12, 13], [14, 15, 31, 32])
    assert second.response_mask == [0, 0, 1, 1]
    assert second.response_logprobs == [-0.1, -0.2, -0.4, -0.5]


def test_without_log_probs_a_row_has_none():
    (row,) = plan_rows(calls("c1", "c2<c1"), kept=["c1", "c2"])
    assert row.logprobs is None
    assert row.response_logprobs is None


def test_a_call_that_generated_nothing_needs_no_log_probs():
    records = [call("c1", response_logprobs=[-0.1]), call("c2", "c1", response_ids=[])]
    (row,) = plan_rows(records, kept=["c1", "c2"])
    assert row.logprobs == [0.0, 0.0, -0.1, 0.0, 0.0]


def test_log_probs_of_calls_that_do_not_count_do_not_matter():
    records = [call("c1", response_logprobs=[-0.1]), call("c2", "c1")]
    (row,) = plan_rows(records, kept=["c1"])
    assert row.logprobs == [0.0, 0.0, -0.1]


def test_log_probs_of_some_calls_alone_are_refused():
    records = [call("c1", response_logprobs=[-0.1]), call("c2", "c1")]
    with pytest.raises(CallForestError, match="response_logprobs.*'c2'"):
        plan_rows(records, kept=["c1", "c2"])


def test_weight_versions_are_those_of_the_tokens_that_train():
    records = [
        call("c1", min_global_steps=1, max_global_steps=2),
        call("c2", "c1", min_global_steps=3, max_global_steps=5),
        call("c3", "c1", min_global_steps=4, max_global_steps=4),
        call("c4"),
    ]
    rows = plan_rows(records, policy="all_captured")
    assert [row.global_steps for row in rows] == [(1, 5), (4, 4), None]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_logprobs": [-0.1, -0.2]}, "'c7'.*2 response_logprobs for 1 response_ids"),
        ({"status": "lost"}, "'c7'.*'lost'.*ok, failed, truncated"),
        ({"min_global_steps": 3}, "'c7'.*min_global_steps 3.*None"),
        ({"max_global_steps": 3}, "'c7'.*None.*max_global_steps 3"),
        ({"min_global_steps": 4, "max_global_steps": 3}, "'c7'.*4.*3"),
        ({"call_id": ""}, "''"),
        ({"call_id": 7}, "call_id 7"),
    ],
    ids=["log-probs too many", "status", "no newest", "no oldest", "newest before oldest", "empty id", "number as id"],
)
def test_a_record_that_contradicts_itself_is_refused(fields, words):
    with pytest.raises(CallForestError, match=words):
        CallRecord(**{"call_id": "c7", "prompt_ids": [1], "response_ids": [2]} | fields)


def test_a_record_does_not_change_with_the_lists_that_it_was_made_of():
    prompt, response, logprobs = [1], [2], [-0.1]
    record = CallRecord("c1", prompt_ids=prompt, response_ids=response, response_logprobs=logprobs)
    for list_ in (prompt, response, logprobs):
        list_.append(9)
    assert (record.prompt_ids, record.response_ids, record.response_logprobs) == ((1,), (2,), (-0.1,))
    assert record.status is CallStatus.OK


LINE = ("c1", "c2<c1", "c3<c2")


@pytest.mark.parametrize(
    ("pairs", "arguments", "words"),
    [
        ([], {"policy": "all_captured"}, "no call was recorded"),
        (["c1", "c2<c1", "c2<c1"], {"policy": "all_captured"}, "more than once.*'c2'"),
        (["c1", "c2<c0"], {"policy": "all_captured"}, "never recorded.*'c2', 'c0'"),
        (["c2<c1", "c1"], {"policy": "all_captured"}, "before their parent.*'c2', 'c1'"),
        (["c1<c2", "c2<c1"], {"policy": "all_captured"}, "before their parent.*'c1', 'c2'"),
        (["c1<c1"], {"policy": "all_captured"}, "before their parent.*'c1', 'c1'"),
        (LINE, {"policy": "all_captured", "kept": ["c1", "c9"]}, "kept.*never recorded.*'c9'"),
        (LINE, {"policy": "all_captured", "scored": "c9"}, "scored.*never recorded.*'c9'"),
        (LINE, {"kept": ["c1", "c1"]}, "kept.*more than once.*'c1'"),
        (LINE, {"kept": ["c1", 2]}, "kept.*no call ids.*2"),
        (LINE, {"kept": "c1"}, "kept.*'c1'.*list"),
        (LINE, {"kept": ["c1", "c3", "c2"]}, "'returned_history'.*parent.*'c3', 'c2'"),
        (LINE, {"kept": ["c2", "c3"]}, "'returned_history'.*parent.*'c2', 'c1'"),
        (LINE, {"kept": []}, "'returned_history'.*selected no call.*'c1', 'c2', 'c3'"),
        (LINE, {}, "'returned_history'.*pass kept"),
        (LINE, {"policy": "main_chain"}, "'main_chain'.*pass scored"),
        (LINE, {"policy": "main_chain", "kept": []}, "'main_chain'.*pass scored"),
    ],
    ids=lambda value: None if isinstance(value, list | tuple | dict) else value,
)
def test_a_forest_that_cannot_be_planned_is_refused_by_name(pairs, arguments, words):
    with pytest.raises(CallForestError, match=words):
        plan_rows(calls(*pairs), **arguments)


def test_kept_calls_of_several_sessions_are_refused_with_one_of_each():
    records = [*calls("c1", "c2<c1"), call("s1", None, "sub"), call("s2", "s1", "sub")]
    with pytest.raises(CallForestError, match="2 sessions.*'main', 'c2'.*'sub', 's2'"):
        plan_rows(records, kept=["c1", "c2", "s1", "s2"])
    assert written(plan_rows(records, kept=["c1", "c2"])) == [["c1+", "c2+"]]


def test_records_of_another_type_are_refused():
    with pytest.raises(CallForestError, match="no CallRecord.*'c1'"):
        plan_rows([{"call_id": "c1"}], policy="all_captured")


def test_an_error_about_many_calls_stays_readable():
    records = [call(f"c{number}", "gone") for number in range(1000)]
    with pytest.raises(CallForestError, match="'c9', 'gone'.* and 990 more") as error:
        plan_rows(records, policy="all_captured")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name", ["newest", "", ":", "module:", ":function", None, 3])
def test_an_unknown_policy_lists_what_exists(name):
    with pytest.raises(CallForestError, match="returned_history, all_captured, main_chain, module:function") as error:
        plan_rows(calls("c1"), policy=name)
    assert repr(name) in str(error.value)


USERS_POLICIES = """
from call_forest import POLICIES, CallForestError
from itertools import repeat

def last_only(forest):
    return [call.call_id for call in forest.path(forest.records[-1].call_id)]

def what_it_sees(forest):
    assert forest.kept == ("c1", "c2") and forest.scored == "c2" and forest.positions["c3"] == 2
    return (call.call_id for call in forest.records if call.call_id in forest.kept)

def as_a_set(forest):
    return set(POLICIES["all_captured"](forest))

def gap(forest): return ["c1", "c3"]
def unknown(forest): return ["c1", "c9"]
def all_and_one_more(forest): return ["c1", "c2", "c3", "c8"]
def twice(forest): return ["c1", "c2", "c2"]
def endless(forest): return repeat("c1")
def nothing(forest): return []
def forgot(forest): return None
def number(forest): return 7
def text(forest): return "c1"
def records(forest): return forest.records[:1]
def mixed(forest): return ["c1", ["c2"], None]
def raises(forest): raise KeyError("c5")
def raises_later(forest):
    yield "c1"
    raise KeyError("c5")
def refuses(forest): raise CallForestError("c3 is too long")
def delegates(forest): return POLICIES["returned_history"](forest)

not_a_function = ["c1"]
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """Put modules of a user's own on the path, under names that no other test has imported."""
    monkeypatch.syspath_prepend(tmp_path)
    names = {
        "users_policies": USERS_POLICIES,
        "users_broken": "import no_such_module_at_all",
        "users_syntax": "def f(:",
    }
    names["users_exit"] = "raise RuntimeError('not today')"
    for name, source in names.items():
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("function", "want"),
    [
        ("last_only", [["c1+", "c2+", "c3+"]]),
        ("what_it_sees", [["c1+", "c2+"]]),
        ("as_a_set", [["c1+", "c2+", "c3+"]]),
    ],
)
def test_a_policy_of_the_users_own(users_module, function, want):
    rows = plan_rows(calls(*LINE), policy=f"users_policies:{function}", kept=["c1", "c2"])
    assert written(rows) == want


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("gap", "parent is not selected.*'c3', 'c2'"),
        ("unknown", "never recorded.*'c9'"),
        ("all_and_one_more", "never recorded.*'c8'"),
        ("twice", "more than once.*'c2'"),
        ("endless", "more than once.*'c1'"),
        ("nothing", "selected no call.*'c1', 'c2', 'c3'"),
        ("forgot", "TypeError.*NoneType"),
        ("number", "TypeError.*int"),
        ("text", "'c1' is one text"),
        ("records", "no call ids.*call_id='c1'"),
        ("mixed", r"no call ids: \['c2'\], None;"),
        ("raises", "KeyError: 'c5'"),
        ("raises_later", "KeyError: 'c5'"),
        ("refuses", "c3 is too long"),
        ("delegates", "'c3', 'c2'"),
        ("not_a_function", "no function 'not_a_function'"),
        ("absent", "no function 'absent'"),
    ],
)
def test_nonsense_of_a_users_policy_is_refused_with_its_name_and_the_ids(users_module, function, words):
    with pytest.raises(CallForestError, match=f"'users_policies:{function}'.*{words}"):
        plan_rows(calls(*LINE), policy=f"users_policies:{function}", kept=["c1", "c3", "c2"])


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("users_absent", "ModuleNotFoundError.*users_absent.*PYTHONPATH"),
        ("users_broken", "ModuleNotFoundError.*no_such_module_at_all"),
        ("users_syntax", "SyntaxError"),
        ("users_exit", "RuntimeError: not today"),
    ],
)
def test_a_users_module_that_cannot_be_imported_is_named_with_the_reason(users_module, module, words):
    with pytest.raises(CallForestError, match=f"'{module}:f'.*{words}") as error:
        find_policy(f"{module}:f")
    assert error.value.__cause__ is not None


def test_a_whole_call_among_ids_does_not_flood_the_message(users_module):
    with pytest.raises(CallForestError, match="call_id='c1'") as error:
        plan_rows([call("c1", prompt_ids=range(10_000))], policy="users_policies:records")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("scored", "want"),
    [("c2", ["c3", "c5", "c2"]), ("c3", ["c2", "c5", "c3"]), ("c5", ["c2", "c3", "c5"]), ("c1", ["c3", "c5", "c2"])],
)
def test_the_scored_chain_goes_last_and_owns_what_it_owned(scored, want):
    rows = plan_rows(calls("c1", "c2<c1", "c3<c1", "c4", "c5<c4"), policy="all_captured")
    before = {row.call_ids: row.trains for row in rows}
    handed = rows_for_verl(rows, scored)
    assert [row.call_ids[-1] for row in handed] == want
    assert {row.call_ids: row.trains for row in handed} == before
    assert any(handed[-1].loss_mask)


@pytest.mark.parametrize(
    ("generated", "scored", "words"),
    [
        ({"c3": []}, "c3", r"last row \('c1', 'c3'\) has no trained token"),
        ({"c1": [], "c2": []}, "c2", r"last row \('c1', 'c2'\) has no trained token"),
        ({}, "c9", "no row trains the scored call 'c9'"),
        ({"c4": []}, "c2", "empty response.*'c4'"),
    ],
    ids=["owned elsewhere", "generated nothing", "not counted", "empty response"],
)
def test_rows_that_verl_would_misread_are_refused(generated, scored, words):
    pairs = [("c1", None, [1]), ("c2", "c1", [1]), ("c3", "c1", [1]), ("c4", None, [])]
    records = [
        call(id_, parent, prompt_ids=prompt, response_ids=generated.get(id_, [3])) for id_, parent, prompt in pairs
    ]
    rows = plan_rows(records, policy="all_captured")
    with pytest.raises(CallForestError, match=words):
        rows_for_verl(rows, scored)


def test_no_rows_are_refused():
    with pytest.raises(CallForestError, match="'c1'"):
        rows_for_verl([], "c1")


def test_a_row_other_than_the_last_may_train_nothing():
    records = [call("c1"), call("c2", "c1", response_ids=[]), call("c3", "c1")]
    rows = plan_rows(records[:2] + [call("c3", "c1", response_ids=[])] + [call("c4", "c1")], policy="all_captured")
    assert [row.num_trained_tokens for row in rows_for_verl(rows, "c4")] == [1, 0, 1]


@st.composite
def forests(draw, statuses=tuple(CallStatus), sessions=("main", "sub")):
    """Draw records in any shape; every token of the forest is another number."""
    lengths = st.integers(0, 3)
    records, token = [], 0
    for number in range(draw(st.integers(1, 12))):
        prompt, response = draw(lengths), draw(lengths)
        tokens = list(range(token, token + prompt + response))
        token += prompt + response
        records.append(
            CallRecord(
                f"c{number}",
                draw(st.sampled_from([None, *(record.call_id for record in records)])),
                draw(st.sampled_from(sessions)),
                prompt_ids=tokens[:prompt],
                response_ids=tokens[prompt:],
                response_logprobs=[-float(id_) for id_ in tokens[prompt:]],
                status=draw(st.sampled_from(statuses)),
            )
        )
    return records


@st.composite
def planned(draw):
    """Draw a forest, what plan_rows is told of it, and the ids that count by the letter of the specification."""
    policy = draw(st.sampled_from(list(POLICIES)))
    records = draw(forests(sessions=("main",) if policy == "returned_history" else ("main", "sub")))
    parent = {record.call_id: record.parent_id for record in records}
    kept = []
    for id_ in parent:
        if (parent[id_] is None or parent[id_] in kept) and draw(st.booleans()):
            kept.append(id_)
    kept = kept or [records[0].call_id]
    scored = draw(st.sampled_from([None, *(record.call_id for record in records)]))
    end = scored or kept[-1]
    if policy == "returned_history":
        counted = set(kept)
    elif policy == "main_chain":
        counted = set(chain_to(end, parent))
    else:
        counted = set(parent)
        failed = {record.call_id for record in records if record.status == "failed"} - {end}
        while loose := {id_ for id_ in failed & counted if id_ not in {parent[other] for other in counted}}:
            counted -= loose
    return records, {"policy": policy, "kept": kept, "scored": scored}, counted


def chain_to(id_, parent) -> list[str]:
    """Return the ids from the root to this one."""
    return [*(chain_to(parent[id_], parent) if parent[id_] else []), id_]


@PROPERTY
@given(planned())
def test_rows_are_what_the_specification_says_step_by_step(case):
    records, arguments, counted = case
    order = [record.call_id for record in records]
    parent = {record.call_id: record.parent_id for record in records}
    ends = [id_ for id_ in order if id_ in counted and not any(parent[other] == id_ for other in counted)]
    chains = [chain_to(id_, parent) for id_ in ends]
    chains.sort(key=lambda chain: (order.index(chain[0]), order.index(chain[-1])))
    want = []
    for number, chain in enumerate(chains):
        want.append([id_ + (":0" if any(id_ in earlier for earlier in chains[:number]) else "+") for id_ in chain])
    if not counted:
        with pytest.raises(CallForestError, match="selected no call"):
            plan_rows(records, **arguments)
    else:
        assert written(plan_rows(records, **arguments)) == want


@PROPERTY
@given(planned())
def test_each_counted_call_trains_once_in_a_chain_that_is_the_concatenation_of_its_calls(case):
    records, arguments, counted = case
    rows = plan_rows(records, **arguments) if counted else []
    by_id = {record.call_id: record for record in records}
    trained = [id_ for row in rows for id_, on in zip(row.call_ids, row.trains, strict=True) if on]
    assert sorted(trained) == sorted(counted)
    for row in rows:
        chain = [by_id[id_] for id_ in row.call_ids]
        assert [record.parent_id for record in chain] == [None, *row.call_ids[:-1]]
        assert not any(row.call_ids[-1] == by_id[id_].parent_id for id_ in counted)
        assert row.token_ids == [id_ for record in chain for id_ in record.prompt_ids + record.response_ids]
        on = {id_ for record, trains in zip(chain, row.trains, strict=True) if trains for id_ in record.response_ids}
        generated = {id_ for record in chain for id_ in record.response_ids}
        assert row.loss_mask == [int(id_ in on) for id_ in row.token_ids]
        assert row.logprobs == [-float(id_) if id_ in generated else 0.0 for id_ in row.token_ids]
        assert row.prompt_ids + row.response_ids == row.token_ids
        assert row.response_mask == row.loss_mask[len(row.prompt_ids) :]
        assert row.response_logprobs == row.logprobs[len(row.prompt_ids) :]
        assert row.prompt_ids == list(chain[0].prompt_ids)
        assert (row.num_tokens, row.num_trained_tokens) == (len(row.token_ids), sum(row.loss_mask))


def shuffled(data, records, after) -> list[CallRecord]:
    """Draw an order of the records in which each comes after its parent and after the ids in `after`."""
    waits = {record.call_id: {record.parent_id} - {None} | after.get(record.call_id, set()) for record in records}
    order = []
    while waits:
        id_ = data.draw(st.sampled_from(sorted(id_ for id_, others in waits.items() if not others & waits.keys())))
        order.append(id_)
        del waits[id_]
    by_id = {record.call_id: record for record in records}
    return [by_id[id_] for id_ in order]


@PROPERTY
@given(forests(statuses=("ok",)), st.data())
def test_the_order_of_arrival_changes_the_order_of_rows_and_with_it_ownership_alone(records, data):
    rows = plan_rows(records, policy="all_captured")
    later = shuffled(data, records, {})
    order = [record.call_id for record in later]
    again = plan_rows(later, policy="all_captured")
    assert {row.call_ids: row.token_ids for row in again} == {row.call_ids: row.token_ids for row in rows}
    places = [(order.index(row.call_ids[0]), order.index(row.call_ids[-1])) for row in again]
    assert places == sorted(places)


@PROPERTY
@given(forests(statuses=("ok",)), st.data())
def test_the_order_of_arrival_changes_nothing_while_roots_and_the_ends_of_a_root_keep_theirs(records, data):
    rows = plan_rows(records, policy="all_captured")
    after: dict[str, set[str]] = {}
    for row, following in zip(rows, rows[1:], strict=False):
        if row.call_ids[0] == following.call_ids[0]:
            after.setdefault(following.call_ids[-1], set()).add(row.call_ids[-1])
        else:
            after.setdefault(following.call_ids[0], set()).add(row.call_ids[0])
    assert plan_rows(shuffled(data, records, after), policy="all_captured") == rows


TOKENS = st.lists(st.integers(0, 9), max_size=4)


@PROPERTY
@given(TOKENS, st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8), st.sampled_from(list(POLICIES)))
def test_append_without_retries_is_one_row_token_for_token_what_the_plain_loop_gives(prompt, turns, policy):
    tokens, mask, logprobs, records = list(prompt), [0] * len(prompt), [0.0] * len(prompt), []
    new = prompt
    for number, (answer, observation) in enumerate(turns):
        fields = {"prompt_ids": new, "response_ids": answer, "response_logprobs": [-0.5] * len(answer)}
        records.append(CallRecord(f"c{number}", f"c{number - 1}" if number else None, **fields))
        tokens += answer
        mask += [1] * len(answer)
        logprobs += [-0.5] * len(answer)
        if number < len(turns) - 1:
            tokens += observation
            mask += [0] * len(observation)
            logprobs += [0.0] * len(observation)
        new = observation
    (row,) = plan_rows(records, policy=policy, kept=[record.call_id for record in records])
    assert (row.token_ids, row.loss_mask, row.logprobs) == (tokens, mask, logprobs)
    assert (row.prompt_ids, row.response_ids) == (prompt, tokens[len(prompt) :])


@PROPERTY
@given(planned(), st.data())
def test_rows_for_verl_reorder_and_end_with_a_row_that_trains_the_scored_call(case, data):
    records, arguments, counted = case
    if not counted:
        return
    rows = plan_rows([*records, call("tail", response_logprobs=[-0.1])], **arguments | {"policy": "all_captured"})
    scored = data.draw(st.sampled_from([id_ for row in rows for id_ in row.call_ids]))
    try:
        handed = rows_for_verl(rows, scored)
    except CallForestError as error:
        assert "no trained token" in str(error) or "empty response" in str(error)
        return
    assert sum(handed[-1].loss_mask) > 0
    assert (scored, True) in zip(handed[-1].call_ids, handed[-1].trains, strict=True)
    others = [row for row in rows if row is not handed[-1]]
    assert len(handed) == len(rows)
    assert all(ours is theirs for ours, theirs in zip(handed, others, strict=False))


class CountedId(str):
    """A call id that counts how often it is hashed or compared: a measure of work that no busy machine disturbs."""

    uses = 0

    def __hash__(self) -> int:
        CountedId.uses += 1
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        CountedId.uses += 1
        return str.__eq__(self, other)


def shape(name: str, size: int, id_type: type[str] = str) -> list[CallRecord]:
    """Return a forest of one shape."""
    ids = [id_type(f"c{number}") for number in range(size)]
    parents = {
        "chain": [None, *ids[:-1]],
        "star": [None, *[ids[0]] * (size - 1)],
        "roots": [None] * size,
        "failed tail": [None, *ids[:-1]],
    }[name]
    status = ["failed" if name == "failed tail" and number else "ok" for number in range(size)]
    return [call(*fields, status=status[number]) for number, fields in enumerate(zip(ids, parents, strict=True))]


def work(name: str, size: int, policy: str) -> int:
    """Return how often ids are used while a forest is planned and its rows are made."""
    records = shape(name, size, CountedId)
    kept = [record.call_id for record in records]
    CountedId.uses = 0
    rows = plan_rows(records, policy=policy, kept=kept, scored=kept[0] if name == "failed tail" else None)
    rows_for_verl(rows, rows[0].call_ids[0])
    assert sum(len(row.token_ids) for row in rows) > 0
    return CountedId.uses


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["chain", "star", "roots", "failed tail"])
def test_twice_the_calls_are_twice_the_work(name, policy):
    assert work(name, 800, policy) <= 2.1 * work(name, 400, policy)


# Quadratic work takes minutes at this size and runs into the suite's timeout; linear work takes about a second.
@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_of_100_000_calls_is_planned_and_made_without_recursion(policy):
    records = shape("chain", 100_000)
    rows = plan_rows(records, policy=policy, kept=[record.call_id for record in records])
    (row,) = rows_for_verl(rows, "c99999")
    assert len(row.token_ids) == len(row.loss_mask) == 300_000
    assert sum(row.loss_mask) == 100_000


def test_a_failed_tail_of_100_000_calls_falls_off_in_one_pass():
    (row,) = plan_rows(shape("failed tail", 100_000), policy="all_captured", scored="c0")
    assert row.call_ids == ("c0",)


def test_the_lists_of_a_row_are_made_once():
    (row,) = plan_rows(shape("chain", 3), policy="all_captured")
    assert row.token_ids is row.token_ids
    assert row.loss_mask is row.loss_mask
    assert row.call_ids is row.call_ids


def test_records_rows_and_errors_travel_between_processes():
    records = calls("c1", "c2<c1", status="truncated")
    rows = plan_rows(records, policy="all_captured")
    assert pickle.loads(pickle.dumps((records, rows))) == (records, rows)
    error = pickle.loads(pickle.dumps(CallForestError("c1 is lost")))
    assert isinstance(error, CallForestError) and isinstance(error, ValueError) and str(error) == "c1 is lost"


def test_a_forest_can_be_built_to_try_a_policy_on():
    forest = CallForest(calls(*LINE), kept=["c1", "c2"])
    assert forest.scored == "c2"
    assert [record.call_id for record in forest.path("c3")] == ["c1", "c2", "c3"]
    assert list(find_policy("main_chain")(forest)) == ["c1", "c2"]


def test_importing_needs_the_standard_library_alone():
    code = "import sys, call_forest; print(sorted({m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names))"
    folder = Path(call_forest.__file__).parent
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "['__main__', 'call_forest']"
