"""Task lists in, NeMo Gym rollout rows out: `train.jsonl`, `val.jsonl`, and `report.json` on what became of each task.

    python prepare_webvoyager_data.py --input WebVoyager_data.jsonl --output-dir data --today 2026-12-01
    python prepare_webvoyager_data.py --dataset NAME --split test --output-dir data --today 2026-12-01

    exit 0: written; 2: wrong usage or bad input, all of it listed on stderr, and nothing written; 130: Ctrl-C

The list is WebVoyager's (`web_name, id, ques, web`) or one of its relatives: task_columns.py has the names of columns,
task_lists.py the file formats, task_dates.py what counts as a date, task_rows.py the rows, task_report.py the keys of
`report.json`. The same input and options give the same bytes in all three files, and a task's split depends on its id
alone. The reference answers stand in a row's metadata, never in its messages.
"""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TextIO

from row_faults import RowProblem
from task_columns import ColumnChoice, Role, Task, read_task
from task_lists import FileProblem, ListError, RawTask, read_dataset, read_list
from task_report import Outcome, as_json, counts, summary
from task_rows import TRAIN, VALIDATION, row, split_of
from task_scoring import Scoring, read_reference_answers, read_verifiers
from task_selection import Expired, Note, SelectionError, Wanted, select, without_repeats

FILES = {TRAIN: "train.jsonl", VALIDATION: "val.jsonl"}
REPORT = "report.json"


class Refused(Exception):
    """Nothing is written. args: the lines for stderr."""


@dataclass(frozen=True)
class Extras:
    """What the rows get from other files than the list."""

    specs: dict[str, dict[str, str]]
    answers: dict[str, str]
    system_prompt: str | None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prepare_webvoyager_data.py",
        description="Turn a list of web tasks into NeMo Gym rollout rows: train.jsonl, val.jsonl, report.json.",
        epilog="Exit: 0 written, 2 wrong usage or bad input (nothing written), 130 stopped.",
        allow_abbrev=False,
    )
    source = parser.add_argument_group("the list (one of --input and --dataset)")
    source.add_argument(
        "--input", action="append", metavar="FILE", help="JSON Lines, a JSON array, or .csv; repeatable"
    )
    source.add_argument("--dataset", metavar="NAME", help="a Hugging Face dataset, or the folder of one")
    source.add_argument("--subset", metavar="NAME", help="the dataset's configuration, when it has several")
    source.add_argument("--split", metavar="S", help="the dataset's split (required with --dataset)")
    source.add_argument("--revision", metavar="R", help="the dataset's commit, branch or tag")
    for role in (Role.QUESTION, Role.URL, Role.ID, Role.SITE):
        source.add_argument(
            f"--{role}-column", metavar="C", help=f"the column of the {role}, if it isn't found by name"
        )
    source.add_argument("--make-ids", action="store_true", help="make ids of tasks that have none, from their content")
    source.add_argument(
        "--strip-appended-url", action="store_true", help="drop a final ` Use <url>.` that names the start page"
    )
    source.add_argument("--skip-bad-rows", action="store_true", help="leave bad rows out (listed) instead of stopping")
    chosen = parser.add_argument_group("which tasks")
    chosen.add_argument(
        "--today", type=_day, metavar="YYYY-MM-DD", help="first day of use; required when a task names a date"
    )
    chosen.add_argument(
        "--expired",
        type=Expired,
        choices=list(Expired),
        default=Expired.SKIP,
        help="a task with a date before --today: skip it (default), keep it, or shift its dates by whole years",
    )
    chosen.add_argument("--sites", metavar="A,B", help="only these sites")
    chosen.add_argument("--ids", metavar="a,b|@FILE", help="only these ids; @FILE has one a line")
    chosen.add_argument("--exclude-ids", metavar="FILE", help="none of these ids, one a line; # begins a comment line")
    chosen.add_argument("--limit", type=_count, metavar="N", help="at most N tasks, the first of what the rest leaves")
    rows = parser.add_argument_group("the rows")
    rows.add_argument("--output-dir", required=True, metavar="DIR", help="where the three files go")
    rows.add_argument(
        "--val-fraction", type=_fraction, default=0.1, metavar="F", help="share of val.jsonl (default 0.1)"
    )
    rows.add_argument("--split-seed", default="", metavar="TEXT", help="another text, another split")
    rows.add_argument("--verifier", metavar="FILE", help="scoring specs by task id; such tasks need no judge")
    rows.add_argument("--reference-answers", metavar="FILE", help="answers for the judge, by task id")
    rows.add_argument("--system-prompt", metavar="FILE", help="text of a system message (default: none in the rows)")
    parser.add_argument("--json", action="store_true", help="print the report's counts as one JSON object")
    return parser


