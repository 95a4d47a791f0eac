"""What a line of the episode log tells of a real rollout: its turns, its calls, its rows, and no password."""

import json

import pytest

from episode_log import read_episodes
from secret_masking import MASK
from tests.agent_loop_harness import CLICK_ABOUT, FINISH, ROW, call
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.fake_site import GYM_FILES, Button, Field, Page

OBSERVE = call(action="observe")
BROKEN = "<tool_call>{broken</tool_call>"


def records_of(folder) -> list[dict]:
    records, problems = read_episodes(folder)
    assert problems == []
    return records


def shown(record: dict, *keys: str) -> list[tuple]:
    return [tuple(turn[key] for key in keys) for turn in record["turn_records"]]


async def test_each_turn_tells_what_was_done_and_what_came_back(build, environment, tmp_path):
    replies = [CLICK_ABOUT, "no call at all", call(action="click", element=9), FINISH]
    loop, policy = build(environment, replies)
    await loop.run({}, **ROW)
    (record,) = records_of(tmp_path)
    assert shown(record, "turn", "action", "arguments", "element", "mistake") == [
        (1, "click", {"element_id": 1}, "a: About", ""),
        (2, "", {}, "", "no_call"),
        (3, "", {}, "", "bad_element"),
        (4, "finish", {"answer": "ALPHA-42"}, "", ""),
    ]
    pages = [turn["observation"] and turn["observation"]["url"] for turn in record["turn_records"]]
    assert pages == [f"{GYM_FILES}site/about.html", None, None, None]
    assert record["start_page"]["text"].startswith(f"URL: {GYM_FILES}site/index.html\nTITLE: Home\n")
    assert [turn["reply"] for turn in record["turn_records"]] == [f"{reply}<|im_end|>" for reply in replies]
    assert [turn["prompt_tokens"] for turn in record["turn_records"]] == [len(prompt) for prompt in policy.prompts]
    assert (record["outcome"], record["site"], record["question"], record["final"]) == (
        "success",
        "",
        "Open About.",
        True,
    )
    assert record["started_at"] <= record["ended_at"]


async def test_an_action_that_failed_tells_why(build, tmp_path):
    fault = Fault(Do.ERROR, path="/browser_click", text="click failed: ElementHandle.click: Timeout 5000ms exceeded.")
    async with FakeEnvironment(faults=[fault]) as environment:
        loop, _ = build(environment, [CLICK_ABOUT, FINISH])
        await loop.run({}, **ROW)
    (record,) = records_of(tmp_path)
    assert shown(record, "failure_kind", "error", "observation")[0] == ("element_not_usable", fault.text, None)


async def test_attempts_before_the_last_one_are_not_final(build, tmp_path):
    faults = [Fault(Do.LOSE_SESSION, path="/browser_click", times=1)]
    async with FakeEnvironment(faults=faults) as environment:
        loop, _ = build(environment, [CLICK_ABOUT, CLICK_ABOUT, FINISH])
        await loop.run({}, **ROW)
    first, second = records_of(tmp_path)
    assert [(r["attempt"], r["final"], r["outcome"]) for r in (first, second)] == [
        (1, False, "invalid"),
        (2, True, "success"),
    ]
    assert (first["failure_kind"], first["failure_fault"]) == ("session_lost", "environment")
    assert "no active session" in first["failure_evidence"]
    assert [call["row"] for call in first["call_records"]] == [None] and first["row_records"] == []


async def test_times_of_the_turns_leave_out_seed_first_page_and_score(build, tmp_path):
    async with FakeEnvironment(latency_s={"/browser_click": 0.2, "/verify": 0.3, "/seed_session": 0.3}) as environment:
        loop, _ = build(environment, [CLICK_ABOUT, FINISH])
        await loop.run({}, **ROW)
    (record,) = records_of(tmp_path)
    click_s, finish_s = (turn["environment_s"] for turn in record["turn_records"])
    assert click_s >= 0.2
    assert record["environment_s"] - click_s - finish_s >= 0.6
    assert sum(turn["generation_s"] for turn in record["turn_records"]) <= record["generation_s"] + 0.002


