"""NeMo Gym rollout rows as this recipe reads them: JSON Lines in, checked `BrowserRow`s or all their faults out.

A row is one JSON object on one line. What is read of it:

    responses_create_params.input     the task: one user message (or a plain string), optionally after a system message
    responses_create_params.tools     function tools; the released server's five, this recipe's `browser`, or none
    responses_create_params.metadata  str -> str; `task_id` or `id`, `data_source`, `taskset` or
                                      `web_name`, `split`, `scored_by` and `reference_answer` are used
    initial_url                       http(s) address, or a page that the released server ships (`site/...`)
    verifier_metadata                 the scoring spec: exactly one of SCORING_KEYS; absent: the judge scores the task

Everything else (`agent_ref`, `task_source`, sampling parameters, a task's own notes) is another program's and is left
alone. `gym dataset collate` only counts bad rows and neither names them nor stops, so rows are checked here.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from browser_prompts import SYSTEM_PROMPT
from row_faults import RepeatedKey, Report, RowProblem, RowsError, absent_or, json_kind, no_repeated_keys, shown
from row_scoring import SCORING_KEYS, Scoring, scoring_of

__all__ = ["SCORING_KEYS", "SERVER_TOOLS", "BrowserRow", "FileRows", "RowProblem", "RowsError", "Scoring"]
__all__ += ["read_file", "read_rows", "start_page_problem"]

SERVER_TOOLS = frozenset({"browser_observe", "browser_navigate", "browser_click", "browser_type", "browser_finish"})
"""The released server's five tools. A system prompt written for them speaks of tools that the policy does not have."""

POLICY_TOOL = "browser"


@dataclass(frozen=True)
class BrowserRow:
    """One checked task."""

    file: str
    line: int
    task: str
    """The user's words, unchanged."""
    system_prompt: str
    initial_url: str
    scoring: Scoring
    task_id: str
    """From the metadata, else `<file name>:<line>`."""
    data_source: str
    """Name under which validation metrics are kept: from the metadata, else the start page's host, else `site`."""
    split: str
    """From the metadata, else empty."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """A fresh list of the chat messages that open the prompt: system, then the task."""
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": self.task}]

    @property
    def verifier_metadata(self) -> Mapping[str, str]:
        """The scoring spec as the server takes it; empty for a judged task."""
        return MappingProxyType(self.scoring.spec)


@dataclass(frozen=True)
class FileRows:
    """What one file holds."""

    file: str
    rows: tuple[BrowserRow, ...]
    problems: tuple[RowProblem, ...]

    @property
    def scored_by(self) -> dict[str, int]:
        """Number of good rows by scoring key, or `judge`."""
        return dict(sorted(Counter(row.scoring.scored_by for row in self.rows).items()))

    @property
    def data_sources(self) -> dict[str, int]:
        """Number of good rows by data source."""
        return dict(sorted(Counter(row.data_source for row in self.rows).items()))


def read_rows(paths: Iterable[str | Path]) -> tuple[BrowserRow, ...]:
    """Return the rows of all files, in order. Raises RowsError with every fault of every file."""
    files = [read_file(path) for path in paths]
    problems = tuple(problem for file in files for problem in file.problems)
    if problems:
        raise RowsError(problems)
    return tuple(row for file in files for row in file.rows)


def read_file(path: str | Path) -> FileRows:
    """Return the good rows and the faults of one JSON Lines file.

    A byte order mark, CRLF line ends, blank lines and a missing final newline are no faults.
    """
    name, rows, problems = str(path), [], []
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as e:
        return FileRows(name, (), (RowProblem(name, None, "", f"cannot be read ({e.strerror})", "check the path"),))
    # Split at newline bytes only: str.splitlines would also cut at U+2028 inside a JSON string.
    for number, raw in enumerate(data.split(b"\n"), start=1):

        def report(key: str, reason: str, fix: str, number: int = number) -> None:
            problems.append(RowProblem(name, number, key, reason, fix))

        obj = _json_object(raw, report)
        row = None if obj is None else _row(obj, name, number, report)
        if row is not None:
            rows.append(row)
    if not rows and not problems:
        problems.append(RowProblem(name, None, "", "holds no row", "give a JSON Lines file, one task an object a line"))
    return FileRows(name, tuple(rows), tuple(problems))


def _json_object(raw: bytes, report: Report) -> dict[str, Any] | None:
    """Return the object of one line, or None for a blank or a faulty line."""
    try:
        text = raw.decode("utf-8-sig").strip()  # -sig: a byte order mark also stands mid-file after `cat a b`
    except UnicodeDecodeError as e:
        report("", f"is not UTF-8 (byte {e.start + 1} of the line)", "save the file as UTF-8")
        return None
    if not text:
        return None
    try:
        obj = json.loads(text, object_pairs_hook=no_repeated_keys)
        if "\\ud" in text.lower():
            json.dumps(obj, ensure_ascii=False).encode()
    except RepeatedKey as e:
        report(e.args[0], "stands twice in one object", "keep one of them")
        return None
    except UnicodeEncodeError:
        report("", "escapes half of a surrogate pair, which no tokenizer takes", "write the whole character")
        return None
    except (ValueError, RecursionError) as e:  # ValueError: no JSON, or a number of thousands of digits
        report("", f"is not JSON ({e})", "write each task as one JSON object on one line")
        return None
    if not isinstance(obj, dict):
        report("", f"is a JSON {json_kind(obj)}, not an object", "write each task as one JSON object on one line")
        return None
    return obj


def _row(obj: dict[str, Any], file: str, line: int, report: Report) -> BrowserRow | None:
    """Return the checked row, or None after reporting all its faults."""
    faults = 0

    def counted(key: str, reason: str, fix: str) -> None:
        nonlocal faults
        faults += 1
        report(key, reason, fix)

    params = obj.get("responses_create_params")
    if not isinstance(params, dict):
        counted("responses_create_params", absent_or(obj, "responses_create_params", "an object"), "add it")
        params = None
    system = task = None
    metadata: dict[str, str] = {}
    if params is not None:
        system, task = _messages(params, counted)
        if _tool_names(params, counted) & SERVER_TOOLS:
            system = None
        metadata = _metadata(params, counted)
    initial_url = _initial_url(obj, counted)
    scoring = scoring_of(obj, metadata, counted)
    if faults:
        return None
    return BrowserRow(
        file=file,
        line=line,
        task=task,
        system_prompt=SYSTEM_PROMPT if system is None else system,
        initial_url=initial_url,
        scoring=scoring,
        task_id=metadata.get("task_id") or metadata.get("id") or f"{Path(file).name}:{line}",
        data_source=_data_source(metadata, initial_url),
        split=metadata.get("split", ""),
    )


def _messages(params: dict[str, Any], report: Report) -> tuple[str | None, str | None]:
    """Return the row's own system message (None when it has none) and its task."""
    key = "responses_create_params.input"
    given = params.get("input")
    if params.get("instructions"):
        report("responses_create_params.instructions", "is not read", f"put it into a system message of {key}")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        report(key, absent_or(params, "input", "a list of messages"), "give one user message that states the task")
        return None, None
    roles = [m.get("role") if isinstance(m, dict) else None for m in given]
    if [r for r in roles if r not in ("system", "developer")] != ["user"] or roles[-1] != "user" or len(roles) > 2:
        want = "the episode opens with at most one system message and then exactly one user message"
        report(key, f"has the roles {shown(roles)}; {want}", "merge or drop the other messages")
        return None, None
    texts = [_text(m, f"{key}[{i}].content", report) for i, m in enumerate(given)]
    return (texts[0] if len(texts) == 2 else None), texts[-1]


