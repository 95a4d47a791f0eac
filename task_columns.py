"""Columns of a task list as one `Task`: which column holds what under its many names, and what a task must have.

Every role has several names, COLUMNS; a flag names another column in their place. Two names of one role with different
values are a fault, not a choice. A column that is null or blank counts as absent. A role that no column fills is looked
up in the object that a `metadata` column may hold as JSON or as a Python literal.
"""

import ast
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from rollout_rows import start_page_problem
from row_faults import RowProblem
from task_lists import RawTask


class Role(StrEnum):
    """What a column can hold."""

    QUESTION = "question"
    URL = "url"
    ID = "id"
    SITE = "site"
    ANSWER = "answer"


COLUMNS: Mapping[Role, tuple[str, ...]] = MappingProxyType(
    {
        Role.QUESTION: ("ques", "question", "task", "confirmed_task", "intent"),
        Role.URL: ("web", "website", "start_url", "initial_url"),
        Role.ID: ("id", "task_id"),
        Role.SITE: ("web_name", "site"),
        Role.ANSWER: ("Final answer",),
    }
)
"""Names of each role's column: WebVoyager's, Online-Mind2Web's, WebArena's, GAIA's, and this recipe's own."""

METADATA = "metadata"
MAX_QUESTION_CHARS = 100_000
"""Longest question taken: more is a page or a log that slipped into the column, and no context holds it."""
MAX_METADATA_CHARS = 100_000

_APPENDED_URL = re.compile(r"\s{1,10}Use\s{1,3}<?(?P<url>https?://[^\s<>]+?)>?\.?\s*\Z")


class Edit(StrEnum):
    """What a task did not have like this in its list."""

    STRIPPED_SPACE = "white space dropped at an end of the question"
    MADE_ID = "id made from site, question and start page"
    SITE_FROM_HOST = "site named after the start page's host"
    START_PAGE_FROM_TEXT = "start page taken from the address appended to the question"
    STRIPPED_URL = "appended address dropped from the question"


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a list."""

    task_id: str
    site: str
    question: str
    url: str
    """The start page."""
    answer: str | None
    """Reference answer; None when the list has none."""
    file: str
    line: int
    edits: tuple[Edit, ...] = ()

    @property
    def content(self) -> tuple[str, str]:
        """What the policy is given: two tasks alike in it are one task."""
        return self.question, self.url


@dataclass(frozen=True)
class ColumnChoice:
    """How to read columns, as the command line says."""

    named: Mapping[Role, str] = field(default_factory=dict)
    """Columns that flags name, in place of COLUMNS."""
    make_ids: bool = False
    strip_appended_url: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Every column that may be read."""
        return frozenset([*(n for names in COLUMNS.values() for n in names), *self.named.values(), METADATA])


class _Faulty(Exception):
    """A task with a fault. args: key, reason, fix."""