def _day(text: str) -> date:
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text) and 1900 <= int(text[:4]) <= 2090:
            return date.fromisoformat(text)
    except ValueError:
        pass  # no day of the calendar: refused below like any other text
    raise argparse.ArgumentTypeError(f"{text!r}: must be a day from 1900 to 2090, as YYYY-MM-DD")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number from 0 to 1")
    return value


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments; leaves with exit code 2 on wrong usage."""
    parser = _parser()
    given = parser.parse_args(argv)
    if bool(given.input) == bool(given.dataset):
        parser.error("give either --input FILE (repeatable) or --dataset NAME")
    if given.dataset and not given.split:
        parser.error("--dataset needs --split (many task lists have only `test`)")
    for flag in ("subset", "split", "revision"):
        if getattr(given, flag) is not None and not given.dataset:
            parser.error(f"--{flag} belongs to --dataset")
    for flag in ("sites", "ids"):
        if getattr(given, flag) is not None and not getattr(given, flag).strip(", "):
            parser.error(f"--{flag} names nothing")
    folder = Path(given.output_dir).expanduser()
    for path in given.input or ():
        for name in (*FILES.values(), REPORT):
            if (folder / name).exists() and Path(path).exists() and os.path.samefile(folder / name, path):
                parser.error(f"--input {path} is a file that --output-dir {given.output_dir} would overwrite")
    return given


def _text(flag: str, path: str) -> str:
    """Return a file's text. Raises Refused when it cannot be read."""
    try:
        return Path(path).expanduser().read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise Refused([f"{flag} {path}: cannot be read ({e.strerror}). Fix: check the path."]) from None
    except UnicodeDecodeError as e:
        raise Refused([f"{flag} {path}: is not UTF-8 (byte {e.start + 1}). Fix: save it as UTF-8."]) from None


