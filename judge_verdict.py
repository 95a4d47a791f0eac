"""What a judge's reply says: success, failure, or nothing that can be used.

A reply is usable when it finished by itself and holds exactly one distinct verdict in one of three forms: the JSON
object that was asked for, one `Verdict:` line, or a bare label. Everything else is unusable and never a reward, since a
guess errs in both directions: NOT SUCCESS holds the word SUCCESS, and a judge that quotes a page quotes what the page
says about verdicts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from failure_symptoms import FailureKind

__all__ = ["FailureKind", "Outcome", "Verdict", "read_verdict", "unusable"]

_SHOWN_CHARS = 200
"""Characters of an unusable reply that its reason repeats."""


class Outcome(StrEnum):
    """What a reply comes to."""

    SUCCESS = "success"
    FAILURE = "failure"
    UNUSABLE = "unusable"


LABELS = {
    "SUCCESS": Outcome.SUCCESS,
    "NOT SUCCESS": Outcome.FAILURE,
    "UNSUCCESSFUL": Outcome.FAILURE,
    "FAILURE": Outcome.FAILURE,
}
"""The words that are read as a verdict, in any case; no other word is."""


@dataclass(frozen=True)
class Verdict:
    """What one reply, or the majority of several, says."""

    outcome: Outcome
    reason: str
    """The judge's own words; for an unusable reply, what is wrong with it."""
    kind: FailureKind | None = None
    """Set exactly when the outcome is UNUSABLE."""

    def __post_init__(self) -> None:
        if (self.kind is not None) != (self.outcome is Outcome.UNUSABLE):
            raise ValueError(f"a verdict of outcome {self.outcome} with kind {self.kind}: only UNUSABLE has a kind")


def unusable(kind: FailureKind, reason: str) -> Verdict:
    """Return the verdict of a reply, or of a call, that says nothing."""
    return Verdict(Outcome.UNUSABLE, reason, kind)


def read_verdict(choice: Mapping[str, Any]) -> Verdict:
    """Return what one choice of a chat completion says; takes any input and never raises."""
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(message, Mapping):
        return unusable(FailureKind.JUDGE_UNPARSEABLE, "the answer holds no message")
    finish, content, refusal = choice.get("finish_reason"), message.get("content"), message.get("refusal")
    if refusal:
        return unusable(FailureKind.JUDGE_REFUSED, f"the judge refused: {_shown(refusal)}")
    if finish == "content_filter":
        return unusable(FailureKind.JUDGE_REFUSED, "a content filter stopped the reply")
    if finish == "length":
        return unusable(FailureKind.JUDGE_TRUNCATED, f"the reply was cut by a length limit: {_shown(content)}")
    if finish != "stop":
        return unusable(FailureKind.JUDGE_UNPARSEABLE, f"the reply did not finish: finish_reason is {_shown(finish)}")
    if content is None or content == "" or (isinstance(content, str) and not content.strip()):
        elsewhere = any(message.get(key) for key in ("reasoning", "reasoning_content"))
        where = "; there is only reasoning, which is no verdict" if elsewhere else ""
        return unusable(FailureKind.JUDGE_UNPARSEABLE, f"the reply is empty{where}")
    if not isinstance(content, str):
        return unusable(FailureKind.JUDGE_UNPARSEABLE, f"the reply is no text: {_shown(content)}")
    return _read_text(content)


def _shown(value: object) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except RecursionError:
        text = f"a nested {type(value).__name__}"
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]} [...]"


def _unparseable(problem: str, text: str) -> Verdict:
    return unusable(FailureKind.JUDGE_UNPARSEABLE, f"{problem}: {_shown(text)}")


_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE | re.ASCII)
_LEADING_THINK = re.compile(r"\s*<think(?:ing)?>", re.IGNORECASE | re.ASCII)
_FENCE_START = re.compile(r"(`{3,}|~{3,})[ \t]*(?:\w*[ \t]*\r?\n|json\b)", re.IGNORECASE)
_LINE_BREAK = re.compile(r"\r\n|\r|\n")


def _read_text(content: str) -> Verdict:
    """Return what the text of a finished reply says."""
    text = _without_leading_thoughts(content)
    if text is None:
        return _unparseable("a thought that does not end", content)
    said = _json_verdict(text)
    if said is not None:
        return said
    # Only now, since the reason in a JSON verdict may quote such a tag.
    text = _without_thoughts(text)
    if text is None:
        return _unparseable("a thought that does not end, or an end without a beginning", content)
    said = _json_verdict(text)
    if said is not None:
        return said
    text = _unfenced(text)
    label = _label(text)
    if label is not None:
        return Verdict(label, "")
    return _line_verdict(text)


def _without_leading_thoughts(text: str) -> str | None:
    """Return the text after the `<think>` blocks that it begins with; None when one of them does not end."""
    while _LEADING_THINK.match(text):
        depth = 0
        for tag in _THINK.finditer(text):
            depth += -1 if tag[1] else 1
            if depth == 0:
                text = text[tag.end() :]
                break
        else:
            return None
    return text


def _without_thoughts(text: str) -> str | None:
    """Return the text outside of `<think>` blocks; None when they don't balance."""
    kept, depth, start = [], 0, 0
    for tag in _THINK.finditer(text):
        if depth == 0:
            kept.append(text[start : tag.start()])
        depth += -1 if tag[1] else 1
        if depth < 0:
            return None
        start = tag.end()
    return None if depth else "".join(kept) + text[start:]


