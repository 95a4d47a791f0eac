"""What scores a task, from files beside its list: specs for the environment, reference answers for a judge.

--verifier            {"ID": {"answer_equals": "..."}, ...}   or lines {"id": ..., "verifier_metadata": {...}}
--reference-answers   {"SITE": {"notice": ..., "answers": [{"id": 0, "type": "golden", "ans": "..."}]}, ...}, whose
                      ids are `SITE--0`; or {"ID": "answer", ...}; or lines {"id": ..., "answer": ...}
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from row_faults import RepeatedKey, RowProblem
from row_scoring import scoring_by_spec
from task_lists import RawTask, json_decoder, json_fault, read_list

SPEC_KEY = "verifier_metadata"
ANSWER_KEY = "answer"


@dataclass
class Scoring:
    """Entries of a file by task id, and its faults."""

    entries: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """File and, in a file of lines, line of each entry."""
    problems: list[RowProblem] = field(default_factory=list)

    def add(self, raw: RawTask | None, file: str, task_id: str, value: Any) -> bool:
        """Keep the entry; a second one for the same id is a fault."""
        line = raw.line if raw else None
        if task_id in self.entries:
            self.problems.append(RowProblem(file, line, task_id, "stands twice in the file", "keep one of them"))
            return False
        self.entries[task_id], self.places[task_id] = value, (file, line)
        return True

    def unknown(self, known: set[str]) -> Iterator[RowProblem]:
        """Yield a fault for each entry of a task that is not known."""
        for task_id, (file, line) in self.places.items():
            if task_id not in known:
                yield RowProblem(file, line, task_id, "is no task of the list", "correct the id, or drop the entry")


def read_verifiers(path: str) -> Scoring:
    """Return the scoring specs of a file, each with exactly one of SCORING_KEYS."""
    found = Scoring()
    for raw, task_id, spec in _entries(path, SPEC_KEY, found):
        line = raw.line if raw else None

        def report(key: str, reason: str, fix: str, line: int | None = line, task_id: str = task_id) -> None:
            found.problems.append(RowProblem(path, line, f"{task_id}.{key}", reason, fix))

        if not isinstance(spec, dict):
            report(SPEC_KEY, "is no object", 'write {"answer_equals": "..."} or another scoring key')
        elif scoring_by_spec(spec, report) is not None:
            found.add(raw, path, task_id, spec)
    return found


def read_reference_answers(path: str) -> Scoring:
    """Return the reference answers of a file by task id."""
    found = Scoring()
    for raw, task_id, answer in _entries(path, ANSWER_KEY, found):
        if raw is None and isinstance(answer, dict):
            _add_site(path, task_id, answer, found)
        elif not isinstance(answer, str) or not answer.strip():
            line = raw.line if raw else None
            found.problems.append(
                RowProblem(path, line, task_id, "has no text as answer", "write it, or drop the entry")
            )
        else:
            found.add(raw, path, task_id, answer)
    return found


def _add_site(path: str, site: str, block: dict[str, Any], found: Scoring) -> None:
    """Add the answers of one site of WebVoyager's file."""
    answers = block.get("answers")
    if not isinstance(answers, list):
        fix = 'write {"answers": [{"id": 0, "ans": "..."}]}, or the answer\'s text'
        found.problems.append(RowProblem(path, None, f"{site}.answers", "is no list", fix))
        return
    for index, entry in enumerate(answers):
        number, text = (entry.get("id"), entry.get("ans")) if isinstance(entry, dict) else (None, None)
        usable = isinstance(number, int | str) and not isinstance(number, bool)
        if not usable or not isinstance(text, str) or not text.strip():
            key = f"{site}.answers[{index}]"
            found.problems.append(RowProblem(path, None, key, "lacks an id or the text `ans`", "add it, or drop it"))
        else:
            found.add(None, path, f"{site}--{number}", text)


def _entries(path: str, key: str, found: Scoring) -> Iterator[tuple[RawTask | None, str, Any]]:
    """Yield the entries of either form: the line that holds it (None in one object), its id, its value under `key`."""
    whole = _whole_object(path, key, found)
    if whole is not None:
        yield from ((None, task_id, value) for task_id, value in whole.items())
        return
    if found.problems:
        return
    for raw in read_list(path):
        if isinstance(raw, RowProblem):
            found.problems.append(raw)
            continue
        task_id = raw.columns.get("id")
        if isinstance(task_id, int) and not isinstance(task_id, bool):
            task_id = str(task_id)
        if not isinstance(task_id, str) or not task_id.strip():
            found.problems.append(raw.problem("id", "is missing or no text", "name the task"))
        elif key not in raw.columns:
            found.problems.append(raw.problem(key, "is missing", f'write {{"id": ..., "{key}": ...}}'))
        else:
            yield raw, task_id, raw.columns[key]


def _whole_object(path: str, key: str, found: Scoring) -> dict[str, Any] | None:
    """Return the object that the file is; None for any other form, and for one that is broken, which is noted."""
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8-sig").strip()
        value = json_decoder().decode(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair could not be written
    except (OSError, UnicodeDecodeError):
        return None  # read_list meets the same error and words it
    except (ValueError, RecursionError, RepeatedKey) as e:
        if isinstance(e, json.JSONDecodeError) and (e.msg == "Extra data" or text[:1] != "{" or e.lineno == 1):
            return None  # several lines, each an object of its own, or nothing that read_list does not word
        line = e.lineno if isinstance(e, json.JSONDecodeError) else None
        found.problems.append(RowProblem(path, line, "", *json_fault(e)))
        return None
    # One line of the other form is a whole object too.
    if isinstance(value, dict) and not {"id", key} <= value.keys():
        return value
    return None