def read_task(raw: RawTask, choice: ColumnChoice) -> Task | tuple[RowProblem, ...]:
    """Return the task, or all its faults."""
    problems: list[RowProblem] = []

    def tried(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except _Faulty as e:
            problems.append(raw.problem(*e.args))
            return None

    values: dict[Role, str | None] = {role: tried(lambda role=role: _value(raw.columns, role, choice)) for role in Role}
    if problems:
        return tuple(problems)
    edits: list[Edit] = []
    question = tried(lambda: _question(values[Role.QUESTION], raw.columns, choice, edits))
    url = question and tried(lambda: _url(values[Role.URL], question, raw.columns, choice, edits))
    if url and choice.strip_appended_url:
        question = _without_appended_url(question, url, edits)
        if not question:
            problems.append(raw.problem(Role.QUESTION, "holds nothing but an address", "write the task"))
    site = values[Role.SITE]
    if url and site is None:
        site = urlsplit(url).hostname or "site"
        edits.append(Edit.SITE_FROM_HOST)
    task_id = values[Role.ID]
    if task_id is None and not choice.make_ids:
        names = _names(Role.ID, choice)
        problems.append(raw.problem(_named(names), "is missing", "name the column with --id-column, or --make-ids"))
    if problems:
        return tuple(problems)
    if task_id is None:
        task_id = f"{site}--{hashlib.sha256(json.dumps([site, question, url]).encode()).hexdigest()[:16]}"
        edits.append(Edit.MADE_ID)
    # Lists name the same site and page on hundreds of tasks; one string each keeps a long list in memory.
    site, url = sys.intern(site), sys.intern(url)
    return Task(task_id, site, question, url, values[Role.ANSWER], raw.file, raw.line, tuple(edits))


def _names(role: Role, choice: ColumnChoice) -> tuple[str, ...]:
    return (choice.named[role],) if role in choice.named else COLUMNS[role]


def _named(names: tuple[str, ...]) -> str:
    return "|".join(names)


def _flag(role: Role) -> str:
    return "drop one of them" if role is Role.ANSWER else f"say which one with --{role}-column"


def _value(columns: Mapping[str, Any], role: Role, choice: ColumnChoice) -> str | None:
    """Return the role's text, None when there is none. Raises _Faulty for a value that is no text, or two values."""
    names = _names(role, choice)
    found = _found(columns, names, role)
    if not found and columns.get(METADATA) is not None:
        found = _found(_metadata(columns[METADATA]), names, role)
    if len(set(found.values())) > 1:
        (one, first), (two, second) = list(found.items())[:2]
        raise _Faulty(f"{one}, {two}", f"differ ({_short(first)} and {_short(second)})", _flag(role))
    return next(iter(found.values()), None)


def _found(columns: Mapping[str, Any], names: tuple[str, ...], role: Role) -> dict[str, str]:
    found = {}
    for name in names:
        value = columns.get(name)
        if role is Role.ID and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        if not isinstance(value, str):
            raise _Faulty(name, f"is {_short(value)}, not text", "write it as text")
        if not _encodable(value):
            raise _Faulty(name, "holds half of a surrogate pair", "write the whole character")
        if role is not Role.QUESTION and role is not Role.ANSWER and value != value.strip():
            raise _Faulty(name, f"{_short(value)} has white space at an end", "drop it in the list")
        found[name] = value
    return found


def _metadata(value: Any) -> Mapping[str, Any]:
    """Return the object in a `metadata` column; an empty one for text that does not begin like an object."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return {}
    fix = "write a JSON object or a Python dict, or name the columns with flags"
    if len(value) > MAX_METADATA_CHARS:
        raise _Faulty(METADATA, f"has {len(value)} characters, more than {MAX_METADATA_CHARS}", fix)
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the literal's unknown escapes; its text is not ours to correct
                read = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as e:
            raise _Faulty(METADATA, f"is no object that can be read ({type(e).__name__})", fix) from None
    if not isinstance(read, dict):
        raise _Faulty(METADATA, f"is a {type(read).__name__}, not an object", fix)
    return read


def _question(value: str | None, columns: Mapping[str, Any], choice: ColumnChoice, edits: list[Edit]) -> str:
    if value is None:
        names = _names(Role.QUESTION, choice)
        raise _Faulty(_named(names), _missing(columns, names), "write the task, or name its column: --question-column")
    if len(value) > MAX_QUESTION_CHARS:
        raise _Faulty(Role.QUESTION, f"has {len(value)} characters", f"write at most {MAX_QUESTION_CHARS}")
    stripped = value.strip()
    if stripped != value:
        edits.append(Edit.STRIPPED_SPACE)
    return stripped


def _url(value: str | None, question: str, columns: Mapping[str, Any], choice: ColumnChoice, edits: list[Edit]) -> str:
    if value is None and Role.URL not in choice.named:
        appended = _APPENDED_URL.search(question)
        if appended:
            value = appended["url"]
            edits.append(Edit.START_PAGE_FROM_TEXT)
    names = _names(Role.URL, choice)
    if value is None:
        raise _Faulty(_named(names), _missing(columns, names), "add the start page, or name its column: --url-column")
    problem = start_page_problem(value)
    if problem:
        raise _Faulty(next((name for name in names if columns.get(name) == value), Role.URL), *problem)
    return value


def _without_appended_url(question: str, url: str, edits: list[Edit]) -> str:
    """Return the question without the sentence that names the start page; unchanged when it names another page."""
    appended = _APPENDED_URL.search(question)
    if not appended or appended["url"].rstrip("/") != url.rstrip("/"):
        return question
    edits.append(Edit.STRIPPED_URL)
    return question[: appended.start()].rstrip()


def _missing(columns: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return `is blank` or `is missing`, then with the columns that there are."""
    if any(name in columns for name in names):
        return "is blank"
    there = ", ".join(str(name)[:40] for name in list(columns)[:12]) + (", ..." if len(columns) > 12 else "")
    return f"is missing (columns: {there or 'none'})"


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