def _unfenced(text: str, nested: bool = False) -> str:
    """Return what stands inside the one Markdown fence around the whole text, or the text itself.

    A fence inside of it means two blocks with prose between them, unless `nested` says that this does not matter.
    """
    text = text.strip()
    start = _FENCE_START.match(text)
    if start is None or not text.endswith(start[1]) or len(text) < start.end() + len(start[1]):
        return text
    inner = text[start.end() : -len(start[1])]
    return inner if nested or start[1] not in inner else text


class _Twice(ValueError):
    """A key that an object holds twice."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {key.casefold(): value for key, value in pairs}
    if len(found) != len(pairs):
        raise _Twice
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs)


def _json_verdict(text: str) -> Verdict | None:
    """Return what a text that is one JSON value, perhaps in a fence, says; None when it is no JSON."""
    try:
        value = _DECODER.decode(_unfenced(text, nested=True).strip())
    except _Twice:
        return _unparseable("a key that stands twice in the JSON", text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, str):
        return None  # a label in quotes
    if not isinstance(value, dict) or set(value) != {"reason", "verdict"} or not isinstance(value["reason"], str):
        return _unparseable('not the JSON that was asked for, {"reason": text, "verdict": label}', text)
    label = _label(value["verdict"]) if isinstance(value["verdict"], str) else None
    if label is None:
        return _unparseable("a verdict that is neither SUCCESS nor NOT SUCCESS", text)
    return Verdict(label, value["reason"])


_MARKUP = r"\s*_`~#\"'“”‘’«»"
_LONGEST_LABEL = 100
"""Characters, with markup; the pattern's time grows with their square."""
_LABEL = re.compile(rf"[{_MARKUP}]*(?P<label>[A-Za-z]+(?:\s+[A-Za-z]+)?)[{_MARKUP}]*[.!,;]*[{_MARKUP}]*", re.ASCII)


def _label(text: str) -> Outcome | None:
    """Return what a text says that is a label and nothing else but markup, quotes and a final punctuation mark."""
    text = text.strip()
    match = _LABEL.fullmatch(text) if len(text) <= _LONGEST_LABEL else None
    return None if match is None else LABELS.get(" ".join(match["label"].upper().split()))


_VERDICT_LINE = re.compile(r" {0,3}(?:[-*+] +|#+ *)?[*_]*verdict[*_]*\s*:(?P<label>.*)", re.IGNORECASE | re.ASCII)
_FENCE_LINE = re.compile(r" {0,3}(`{3,}|~{3,})")


def _line_verdict(text: str) -> Verdict:
    """Return what the `Verdict:` lines of prose say, and JSON verdicts among them, if they agree."""
    found: set[Outcome] = set()
    prose = []
    for line, own_words in _lines(text):
        match = _VERDICT_LINE.fullmatch(line) if own_words else None
        if match is None:
            prose.append(line)
            continue
        label = _label(match["label"])
        if label is None:
            return _unparseable("a verdict line that says neither SUCCESS nor NOT SUCCESS", text)
        found.add(label)
    if not found:
        return _unparseable("no verdict", text)
    if len(found | _json_outcomes(text)) > 1:
        return _unparseable("verdicts that differ", text)
    return Verdict(found.pop(), " ".join(" ".join(prose).split()))


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it begins in the judge's own words: in no quotation, code block or blockquote."""
    fence, open_quotes = "", frozenset()
    for line in _LINE_BREAK.split(text):
        mark = _FENCE_LINE.match(line)
        if fence or mark:
            yield line, False
            if not fence:
                fence = mark[1]
            elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            continue
        yield line, not open_quotes
        open_quotes = _open_quotes(line, open_quotes)


_QUOTES = {'"': '"', "`": "`", **dict.fromkeys("„“”", "“"), **dict.fromkeys("«»", "«"), **dict.fromkeys("「」", "「")}
"""Quotation marks by family: German and Swedish begin a quotation with what ends one in English."""
_SINGLE_QUOTES = "'‘’"


def _open_quotes(line: str, opened: frozenset[str]) -> frozenset[str]:
    """Return the families of quotation marks that are open after a line.

    A mark right after a letter or digit opens nothing (5", users'); one right before them closes no single quotation.
    """
    for before, char, after in zip(f" {line}", line, f"{line[1:]} ", strict=False):
        family = "'" if char in _SINGLE_QUOTES else _QUOTES.get(char)
        if family is None:
            continue
        if family in opened:
            opened -= {family} if family != "'" or not after.isalnum() else frozenset()
        elif not before.isalnum() and (family != "'" or after.isalnum()):
            opened |= {family}
    return opened


def _json_outcomes(text: str) -> set[Outcome]:
    """Return what the JSON verdicts say that begin a line of the text, quoted or not; UNUSABLE for no known label."""
    found = set()
    for match in re.finditer(r"^[ \t]*(?=\{)", text, re.MULTILINE):
        try:
            value, _ = _DECODER.raw_decode(text, match.end())
        except _Twice:
            found.add(Outcome.UNUSABLE)
        except (ValueError, RecursionError):
            continue  # no JSON: prose that begins with a brace
        else:
            if "verdict" in value:
                said = value["verdict"]
                found.add((_label(said) if isinstance(said, str) else None) or Outcome.UNUSABLE)
    return found