def check_forest(record: dict, outputs: list) -> None:
    """Hold calls and rows of a record to the rows that verl gets."""
    calls = {call["id"]: call for call in record["call_records"]}
    assert record["rows"] == len(record["row_records"]) == len(outputs)
    for row, output in zip(record["row_records"], outputs, strict=True):
        assert (row["prompt_tokens"], row["response_tokens"]) == (len(output.prompt_ids), len(output.response_ids))
        assert row["trained_tokens"] == sum(output.response_mask)
        assert row["trained_tokens"] == sum(calls[id_]["generated_tokens"] for id_ in row["trains"])
        tokens = sum(calls[id_]["prompt_tokens"] + calls[id_]["generated_tokens"] for id_ in row["calls"])
        assert tokens == row["prompt_tokens"] + row["response_tokens"]
    owners = {id_: number for number, row in enumerate(record["row_records"]) for id_ in row["trains"]}
    assert {id_: call["row"] for id_, call in calls.items()} == {id_: owners.get(id_) for id_ in calls}


async def test_discarded_replies_are_calls_that_no_row_trains(build, environment, tmp_path):
    loop, _ = build(environment, [BROKEN, "nothing", CLICK_ABOUT, FINISH], retry_unusable_calls=2)
    outputs = await loop.run({}, **ROW)
    (record,) = records_of(tmp_path)
    assert shown(record, "action", "discarded") == [("click", ["broken_json", "no_call"]), ("finish", [])]
    kinds = [(call["kind"], call["turn"], call["parent"], call["row"]) for call in record["call_records"]]
    assert kinds == [
        ("discarded", 1, None, None),
        ("discarded", 1, None, None),
        ("turn", 1, None, 0),
        ("turn", 2, "2", 0),
    ]
    check_forest(record, outputs)


@pytest.mark.parametrize("policy", ["window", "summary"])
async def test_compactions_are_roots_and_summaries_are_calls(build, environment, tmp_path, policy):
    loop, engine = build(environment, [OBSERVE, OBSERVE, FINISH])
    await loop.run({}, **ROW)
    _, second, _ = map(len, engine.prompts)
    note = ["I saw the start page."] if policy == "summary" else []
    limits = {"context_policy": policy, "context_budget_tokens": second, "max_summary_tokens": 48}
    loop, _ = build(environment, [OBSERVE, CLICK_ABOUT, *note, FINISH], 1024, **limits)
    outputs = await loop.run({}, **ROW)
    record = records_of(tmp_path)[-1]
    assert len(outputs) > 1 and record["compactions"] == len(outputs) - 1
    assert sum(turn["compaction_before"] for turn in record["turn_records"]) == record["compactions"]
    roots = [call for call in record["call_records"] if call["parent"] is None]
    assert len(roots) == record["compactions"] + 1
    summaries = [call for call in record["call_records"] if call["kind"] == "summary"]
    assert len(summaries) == (record["compactions"] if policy == "summary" else 0)
    assert [bool(turn["summary"]) for turn in record["turn_records"]].count(True) == len(summaries)
    check_forest(record, outputs)


async def test_a_typed_password_gets_into_no_log_and_no_message(build, tmp_path, caplog):
    login = Page("Log in", "User Password", (Field("user"), Field("password"), Button("Go", title="Hi {password}")))
    typed = call(action="type", element=1, text="hunter2!")
    died = 'click failed: Target page, context or browser has been closed: fill("hunter2!")'
    faults = [Fault(Do.ERROR, path="/browser_click", text=died)]
    async with FakeEnvironment({f"{GYM_FILES}site/index.html": login}, faults) as environment:
        loop, _ = build(environment, [typed, call(action="click", element="Go"), FINISH], max_attempts=1)
        await loop.run({}, **ROW)
    (record,) = records_of(tmp_path)
    assert record["turn_records"][0]["arguments"] == {"element_id": 1, "text": MASK}
    assert MASK in record["turn_records"][0]["reply"] and MASK in record["failure_evidence"]
    assert "hunter2" not in json.dumps(record) and "hunter2" not in caplog.text
    assert "Attempt 1 of rollout" in caplog.text
