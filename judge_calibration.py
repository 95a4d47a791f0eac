"""How far a judge agrees with labels: agreement, precision, recall and Cohen's kappa, each with a 95% interval.

A labelled row is one JSON object on one line: `id`, `site`, `task`, `answer` (text or null), `actions` and
`observations` (lists of text), `label` ("success" or "failure"), and perhaps `reference`. Rows that the judge gives no
usable verdict on are left out of the figures and counted by kind: neither label would be a measurement.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from judge_prompt import SYSTEM, Evidence
from judge_verdict import Outcome

if TYPE_CHECKING:
    from judge import Judgement
    from recipe_settings import RecipeSettings

_Z = 1.959963984540054
"""The standard normal distribution's 97.5th percentile."""
_TEXTS = ("id", "site", "task")
_LISTS = ("actions", "observations")
_LABELS = {"success": Outcome.SUCCESS, "failure": Outcome.FAILURE}
_LINE_START = '{"digest": "'
"""How each line of an output begins."""
_KEYS = frozenset({*_TEXTS, *_LISTS, "answer", "reference", "label"})


class LabelledError(ValueError):
    """Files that a calibration can't use: every fault on a line of its own, with file, line, key and fix."""


class Scores(Protocol):
    """What a calibration needs of a judge."""

    async def score(
        self, task: str, answer: str | None, evidence: Evidence, reference: str | None = None
    ) -> Judgement: ...


@dataclass(frozen=True)
class LabelledRow:
    """One episode with a person's label."""

    id: str
    site: str
    task: str
    answer: str | None
    evidence: Evidence
    reference: str | None
    label: Outcome
    """SUCCESS or FAILURE."""

    def digest(self, model: str | None, votes: int, evidence_tokens: int) -> str:
        """Return what a kept verdict is recognised by: all that the judge was shown and told, and who judged how."""
        shown = [SYSTEM, *dataclasses.astuple(self), model, votes, evidence_tokens]
        return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Share:
    """A share of n, or another figure, with its 95% interval; all None where the figure is undefined."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Figures:
    """Agreement of the usable verdicts with their labels; a positive is a success."""

    true_success: int
    false_success: int
    """The judge says success, the label failure."""
    false_failure: int
    true_failure: int

    @property
    def n(self) -> int:
        """Number of usable verdicts."""
        return self.true_success + self.false_success + self.false_failure + self.true_failure

    @property
    def agreement(self) -> Share:
        """Share of the verdicts that are the label."""
        return wilson(self.true_success + self.true_failure, self.n)

    @property
    def precision(self) -> Share:
        """Share of the judge's successes that are labelled so; undefined without any."""
        return wilson(self.true_success, self.true_success + self.false_success)

    @property
    def recall(self) -> Share:
        """Share of the labelled successes that the judge calls so; undefined without any."""
        return wilson(self.true_success, self.true_success + self.false_failure)

    @property
    def kappa(self) -> Share:
        """Cohen's kappa with its large-sample interval; undefined where chance alone would always agree.

        Source: Fleiss, Cohen and Everitt (1969), Psychological Bulletin 72, 323-327, equation 13.
        """
        n = self.n
        if not n:
            return Share()
        cells = [[self.true_success, self.false_success], [self.false_failure, self.true_failure]]
        p = [[cell / n for cell in row] for row in cells]
        judge, label = [sum(row) for row in p], [sum(column) for column in zip(*p, strict=True)]
        observed = p[0][0] + p[1][1]
        chance = judge[0] * label[0] + judge[1] * label[1]
        # Judge and labels are all the same one class: any agreement is chance's.
        if self.true_success == n or self.true_failure == n:
            return Share()
        kappa = (observed - chance) / (1 - chance)
        same = sum(p[i][i] * (1 - (judge[i] + label[i]) * (1 - kappa)) ** 2 for i in (0, 1))
        other = sum(p[i][1 - i] * (label[i] + judge[1 - i]) ** 2 for i in (0, 1)) * (1 - kappa) ** 2
        variance = (same + other - (kappa - chance * (1 - kappa)) ** 2) / (n * (1 - chance) ** 2)
        half = _Z * math.sqrt(max(0.0, variance))
        return Share(kappa, max(-1.0, kappa - half), min(1.0, kappa + half))


def figures_of(pairs: Iterable[tuple[Outcome, Outcome]]) -> Figures:
    """Return the figures of (verdict, label) pairs without unusable ones."""
    counted = Counter(pairs)
    yes, no = Outcome.SUCCESS, Outcome.FAILURE
    return Figures(counted[yes, yes], counted[yes, no], counted[no, yes], counted[no, no])


