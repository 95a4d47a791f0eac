"""Task lists as their publishers ship them, read into one mapping of columns per task: files and Hugging Face datasets.

A file is JSON Lines, one JSON array, or CSV with a header. CSV is told by its name (`.csv`), the JSON forms by their
first character. A byte order mark, CRLF line ends, blank lines and a missing final newline are no faults. What cannot
be read becomes a RowProblem and the rest is read on, as far as the format lets one find where the next task begins.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from row_faults import RepeatedKey, RowProblem, json_kind, no_repeated_keys

_SHAPES = "give JSON Lines, a JSON array of objects, or a .csv file with a header"
_ONE_OBJECT = "write each task as one JSON object"


@dataclass(frozen=True, slots=True)
class RawTask:
    """One task as the list has it."""

    file: str
    """The file as the caller named it, or `NAME[SPLIT]` of a dataset."""
    line: int
    """The line on which it starts, from 1; of a dataset, the row, from 1."""
    element: int | None
    """Index in its JSON array; None in the other forms."""
    columns: Mapping[str, Any]

    def problem(self, key: str, reason: str, fix: str) -> RowProblem:
        """Return a fault of this task."""
        return RowProblem(self.file, self.line, _element_key(self.element, key), reason, fix)


@dataclass(frozen=True)
class FileProblem(RowProblem):
    """A fault that keeps its file, or what stands behind it in the file, from being read."""


class ListError(Exception):
    """A dataset that cannot be loaded. args: the message."""


def _element_key(element: int | None, key: str) -> str:
    """Return the key, behind the index of the array's element when there is one."""
    return key if element is None else f"[{element}]{'.' + key if key else ''}"


def read_list(path: str) -> Iterator[RawTask | RowProblem]:
    """Yield the tasks and faults of one file, in its order."""
    try:
        if not Path(path).expanduser().is_file():
            reason = "is a folder" if Path(path).expanduser().is_dir() else "does not exist"
            yield FileProblem(path, None, "", reason, "name a file; a folder of a dataset goes to --dataset")
            return
        with open(Path(path).expanduser(), "rb") as file:
            yield from _read_open(path, file)
    except OSError as e:
        yield FileProblem(path, None, "", f"cannot be read ({e.strerror})", "check the path")
    except ValueError as e:  # a NUL byte in the path
        yield FileProblem(path, None, "", f"cannot be read ({e})", "check the path")


def _read_open(path: str, file: BinaryIO) -> Iterator[RawTask | RowProblem]:
    head = file.read(4096)
    file.seek(0)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        yield FileProblem(path, None, "", "is UTF-16", "save the file as UTF-8")
    elif head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"PAR1", b"BZh", b"\xfd7zXZ")):
        yield FileProblem(path, None, "", "is compressed or binary", f"unpack it; {_SHAPES}, or use --dataset")
    elif path.lower().endswith(".csv"):
        yield from _read_csv(path, _progress(path, file))
    elif start == b"[":
        yield from _read_array(path, file.read())
    elif start == b"{":
        yield from _read_lines(path, _progress(path, file))
    elif not head.strip(b"\xef\xbb\xbf\r\n\t "):
        yield FileProblem(path, None, "", "holds no task", _SHAPES)
    else:
        yield FileProblem(path, 1, "", f"begins with {start!r}, so it is no JSON, and its name is no .csv", _SHAPES)


def _progress(path: str, file: BinaryIO) -> Iterator[bytes]:
    """Yield the file's lines, with a progress bar on stderr if that is a terminal."""
    from tqdm import tqdm

    size = file.seek(0, 2)
    file.seek(0)
    with tqdm(total=size, unit="B", unit_scale=True, desc=Path(path).name, disable=None, leave=False) as bar:
        for line in file:
            bar.update(len(line))
            yield line


def _constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is no JSON")


def json_decoder() -> json.JSONDecoder:
    """Return a decoder that refuses NaN and keys that stand twice in one object, which json.loads lets pass."""
    return json.JSONDecoder(object_pairs_hook=no_repeated_keys, parse_constant=_constant)


def json_fault(error: Exception) -> tuple[str, str]:
    """Return the reason and the fix of an error of `json_decoder`'s (ValueError, RecursionError, a repeated key)."""
    if isinstance(error, RepeatedKey):
        return f"names the key {error.args[0][:80]!r} twice in one object", "keep one of them"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON ({error.msg}: column {error.colno})", _ONE_OBJECT
    if isinstance(error, RecursionError):
        return "is nested too deeply", _ONE_OBJECT
    return f"is not usable JSON ({str(error)[:200]})", "correct the value"


def _object_problem(value: Any, text: str) -> tuple[str, str] | None:
    """Return the reason and fix when the value is no object of text that can be written again."""
    if not isinstance(value, dict):
        return f"is a JSON {json_kind(value)}, not an object", _ONE_OBJECT
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except RecursionError:
            return "is nested too deeply", _ONE_OBJECT
        except UnicodeEncodeError:
            return "escapes half of a surrogate pair, which no tokenizer takes", "write the whole character"
    return None


