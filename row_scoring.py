"""Who scores a row's task: the environment by the row's scoring spec, or the judge; never both, never neither."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from row_faults import Report, json_kind, shown

SCORING_KEYS = ("answer_equals", "final_url", "url_contains", "dom_contains")
"""In the order in which the server looks for them; it scores the first that it finds and ignores the others.

Source: nemo-gym 0.7.0, resources_servers/interactive_browser/app.py, `_score`.
"""

_SPEC = "verifier_metadata"
_METADATA = "responses_create_params.metadata"
_ADD = f"add a scoring spec with one of {', '.join(SCORING_KEYS)}"
_ADD_OR_DROP = f"{_ADD}, or drop the key to have the task judged"


JUDGE = "judge"
"""How `scored_by` in a row's metadata may name the judge, and how counts of rows do."""


@dataclass(frozen=True)
class Scoring:
    """Who scores a task, and by what."""

    spec: Mapping[str, str]
    """The one scoring key and its value; empty for a judged task."""
    reference_answer: str = ""
    """What a right answer says, for the judge alone; empty if the row has none."""

    @property
    def judged(self) -> bool:
        """Whether the judge scores the task, and not the environment."""
        return not self.spec

    @property
    def scored_by(self) -> str:
        """The scoring key, or `judge`."""
        return next(iter(self.spec), JUDGE)


def scoring_of(obj: Mapping[str, Any], metadata: Mapping[str, str], report: Report) -> Scoring | None:
    """Return who scores the row's task; after a report, which makes the row unusable, it means nothing."""
    demands_judge = _demands_judge(metadata, report)
    reference = metadata.get("reference_answer", "")
    stray = [k for k in SCORING_KEYS if k in obj]
    for name in stray:
        report(name, "stands beside verifier_metadata, where the server does not look", f"move it to {_SPEC}.{name}")
    if _SPEC not in obj or obj[_SPEC] is None:
        if demands_judge is False:
            report(_SPEC, "is missing, while the metadata says that the environment scores the task", _ADD)
        return Scoring({}, reference)
    if obj[_SPEC] == {}:
        report(_SPEC, "is empty: neither the environment nor the judge would score the task", _ADD_OR_DROP)
        return None
    if demands_judge or reference:
        marks = "scored_by" if demands_judge else "reference_answer"
        reason = f"asks for the judge, but {_SPEC} is there as well: a task is scored by one of them"
        report(f"{_METADATA}.{marks}", reason, f"drop it, or drop {_SPEC}")
    return scoring_by_spec(obj[_SPEC], report)


def _demands_judge(metadata: Mapping[str, str], report: Report) -> bool | None:
    """Return whether the metadata says that the judge scores the task; None if it says nothing of it."""
    scored_by = metadata.get("scored_by")
    if scored_by not in (None, JUDGE, "environment"):
        report(f"{_METADATA}.scored_by", f"is {shown(scored_by)}", f"write {JUDGE} or environment, or drop it")
    return None if scored_by is None else scored_by == JUDGE


def scoring_by_spec(spec: Any, report: Report) -> Scoring | None:
    """Return the scoring by the environment; for a spec that is none, None after reporting its faults.

    Several keys are refused although the server's order is fixed: it scores the first and ignores the others, while
    a row with two reads as if both had to hold.
    """
    if not isinstance(spec, dict):
        report(_SPEC, f"is {shown(spec)}, not an object", f"write an object with one of {', '.join(SCORING_KEYS)}")
        return None
    unknown = sorted(set(spec) - set(SCORING_KEYS))
    for name in unknown:
        report(
            f"{_SPEC}.{name}", "is no scoring key of the server", f"use one of {', '.join(SCORING_KEYS)}, or drop it"
        )
    present = [k for k in SCORING_KEYS if k in spec]
    if not present:
        if not unknown:
            report(_SPEC, "has no scoring key: the server answers 500", _ADD)
        return None
    if len(present) > 1:
        reason = f"has {' and '.join(present)}: the server scores {present[0]} alone and ignores the rest"
        report(_SPEC, reason, "keep the one that decides")
    checked = [_scoring_value(k, spec[k], report) for k in present]
    return Scoring({present[0]: checked[0]})


def _scoring_value(name: str, value: Any, report: Report) -> str:
    """Return the value of one scoring key, reporting what the server would score as always or never solved."""
    key = f"{_SPEC}.{name}"
    if not isinstance(value, str):
        report(key, f"is {shown(value)}, a {json_kind(value)}, not a string", "write it in quotes, or drop the key")
    elif not value.strip():
        report(key, "is blank: the score would not depend on what the policy does", "write what has to be found")
    elif name == "final_url" and not _reachable_address(value):
        fix = "write the full address as a browser shows it (a bare host ends in /), or use url_contains"
        report(key, f"{shown(value)} never equals a page's address", fix)
    return value


def _reachable_address(url: str) -> bool:
    """Return whether a browser could ever show this very address."""
    match = re.match(r"([a-z][a-z0-9+.-]*):(.*)", url, flags=re.DOTALL)
    if not match or re.search(r"\s", url):
        return False
    return match[1] not in ("http", "https") or re.match(r"//[^/?#]+/", match[2]) is not None
