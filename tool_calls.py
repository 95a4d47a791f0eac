"""Reads the policy's reply into one browser action, or into a short message that tells the policy what was wrong.

A call that the policy got wrong is behaviour to learn from, so nothing here raises on what the policy wrote.
"""

import json
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from environment_session import ActionName, BrowserAction
from observations import Element, find_element

TOOL_NAME = "browser"

_CALL_TAG = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_CLOSED_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_EXAMPLE = '{"name": "browser", "arguments": {"action": "observe"}}'
_ACTIONS = ", ".join(ActionName)


@dataclass(frozen=True)
class UnusableCall:
    """A reply that is no browser action."""

    message: str
    """What the policy reads: the mistake and how to do it right, one or two sentences."""
    problem: str
    """The mistake's short name for counting, such as `broken_json`."""


@dataclass(frozen=True)
class RawCall:
    """One tool call as written: its function's name and its arguments, both unchecked."""

    name: object
    arguments: object


def read_hermes_calls(reply: str) -> list[RawCall] | UnusableCall:
    """Return the calls in a reply of the hermes format (`<tool_call>{...}</tool_call>`), thoughts left out.

    verl's own parser only logs a call that it can't decode and goes on without it, so the policy would never learn
    what was wrong (https://github.com/verl-project/verl/issues/7177).
    """
    text = _CLOSED_THOUGHT.sub("", reply)
    bodies = _CALL_TAG.findall(text)
    if not bodies:
        if "<tool_call>" in text:
            return UnusableCall("The tool call has no closing tag. Write a shorter call.", "unclosed_call")
        return no_call()
    calls = []
    for body in bodies:
        call = _read_call_body(body)
        if isinstance(call, UnusableCall):
            return call
        calls.append(call)
    return calls


def no_call() -> UnusableCall:
    """Return the answer to a reply without a tool call.

    Free of markup: every text shown to the policy goes through `observations.defuse_markup`, which would spoil it, and
    other chat templates than hermes have other tags.
    """
    return UnusableCall(f"There was no tool call. Call the tool in every turn, like {_EXAMPLE}.", "no_call")


def _read_call_body(body: str) -> RawCall | UnusableCall:
    text = body.strip()
    try:
        call, end = json.JSONDecoder().raw_decode(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        return UnusableCall(f"The tool call is not valid JSON ({reason}). Write it like {_EXAMPLE}.", "broken_json")
    if text[end:].strip():
        return UnusableCall("The tool call holds more than one JSON object. Make exactly one call.", "two_objects")
    if not isinstance(call, dict) or "name" not in call or "arguments" not in call:
        return UnusableCall(f"The tool call needs the keys name and arguments, like {_EXAMPLE}.", "wrong_keys")
    return RawCall(call["name"], call["arguments"])


def to_action(call: RawCall, elements: list[Element]) -> BrowserAction | UnusableCall:
    """Return the action that a call asks for, its element resolved on the last observation, or what is wrong with it.

    Args:
        call: the call as written; `arguments` may be a JSON text, as some formats have it.
        elements: the elements of the last observation that was shown, in the server's order.
    """
    if call.name != TOOL_NAME:
        return UnusableCall(f"There is no tool {_show(call.name)}. The only tool is browser.", "unknown_tool")
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            return UnusableCall(f"The arguments are not valid JSON. Write the call like {_EXAMPLE}.", "broken_json")
    if not isinstance(arguments, dict):
        return UnusableCall(f"The arguments must be a JSON object, like {_EXAMPLE}.", "arguments_not_object")
    action = arguments.get("action")
    readers = {
        ActionName.OBSERVE: lambda: BrowserAction(ActionName.OBSERVE),
        ActionName.NAVIGATE: lambda: _navigate(arguments),
        ActionName.CLICK: lambda: _click(arguments, elements),
        ActionName.TYPE: lambda: _type(arguments, elements),
        ActionName.FINISH: lambda: _finish(arguments),
    }
    if not isinstance(action, str) or action not in readers:
        found = "is missing" if "action" not in arguments else f"{_show(action)} is unknown"
        return UnusableCall(f"The argument action {found}. Use one of {_ACTIONS}.", "unknown_action")
    return readers[ActionName(action)]()


def _navigate(arguments: dict) -> BrowserAction | UnusableCall:
    url = arguments.get("url")
    if not isinstance(url, str) or not url.strip():
        return UnusableCall("navigate needs url, a text such as https://example.org.", "bad_argument")
    url = url.strip()
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        # The server would open file:// and chrome:// pages: its own files, and pages that crash the browser.
        message = f"navigate can't open {_show(url)}. url must begin with http:// or https://."
        return UnusableCall(message, "bad_address")
    return BrowserAction(ActionName.NAVIGATE, url=url)


def _click(arguments: dict, elements: list[Element]) -> BrowserAction | UnusableCall:
    element_id = _element_id(arguments, elements, ActionName.CLICK)
    if isinstance(element_id, UnusableCall):
        return element_id
    return BrowserAction(ActionName.CLICK, element_id=element_id)


def _type(arguments: dict, elements: list[Element]) -> BrowserAction | UnusableCall:
    element_id = _element_id(arguments, elements, ActionName.TYPE)
    if isinstance(element_id, UnusableCall):
        return element_id
    text = arguments.get("text")
    if not isinstance(text, str):
        return UnusableCall("type needs text, the text to put into the element.", "bad_argument")
    return BrowserAction(ActionName.TYPE, element_id=element_id, text=text)


def _finish(arguments: dict) -> BrowserAction | UnusableCall:
    answer = arguments.get("answer", "")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is None:
        answer = ""
    if not isinstance(answer, str):
        return UnusableCall("finish needs answer as a text, or no answer at all.", "bad_argument")
    return BrowserAction(ActionName.FINISH, answer=answer)


def _element_id(arguments: dict, elements: list[Element], action: ActionName) -> int | UnusableCall:
    reference = arguments.get("element")
    if isinstance(reference, bool) or not isinstance(reference, int | str) or reference == "":
        return UnusableCall(f"{action} needs element, an element's visible label or its number.", "bad_argument")
    found = find_element(elements, reference)
    if isinstance(found, str):
        return UnusableCall(found, "bad_element")
    return found.id


def _show(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"'{text[:60]}'" if len(text) <= 60 else f"'{text[:57]}...'"