def _read_lines(path: str, lines: Iterable[bytes]) -> Iterator[RawTask | RowProblem]:
    decoder = json_decoder()
    for number, raw in enumerate(lines, start=1):
        try:
            text = raw.decode("utf-8-sig").strip()  # -sig: a mark also stands mid-file after `cat a b`
        except UnicodeDecodeError as e:
            yield RowProblem(path, number, "", f"is not UTF-8 (byte {e.start + 1} of the line)", "save it as UTF-8")
            continue
        if not text:
            continue
        try:
            value = decoder.decode(text)
        except (ValueError, RecursionError, RepeatedKey) as e:
            if number == 1 and text == "{":
                yield FileProblem(path, 1, "", "begins one JSON object over several lines", _SHAPES)
                return
            yield RowProblem(path, number, "", *json_fault(e))
            continue
        problem = _object_problem(value, text)
        yield RowProblem(path, number, "", *problem) if problem else RawTask(path, number, None, value)


def _read_array(path: str, data: bytes) -> Iterator[RawTask | RowProblem]:
    """Yield the elements one by one: the whole array as Python objects would take ten times the file's size."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        yield FileProblem(path, line, "", f"is not UTF-8 (byte {e.start + 1} of the file)", "save it as UTF-8")
        return
    del data
    decoder = json_decoder()
    at, line, counted, element = text.index("[") + 1, 1, 0, 0
    while True:
        at = _past_space(text, at)
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]" and element == 0:
            yield FileProblem(path, None, "", "holds no task", _SHAPES)
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError, RepeatedKey) as e:
            if isinstance(e, json.JSONDecodeError):
                line = e.lineno
            reason, fix = json_fault(e)
            yield FileProblem(path, line, f"[{element}]", f"{reason}; the elements behind it were not read", fix)
            return
        problem = _object_problem(value, text[at:end])
        if problem:
            yield RowProblem(path, line, f"[{element}]", *problem)
        else:
            yield RawTask(path, line, element, value)
        element += 1
        at = _past_space(text, end)
        if text[at : at + 1] == ",":
            at += 1
            continue
        line += text.count("\n", counted, at)
        if text[at : at + 1] != "]":
            yield FileProblem(path, line, f"[{element - 1}]", "is not followed by , or ]", "complete the array")
        elif text[at + 1 :].strip():
            yield FileProblem(path, line, "", "goes on behind the end of the array", "keep one array in one file")
        return


def _past_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at


class _Decoded:
    """The lines of a CSV file as text; remembers those that were not UTF-8."""

    def __init__(self, lines: Iterable[bytes]):
        self._lines = iter(lines)
        self._number = 0
        self.broken: list[int] = []

    def __iter__(self) -> "_Decoded":
        return self

    def __next__(self) -> str:
        raw = next(self._lines)
        self._number += 1
        try:
            return raw.decode("utf-8-sig" if self._number == 1 else "utf-8")
        except UnicodeDecodeError:
            self.broken.append(self._number)
            return raw.decode("utf-8", errors="replace")


def _read_csv(path: str, lines: Iterable[bytes]) -> Iterator[RawTask | RowProblem]:
    decoded = _Decoded(lines)
    reader = csv.reader(decoded, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            break
        except csv.Error as e:
            # A quote that is never closed has swallowed the rest of the file.
            kind = FileProblem if header is None or "unexpected end" in str(e) else RowProblem
            yield kind(path, line, "", f"is not CSV ({e})", "quote fields that hold a comma or a quote, double quotes")
            if header is None:
                return
            continue
        if decoded.broken:
            yield RowProblem(path, decoded.broken[0], "", "is not UTF-8", "save it as UTF-8")
            decoded.broken.clear()
        elif not record:
            continue
        elif header is None:
            header = record
            name, times = Counter(header).most_common(1)[0]
            if times > 1:
                yield FileProblem(path, line, name[:80], "stands twice in the header", "rename or drop one column")
                return
        elif len(record) != len(header):
            reason = f"has {len(record)} fields, and the header {len(header)}"
            yield RowProblem(path, line, "", reason, "quote every field that holds a comma or a line end")
        else:
            yield RawTask(path, line, None, dict(zip(header, record, strict=True)))
    if header is None or reader.line_num <= 1:
        yield FileProblem(path, None, "", "holds no task", _SHAPES)


def read_dataset(
    name: str, subset: str | None, split: str, revision: str | None, columns: frozenset[str]
) -> Iterator[RawTask]:
    """Yield the rows of a Hugging Face dataset, of its columns only those in `columns`.

    Other columns are not even decoded: some task lists carry screenshots. Raises ListError when it cannot be loaded.
    """
    import datasets
    from tqdm import tqdm

    try:
        dataset = datasets.load_dataset(name, subset, split=split, revision=revision)
        known = [column for column in dataset.column_names if column in columns]
        shown = ", ".join(dataset.column_names)
        dataset = dataset.select_columns(known)
    except Exception as e:  # noqa: BLE001 - the loader raises what its many backends raise, without a common base
        said = next(iter(str(e).splitlines()), "")
        raise ListError(
            f"--dataset {name} --split {split}: cannot be loaded ({type(e).__name__}: {said}). Fix: check the name, "
            "--subset, --split and --revision; a gated dataset needs its terms accepted and a log-in (hf auth login)"
        ) from e
    if not known:
        raise ListError(
            f"--dataset {name}: none of its columns holds a task ({shown[:300]}). Fix: name one with a flag"
        )
    number = 0
    with tqdm(total=len(dataset), unit="task", desc=name, disable=None, leave=False) as bar:
        for batch in dataset.iter(batch_size=1000):
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                number += 1
                yield RawTask(f"{name}[{split}]", number, None, dict(zip(names, values, strict=True)))
            bar.update(len(next(iter(batch.values()), ())))
