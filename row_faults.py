"""A fault of a rollout row: what it says, and how values are shown in it."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Report = Callable[[str, str, str], None]
"""Takes the key, the reason and the fix of one fault of the row at hand."""


@dataclass(frozen=True)
class RowProblem:
    """One fault of one row."""

    file: str
    """The file as it was named by the caller."""
    line: int | None
    """Line number from 1; None when the fault is the whole file's."""
    key: str
    """Dotted path of the key at fault; empty when there is no key to name."""
    reason: str
    fix: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.key + ': ' if self.key else ''}{self.reason}. Fix: {self.fix}."


class RowsError(ValueError):
    """Rows that cannot be trained on. `args[0]` holds every RowProblem, so that the error pickles through Ray."""

    @property
    def problems(self) -> tuple[RowProblem, ...]:
        """Every fault, in the order of files and lines."""
        return self.args[0]

    def __str__(self) -> str:
        return f"{len(self.problems)} problem(s) in the rollout rows:\n" + "\n".join(f"  {p}" for p in self.problems)


def absent_or(obj: dict[str, Any], key: str, wanted: str) -> str:
    """Return what is wrong with a key that is not what was wanted, or not there."""
    return f"is {shown(obj[key])}, not {wanted}" if key in obj else "is missing"


def shown(value: Any) -> str:
    """Return the value as JSON, cut to a length that leaves an error line readable."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def json_kind(value: Any) -> str:
    """Return JSON's name for the value's type."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return {dict: "object", list: "array", str: "string"}.get(type(value), "number")


class RepeatedKey(Exception):
    """A JSON object names a key twice; json.loads would keep the last without a word."""


def no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, for `object_pairs_hook`. Raises RepeatedKey."""
    obj = dict(pairs)
    if len(obj) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise RepeatedKey(next(key for key, count in counts.items() if count > 1))
    return obj
