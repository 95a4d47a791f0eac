"""What the policy writes becomes one action, or a message that tells it what to do instead; never an exception."""

import json

import pytest

from environment_session import ActionName, BrowserAction
from observations import Element
from tool_calls import RawCall, UnusableCall, read_hermes_calls, to_action

ELEMENTS = [
    Element(0, "a", "Home"),
    Element(1, "input", ""),
    Element(2, "button", "Add"),
    Element(3, "button", "Add"),
    Element(4, "a", "Blue kettle"),
]


def reply(arguments: object, name: object = "browser") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def read(text: str) -> BrowserAction | UnusableCall:
    calls = read_hermes_calls(text)
    return calls if isinstance(calls, UnusableCall) else to_action(calls[0], ELEMENTS)


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ({"action": "observe"}, BrowserAction(ActionName.OBSERVE)),
        ({"action": "navigate", "url": " https://a.b/c "}, BrowserAction(ActionName.NAVIGATE, url="https://a.b/c")),
        ({"action": "click", "element": 4}, BrowserAction(ActionName.CLICK, element_id=4)),
        ({"action": "click", "element": "4"}, BrowserAction(ActionName.CLICK, element_id=4)),
        ({"action": "click", "element": "blue  KETTLE"}, BrowserAction(ActionName.CLICK, element_id=4)),
        (
            {"action": "type", "element": "input", "text": ""},
            BrowserAction(ActionName.TYPE, element_id=1, text=""),
        ),
        ({"action": "finish"}, BrowserAction(ActionName.FINISH, answer="")),
        ({"action": "finish", "answer": None}, BrowserAction(ActionName.FINISH, answer="")),
        ({"action": "finish", "answer": 42}, BrowserAction(ActionName.FINISH, answer="42")),
        ({"action": "observe", "url": "ignored"}, BrowserAction(ActionName.OBSERVE)),
    ],
)
def test_a_usable_call_becomes_its_action(arguments, action):
    assert read(reply(arguments)) == action


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("I am done.", "no_call", "no tool call"),
        ("", "no_call", "no tool call"),
        ("<tool_call>{", "unclosed_call", "no closing tag"),
        ("<tool_call>{'name': 1}</tool_call>", "broken_json", "not valid JSON"),
        ("<tool_call></tool_call>", "broken_json", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "broken_json", "not valid JSON"),
        ('<tool_call>{"function":"x"}</tool_call>', "wrong_keys", "name and arguments"),
        ("<tool_call>[1]</tool_call>", "wrong_keys", "name and arguments"),
        ('<tool_call>{"name":"browser","arguments":{}}{"a":1}</tool_call>', "two_objects", "exactly one"),
        (reply(None), "arguments_not_object", "JSON object"),
        (reply([1]), "arguments_not_object", "JSON object"),
        (reply("{"), "broken_json", "not valid JSON"),
        (reply({"action": "observe"}, name="search"), "unknown_tool", "only tool is browser"),
        (reply({"action": "observe"}, name=None), "unknown_tool", "only tool is browser"),
        (reply({}), "unknown_action", "is missing"),
        (reply({"action": "scroll"}), "unknown_action", "observe, navigate, click, type, finish"),
        (reply({"action": ["click"]}), "unknown_action", "unknown"),
        (reply({"action": "click"}), "bad_argument", "needs element"),
        (reply({"action": "click", "element": True}), "bad_argument", "needs element"),
        (reply({"action": "click", "element": 1.0}), "bad_argument", "needs element"),
        (reply({"action": "click", "element": 99}), "bad_element", "no element 99"),
        (reply({"action": "click", "element": -1}), "bad_element", "no element -1"),
        (reply({"action": "click", "element": "Red kettle"}), "bad_element", "[4] Blue kettle"),
        (reply({"action": "click", "element": "Add"}), "bad_element", "2, 3"),
        (reply({"action": "type", "element": 1}), "bad_argument", "needs text"),
        (reply({"action": "type", "element": 1, "text": 5}), "bad_argument", "needs text"),
        (reply({"action": "navigate"}), "bad_argument", "needs url"),
        (reply({"action": "navigate", "url": 7}), "bad_argument", "needs url"),
        (reply({"action": "navigate", "url": "file:///etc/passwd"}), "bad_address", "http://"),
        (reply({"action": "navigate", "url": "  FILE:/etc/passwd"}), "bad_address", "http://"),
        (reply({"action": "navigate", "url": "chrome://crash"}), "bad_address", "http://"),
        (reply({"action": "navigate", "url": "view-source:http://a.b"}), "bad_address", "http://"),
        (reply({"action": "navigate", "url": "javascript:alert(1)"}), "bad_address", "http://"),
        (reply({"action": "navigate", "url": "www.example.org"}), "bad_address", "http://"),
        (reply({"action": "navigate", "url": "http://"}), "bad_address", "http://"),
        (reply({"action": "navigate", "url": "http://[::1"}), "bad_address", "http://"),
        (reply({"action": "finish", "answer": {"a": 1}}), "bad_argument", "answer as a text"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong_and_what_to_do(text, problem, hint):
    call = read(text)
    assert isinstance(call, UnusableCall)
    assert call.problem == problem
    assert hint in call.message
    assert len(call.message) < 300


def test_arguments_may_be_a_json_text_as_some_formats_have_them():
    assert to_action(RawCall("browser", '{"action": "click", "element": 0}'), ELEMENTS) == BrowserAction(
        ActionName.CLICK, element_id=0
    )


def test_calls_inside_a_closed_thought_are_not_made():
    thought = f"<think>I could {reply({'action': 'observe'})}</think>"
    assert read(thought + reply({"action": "finish"})) == BrowserAction(ActionName.FINISH, answer="")
    assert read(thought).problem == "no_call"


def test_all_calls_of_a_reply_are_returned_in_order():
    calls = read_hermes_calls(reply({"action": "observe"}) + reply({"action": "finish"}))
    assert [call.arguments["action"] for call in calls] == ["observe", "finish"]