def wilson(hits: int, n: int) -> Share:
    """Return hits/n with Wilson's score interval (1927, JASA 22, 209-212); undefined for n = 0."""
    if not n:
        return Share()
    share, z2 = hits / n, _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # Where all or none hit, one bound is that share itself, but for rounding.
    return Share(share, 0.0 if hits == 0 else max(0.0, middle - half), 1.0 if hits == n else min(1.0, middle + half))


@dataclass(frozen=True)
class Kept:
    """The verdict on one row."""

    row: LabelledRow
    outcome: Outcome
    kind: str | None
    """Why there is no usable verdict; None when there is one."""


@dataclass(frozen=True)
class Calibration:
    """Every row's verdict, in the order of the file."""

    kept: tuple[Kept, ...]

    @property
    def figures(self) -> Figures:
        """The figures over all sites."""
        return self._figures(self.kept)

    @property
    def by_site(self) -> dict[str, Figures]:
        """The figures of each site."""
        sites = sorted({kept.row.site for kept in self.kept})
        return {site: self._figures([kept for kept in self.kept if kept.row.site == site]) for site in sites}

    @property
    def unusable(self) -> dict[str, int]:
        """Number of rows without a usable verdict, by kind."""
        return dict(sorted(Counter(kept.kind for kept in self.kept if kept.kind is not None).items()))

    @staticmethod
    def _figures(kept: Iterable[Kept]) -> Figures:
        return figures_of((k.outcome, k.row.label) for k in kept if k.kind is None)

    def as_json(self) -> dict[str, Any]:
        """Return the calibration for machines."""
        figures = self.figures
        names = ("agreement", "precision", "recall", "kappa")
        return {
            "n": figures.n,
            **{name: dataclasses.asdict(getattr(figures, name)) for name in names},
            "rows": len(self.kept),
            "unusable": self.unusable,
            "confusion": {site: dataclasses.asdict(found) for site, found in self.by_site.items()},
        }


def report_lines(calibration: Calibration) -> list[str]:
    """Return the calibration for people; `-` stands for a figure that is undefined."""
    figures = calibration.figures
    lines = []
    for name in ("agreement", "precision", "recall", "kappa"):
        share: Share = getattr(figures, name)
        interval = "" if share.low is None or share.high is None else f"  95% [{share.low:.3f}, {share.high:.3f}]"
        lines.append(f"{name:<10} {'-' if share.value is None else f'{share.value:.3f}'}{interval}")
    kinds = ", ".join(f"{kind} {count}" for kind, count in calibration.unusable.items())
    missing = len(calibration.kept) - figures.n
    lines.append(f"n          {figures.n} of {len(calibration.kept)} rows; no usable verdict: {missing}")
    lines += [f"           {kinds}"] if kinds else []
    lines.append("intervals  Wilson's for shares, the large-sample one for kappa")
    width = max(len(site) for site in ("site", *calibration.by_site))
    lines.append(f"{'site':<{width}}  judge/label: success/success  success/failure  failure/success  failure/failure")
    for site, f in calibration.by_site.items():
        cells = (f.true_success, f.false_success, f.false_failure, f.true_failure)
        lines.append(f"{site:<{width}}  {'':<12} " + "  ".join(f"{cell:>15}" for cell in cells))
    return lines


def read_labelled(path: Path) -> list[LabelledRow]:
    """Return the labelled rows of a file. Raises LabelledError listing every fault, OSError."""
    rows, problems = [], []
    lines_of_id: dict[str, int] = {}
    for number, text in enumerate(path.read_bytes().split(b"\n"), 1):
        if not text.strip():
            continue
        found = _row(text)
        if isinstance(found, list):
            problems += [f"{path}:{number}: {problem}" for problem in found]
            continue
        if found.id in lines_of_id:
            problems.append(
                f"{path}:{number}: id: {found.id!r} is also on line {lines_of_id[found.id]}. Fix: one id for each row."
            )
        lines_of_id.setdefault(found.id, number)
        rows.append(found)
    if not rows and not problems:
        problems.append(f"{path}: holds no row. Fix: name a file with labelled episodes.")
    if problems:
        raise LabelledError(
            f"{len(problems)} problem(s) in the labelled rows:\n" + "\n".join(f"  {p}" for p in problems)
        )
    return rows