def _text(message: dict[str, Any], key: str, report: Report) -> str | None:
    """Return the text of a message's content, which is a string or a list of text parts."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") in ("input_text", "text")]
        if len(parts) < len(content) or not all(isinstance(part, str) for part in parts):
            report(key, "has a part that is not text", "give text only: the policy sees pages as text")
            return None
        content = "".join(parts)
    if not isinstance(content, str) or not content.strip():
        report(key, absent_or(message, "content", "text that is not blank"), "write the text, or drop the row")
        return None
    return content


def _tool_names(params: dict[str, Any], report: Report) -> set[str]:
    """Return the names of the row's function tools, reporting those that no policy of this recipe has."""
    key = "responses_create_params.tools"
    tools = params.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        report(key, f"is {shown(tools)}, not a list of function tools", "correct it, or drop the key")
        return set()
    # The chat-completions form keeps the name one level lower.
    functions = [t["function"] if isinstance(t.get("function"), dict) else t for t in tools]
    names = {str(f.get("name")) for f in functions}
    others = sorted(names - SERVER_TOOLS - {POLICY_TOOL})
    if others:
        report(key, f"names {shown(others)}, which the policy does not have", "drop them: its one tool is `browser`")
    return names


def _metadata(params: dict[str, Any], report: Report) -> dict[str, str]:
    metadata = params.get("metadata") or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        key = "responses_create_params.metadata"
        report(key, f"is {shown(metadata)}, not an object of strings", "write every value as a string")
        return {}
    return metadata


def _data_source(metadata: dict[str, str], initial_url: str) -> str:
    named = next((metadata[k] for k in ("data_source", "taskset", "web_name") if metadata.get(k)), None)
    return named or urlsplit(initial_url).hostname or "site"


def _initial_url(obj: dict[str, Any], report: Report) -> str | None:
    key, url = "initial_url", obj.get("initial_url")
    if not isinstance(url, str) or not url.strip():
        report(key, absent_or(obj, key, "an address"), "name the task's start page, https://... (about:blank is none)")
        return None
    problem = start_page_problem(url)
    if problem:
        report(key, *problem)
    return url


def start_page_problem(url: str) -> tuple[str, str] | None:
    """Return why no episode should start at this address, and the fix; None for a usable start page."""
    if re.search(r"[\s\x00-\x1f]", url):
        return f"{shown(url)} holds white space", "drop it, or write %20"
    if re.match(r"https?:", url):
        try:
            parts = urlsplit(url)
            usable = parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:  # a broken bracket or port
            usable = False
        return None if usable else (f"{shown(url)} names no usable host", "write https://HOST/PATH")
    # Any other text without a scheme is a file beside the server's code (its data among them), and a forgotten
    # https:// would only show as a failed seed on a node that is already paid for.
    if url.startswith("site/") and ".." not in url.split("/"):
        return None
    fix = "write https://HOST/PATH, or site/PAGE.html for a page that the released server ships"
    return f"{shown(url)} is neither an http(s) address nor a page of the server's site/ folder", fix
