"""What the policy sees of a page: the server's observation text, its elements, and the cut to a token budget."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

_ELEMENT_LINE = re.compile(r"^  \[(\d+)\] (\S+): ?(.*)$")
_MARKUP = re.compile(r"^<\S+>$")
_MAX_SUGGESTIONS = 6


@dataclass(frozen=True)
class Element:
    """One numbered line of an observation, such as `  [3] a: Next page`."""

    id: int
    """The number that the environment knows it by, until the next observation."""
    kind: str
    """The HTML tag: `a`, `button`, `input`, `textarea`, ..."""
    label: str
    """The visible text, or the `value` attribute, whitespace collapsed, at most 80 characters; may be empty."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that cutting needs."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def read_elements(observation: str) -> list[Element]:
    """Return the elements that an observation lists, in order; an observation without the section has none."""
    lines = iter(observation.split("\n"))
    for line in lines:
        if line == "ELEMENTS:":
            break
    elements = []
    for line in lines:
        match = _ELEMENT_LINE.match(line)
        if match is None:
            break
        elements.append(Element(int(match[1]), match[2], match[3]))
    return elements


def find_element(elements: list[Element], reference: int | str) -> Element | str:
    """Return the element that a reference names, or a sentence for the policy that says why none does.

    A number (or its digits, unless a label reads so) is an element's number. A text is, in this order: the label of
    exactly one element, compared without case and with whitespace collapsed; the kind of the only unlabelled element
    of that kind (a search box has no visible label, so `input` names it).
    """
    if isinstance(reference, int):
        return _by_number(elements, reference)
    wanted = _fold(reference)
    labelled = [e for e in elements if e.label and _fold(e.label) == wanted]
    if len(labelled) == 1:
        return labelled[0]
    if len(labelled) > 1:
        return _ambiguous(f"labelled '{reference}'", labelled)
    unlabelled = [e for e in elements if not e.label and e.kind == wanted]
    if len(unlabelled) == 1:
        return unlabelled[0]
    if len(unlabelled) > 1:
        return _ambiguous(f"of kind '{reference}' without a label", unlabelled)
    if wanted.isdecimal() and len(wanted) < 6:
        return _by_number(elements, int(wanted))
    return f"No element is labelled '{reference[:60]}'. {_what_there_is(elements)}"


def cut_to_tokens(text: str, tokenizer: Tokenizer, max_tokens: int) -> str:
    """Return the text, or its beginning and a visible mark that says how much is shown, at most max_tokens tokens long.

    Characters are no measure of a context budget: 2,000 characters are 500 tokens of English or 2,000 of base64.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) <= max_tokens:
        return text
    keep = max_tokens
    while keep > 0:
        mark = f"\n[cut at {keep} of {len(ids)} tokens]"
        # A cut inside a character decodes to U+FFFD.
        candidate = tokenizer.decode(ids[:keep]).rstrip("\ufffd") + mark
        excess = len(tokenizer.encode(candidate, add_special_tokens=False)) - max_tokens
        if excess <= 0:
            return candidate
        keep -= excess
    return ""


def defuse_markup(text: str, added_tokens: Iterable[str]) -> str:
    """Return page text in which no chat-template token is left whole, so that a page can't speak as the chat template.

    `<|im_end|>` or `</tool_response>` in a page would be encoded as the one control token.
    """
    for token in added_tokens:
        if token in text and _MARKUP.match(token):
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _by_number(elements: list[Element], number: int) -> Element | str:
    for element in elements:
        if element.id == number:
            return element
    return f"There is no element {number} in the last observation. {_what_there_is(elements)}"


def _what_there_is(elements: list[Element]) -> str:
    if not elements:
        return "It has no elements."
    return "It has: " + _enumerate(elements, lambda e: f"[{e.id}] {e.label or e.kind}")


def _ambiguous(what: str, elements: list[Element]) -> str:
    return f"Several elements are {what}. Use a number: " + _enumerate(elements, lambda e: f"{e.id}")


def _enumerate(elements: list[Element], show: Callable[[Element], str]) -> str:
    shown = ", ".join(show(e) for e in elements[:_MAX_SUGGESTIONS])
    return f"{shown}, ..." if len(elements) > _MAX_SUGGESTIONS else f"{shown}."


def _fold(text: str) -> str:
    return " ".join(text.split()).casefold()