def _listed_ids(flag: str, path: str) -> list[tuple[str, int, str]]:
    """Return file, line and id of each id of a file."""
    lines = enumerate(_text(flag, path).split("\n"), start=1)
    ids = [(path, number, line.strip()) for number, line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not ids:
        raise Refused([f"{flag} {path}: names no id. Fix: write one id a line."])
    return ids


def _wanted(given: argparse.Namespace) -> Wanted:
    def names(text: str | None) -> tuple[str, ...]:
        return tuple(name.strip() for name in (text or "").split(",") if name.strip())

    from_file = given.ids is not None and given.ids.startswith("@")
    return Wanted(
        sites=names(given.sites),
        ids=tuple(i for _, _, i in _listed_ids("--ids", given.ids[1:])) if from_file else names(given.ids),
        excluded=tuple(_listed_ids("--exclude-ids", given.exclude_ids)) if given.exclude_ids else (),
        limit=given.limit,
        today=given.today,
        expired=given.expired,
    )


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options that shape the rows."""
    options = {k: v for k, v in vars(given).items() if k not in ("output_dir", "json")}
    return options | {"today": given.today.isoformat() if given.today else None, "expired": given.expired.value}


def _raw_tasks(given: argparse.Namespace, choice: ColumnChoice) -> Iterator[RawTask | RowProblem]:
    if given.dataset:
        yield from read_dataset(given.dataset, given.subset, given.split, given.revision, choice.names)
    for path in given.input or ():
        yield from read_list(path)


def _good_tasks(raw_tasks: Iterator[RawTask | RowProblem], choice: ColumnChoice, outcome: Outcome) -> Iterator[Task]:
    """Yield the good tasks; the faults of the others are noted."""
    for raw in raw_tasks:
        outcome.read += 1
        task = raw if isinstance(raw, RowProblem) else read_task(raw, choice)
        if isinstance(task, Task):
            yield task
        else:
            outcome.bad_tasks += 1
            outcome.bad_rows += [task] if isinstance(task, RowProblem) else task


def _read(given: argparse.Namespace, outcome: Outcome) -> list[Task]:
    """Return the list's tasks. Raises Refused with every fault, except with --skip-bad-rows."""
    named = {role: getattr(given, f"{role}_column", None) for role in Role}
    choice = ColumnChoice({r: name for r, name in named.items() if name}, given.make_ids, given.strip_appended_url)
    good = _good_tasks(_raw_tasks(given, choice), choice, outcome)
    try:
        tasks, conflicts = without_repeats(good, outcome.selection)
    except ListError as e:
        raise Refused([f"{e}."]) from e
    outcome.bad_rows += conflicts
    outcome.bad_tasks += len(conflicts)
    unreadable = [problem for problem in outcome.bad_rows if isinstance(problem, FileProblem)]
    if outcome.bad_rows and (unreadable or not given.skip_bad_rows):
        last = "Correct the list, or leave bad rows out with --skip-bad-rows."
        if unreadable:
            last = "--skip-bad-rows does not help against a file that cannot be read."
        raise Refused([*map(str, outcome.bad_rows), f"{outcome.bad_tasks} bad row(s), nothing written. {last}"])
    return tasks


def _extras(given: argparse.Namespace, tasks: list[Task], outcome: Outcome) -> Extras:
    """Return what other files say of the tasks. Raises Refused with every fault of every file."""
    specs = read_verifiers(given.verifier) if given.verifier else Scoring()
    answers = read_reference_answers(given.reference_answers) if given.reference_answers else Scoring()
    known = {task.task_id for task in tasks}
    problems = [*specs.problems, *specs.unknown(known), *answers.problems]
    # A list may well be a part of the one that the answers were written for.
    strangers = sum(1 for _ in answers.unknown(known))
    if strangers:
        text = f"{strangers} answer(s) are of tasks that the list does not have"
        outcome.selection.warnings.append(Note(None, given.reference_answers, None, text))
    for task in tasks:
        other = answers.entries.setdefault(task.task_id, task.answer) if task.answer is not None else None
        if other != task.answer:
            fix = f"drop it there or in {given.reference_answers}"
            reason = f"{task.task_id!r} has another answer in {given.reference_answers}"
            problems.append(RowProblem(task.file, task.line, "Final answer", reason, fix))
    if problems:
        raise Refused([*map(str, problems), f"{len(problems)} problem(s), nothing written."])
    prompt = None
    if given.system_prompt:
        prompt = _text("--system-prompt", given.system_prompt).strip()
        if not prompt:
            raise Refused([f"--system-prompt {given.system_prompt}: is blank. Fix: write the text, or drop the flag."])
    return Extras(specs.entries, answers.entries, prompt)


@contextlib.contextmanager
def _replacing(folder: Path, names: tuple[str, ...]) -> Iterator[dict[str, TextIO]]:
    """Yield one open text file per name; they take their names once all are whole, and vanish on an error."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in names}
    try:
        with contextlib.ExitStack() as stack:
            files = {n: stack.enter_context(open(p, "w", encoding="utf-8", newline="\n")) for n, p in temporary.items()}
            yield files
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for name, path in temporary.items():
            os.replace(path, folder / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _write(given: argparse.Namespace, outcome: Outcome, extras: Extras) -> None:
    """Write the three files."""
    with _replacing(Path(given.output_dir).expanduser(), (*FILES.values(), REPORT)) as files:
        for task in outcome.selection.tasks:
            split = split_of(task.task_id, given.val_fraction, given.split_seed)
            spec, answer = extras.specs.get(task.task_id), extras.answers.get(task.task_id)
            outcome.written[task.site, split] += 1
            outcome.scored_by["environment" if spec else "judge"] += 1
            outcome.scored_by["judge_with_reference_answer"] += spec is None and answer is not None
            outcome.answers_not_used += spec is not None and answer is not None
            made = row(task, split, extras.system_prompt, spec, answer)
            files[FILES[split]].write(json.dumps(made, ensure_ascii=False) + "\n")
        for split, name in FILES.items():
            if not outcome.rows(split):
                outcome.selection.warnings.append(Note(None, name, None, "holds no row"))
        json.dump(as_json(outcome), files[REPORT], ensure_ascii=False, indent=1)
        files[REPORT].write("\n")


def _prepare(given: argparse.Namespace) -> Outcome:
    outcome = Outcome(_options(given))
    wanted = _wanted(given)
    tasks = _read(given, outcome)
    extras = _extras(given, tasks, outcome)
    try:
        select(tasks, wanted, outcome.selection)
    except SelectionError as e:
        raise Refused([f"{e}."]) from e
    if not outcome.selection.tasks:
        why = ", ".join(f"{reason} {count}" for reason, count in outcome.left_out.items())
        raise Refused([f"No task is left (read {outcome.read}; left out: {why}), nothing written. Fix: filter less."])
    outcome.sites = {task.task_id: task.site for task in tasks}
    try:
        _write(given, outcome, extras)
    except OSError as e:
        raise Refused([f"--output-dir {given.output_dir}: cannot be written ({e.strerror}). Fix: check it."]) from e
    return outcome


def main(argv: list[str] | None = None) -> int:
    """Prepare the rows and print what was done. Return 0, or 2 for bad input; wrong usage exits with 2."""
    given = _parsed(argv)
    try:
        outcome = _prepare(given)
    except Refused as e:
        print("\n".join(e.args[0]), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped; nothing was written.", file=sys.stderr)
        return 130
    for problem in outcome.bad_rows:
        print(problem, file=sys.stderr)
    print(json.dumps(counts(outcome)) if given.json else summary(outcome, given.output_dir))
    return 0


if __name__ == "__main__":
    # The rows are written by now: a site's name that the terminal has no characters for must not end in a traceback.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