def _row(text: bytes) -> LabelledRow | list[str]:
    """Return the row that a line holds, or its faults."""
    try:
        raw = json.loads(text.decode())
    except (ValueError, RecursionError) as e:
        return [f"is no JSON in UTF-8 ({e}). Fix: one JSON object on each line."]
    if not isinstance(raw, dict):
        return ["is no JSON object. Fix: one JSON object on each line."]
    problems = [
        f"{key}: is not known. Fix: leave it out, or see the keys in judge_calibration.py."
        for key in raw.keys() - _KEYS
    ]
    for key in _TEXTS:
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            problems.append(f"{key}: {json.dumps(raw.get(key))[:80]} is no text. Fix: give text that is not blank.")
    for key in ("answer", "reference"):
        if raw.get(key) is not None and not isinstance(raw[key], str):
            problems.append(f"{key}: {json.dumps(raw[key])[:80]} is no text. Fix: give text, or null.")
    if "answer" not in raw:
        problems.append("answer: is missing. Fix: give the policy's answer, or null where it gave none.")
    for key in _LISTS:
        value = raw.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            problems.append(f"{key}: is no list of texts. Fix: give a list of texts; it may be empty.")
    label = raw.get("label")
    if not isinstance(label, str) or label not in _LABELS:
        problems.append(f'label: {json.dumps(label)[:80]} is no label. Fix: "success" or "failure".')
    if problems:
        return sorted(problems)
    evidence = Evidence(tuple(raw["actions"]), tuple(raw["observations"]))
    texts = [raw[key] for key in _TEXTS]
    return LabelledRow(*texts, raw["answer"], evidence, raw.get("reference"), _LABELS[label])


async def calibrate(
    judge: Scores, rows: Sequence[LabelledRow], settings: RecipeSettings, output: Path | None
) -> Calibration:
    """Return the judge's verdict on every row; a bar on stderr says how far it is.

    With `output`, each verdict is appended there as soon as it is known, and a row that already has a usable one of the
    same judge, with the same votes and budget, is not judged again. Raises LabelledError on a line there that is none.
    """
    how = (settings.judge_model, settings.judge_votes, settings.judge_evidence_tokens)
    digests = [row.digest(*how) for row in rows]
    known = _kept_outcomes(output) if output is not None else {}
    results = {d: Kept(row, known[d], None) for d, row in zip(digests, rows, strict=True) if d in known}
    slots = asyncio.Semaphore(settings.judge_concurrency)

    async def one(digest: str, row: LabelledRow) -> None:
        # The deadline of a judgement counts the wait for a slot of the judge: a row starts only when it has one.
        async with slots:
            judgement = await judge.score(row.task, row.answer, row.evidence, row.reference)
        verdict = judgement.verdict
        results[digest] = Kept(row, verdict.outcome, None if verdict.kind is None else str(verdict.kind))
        if output is not None:
            _append(output, digest, row, judgement)
        bar.update()

    with tqdm(total=len(rows), initial=len(results), unit="row", desc="judging") as bar:
        async with asyncio.TaskGroup() as group:
            for digest, row in zip(digests, rows, strict=True):
                if digest not in results:
                    group.create_task(one(digest, row))
    return Calibration(tuple(results[digest] for digest in digests))


def _append(output: Path, digest: str, row: LabelledRow, judgement: Judgement) -> None:
    """Add the verdict to the file as one line."""
    verdict = judgement.verdict
    line = {
        "digest": digest,
        "id": row.id,
        "site": row.site,
        "label": str(row.label),
        "outcome": str(verdict.outcome),
        "reason": verdict.reason,
        "kind": None if verdict.kind is None else str(verdict.kind),
        "unusable": [str(kind) for kind in judgement.unusable],
        **{key: getattr(judgement, key) for key in ("calls", "prompt_tokens", "completion_tokens", "elapsed_s")},
    }
    with output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _kept_outcomes(output: Path) -> dict[str, Outcome]:
    """Return the usable verdicts of an earlier run, by digest. A last line that a stop cut short is taken off."""
    if not output.exists():
        return {}
    foreign = "is no verdict of a calibration. Fix: name another --output, or delete this one."
    try:
        *lines, cut = output.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise LabelledError(f"{output}: {foreign}") from None
    found = {}
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            digest, outcome = line["digest"], Outcome(line["outcome"])
        except (ValueError, KeyError, TypeError):
            raise LabelledError(f"{output}:{number}: {foreign}") from None
        if outcome is not Outcome.UNUSABLE:
            found[digest] = outcome
    if cut and not cut.startswith(_LINE_START[: len(cut)]):
        raise LabelledError(f"{output}:{len(lines) + 1}: {foreign}")
    if cut:
        with output.open("r+b") as file:
            file.truncate(output.stat().st_size - len(cut.encode()))
    return found
