"""The command line of judge.py: `--check` and `--calibrate`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from judge import Evidence, FailureKind, Judge, Judgement, Outcome
from judge_calibration import Calibration, LabelledError, calibrate, read_labelled, report_lines
from recipe_settings import RecipeSettings, SettingsError

TASK = "Find the price of the blue kettle at Lindholm Kitchen and say how many litres it holds."
_SHOP = (
    "URL: https://lindholm-kitchen.example/kettles\nTITLE: Kettles\nELEMENTS:\n"
    "  [0] a: Blue kettle\n  [1] a: Red kettle",
    "URL: https://lindholm-kitchen.example/kettles/blue\nTITLE: Blue kettle\nELEMENTS:\n  [0] button: Add to cart\n"
    "TEXT:\n  Blue kettle. 1.7 litres. 24.50 EUR. In stock.",
)
_ACTIONS = ("navigate https://lindholm-kitchen.example/kettles", "click Blue kettle", "finish")
_REFERENCE = "24.50 EUR, 1.7 litres"
_FILLER = "Kettles of every colour, for every kitchen, with a lid and a handle. "


def _cases(evidence_tokens: int) -> list[tuple[str, str, Evidence, Outcome]]:
    """Return the two cases; the second fills the evidence's budget, so that a context too small for it shows."""
    long_page = f"URL: https://lindholm-kitchen.example/\nTITLE: Home\nTEXT:\n  {_FILLER * (evidence_tokens // 10)}"
    return [
        ("success", _REFERENCE, Evidence(_ACTIONS, _SHOP), Outcome.SUCCESS),
        ("failure", "19.00 EUR, 2.0 litres", Evidence(_ACTIONS, (long_page, *_SHOP)), Outcome.FAILURE),
    ]


ADVICE = {
    FailureKind.JUDGE_UNREACHABLE: (
        "The endpoint did not answer in time. Check NEMO_GYM_BROWSER_JUDGE_URL (with its path, usually /v1), that the "
        "judge's server runs and has loaded its model, and that this machine may reach it."
    ),
    FailureKind.JUDGE_REJECTED: (
        "The endpoint refuses the request for good; its words are above. 401, 403: NEMO_GYM_BROWSER_JUDGE_API_KEY. "
        "404: NEMO_GYM_BROWSER_JUDGE_MODEL, or the address lacks its /v1. A context that is too long: a smaller "
        "NEMO_GYM_BROWSER_JUDGE_EVIDENCE_TOKENS."
    ),
    FailureKind.JUDGE_UNPARSEABLE: (
        "The model answers, but not in the form that is asked for. Serve it with structured output; for a model that "
        "thinks first, start its server with the reasoning parser of that model. A very small model can't judge."
    ),
    FailureKind.JUDGE_REFUSED: "The model or a filter before it refuses to grade. Take another model.",
    FailureKind.JUDGE_TRUNCATED: (
        "The reply was cut by its length limit: the model thinks or writes too long. Turn its thinking off, serve it "
        "with structured output, or take another model."
    ),
}
WRONG_VERDICT = "The judge answers, and answers wrongly on a plain case: this model is too weak to be a reward."


def main(argv: list[str] | None = None) -> int:
    """Run the check or the calibration. Return 0 when all is well, 1 when not; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="judge.py", description="Check or calibrate the configured judge.")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--check", action="store_true", help="send one plain success and one plain failure to the judge")
    task.add_argument("--calibrate", type=Path, metavar="FILE", help="compare the judge with labelled episodes (JSONL)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="with --calibrate: keep every verdict, go on from it"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="with --check: seconds for each case")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args(argv)
    if arguments.output and not arguments.calibrate:
        parser.error("--output goes with --calibrate")
    if not 0 < arguments.timeout < float("inf"):
        parser.error(f"--timeout {arguments.timeout}: must be a number of seconds above 0")
    try:
        settings = RecipeSettings.from_env()
        Judge(settings)  # raises SettingsError on what no judge can be made of
        if arguments.check:
            # The deadline of a training outlasts a restart of the judge's server; a check should not.
            return asyncio.run(_check(replace(settings, judge_deadline_s=arguments.timeout), arguments.json))
        return asyncio.run(_calibrate(settings, arguments))
    except SettingsError as e:
        parser.error(f"no usable judge. {e}")
    except LabelledError as e:
        _exit_with(str(e))
    except OSError as e:
        if e.filename is None:  # standard output that nobody reads any more
            raise
        _exit_with(f"{e.filename}: {e.strerror}. Fix: name a file that can be read and written.")
    except KeyboardInterrupt:
        print("Stopped before it was over; verdicts in --output are kept.", file=sys.stderr)
        return 130


def _exit_with(problem: str) -> NoReturn:
    print(problem, file=sys.stderr)
    raise SystemExit(2)


def as_json(judgement: Judgement) -> dict[str, Any]:
    """Return a judgement for machines."""
    verdict = judgement.verdict
    said = {"outcome": str(verdict.outcome), "reason": verdict.reason, "kind": verdict.kind and str(verdict.kind)}
    cost = {k: v for k, v in dataclasses.asdict(judgement).items() if k not in ("verdict", "unusable")}
    return said | cost | {"unusable": [str(kind) for kind in judgement.unusable]}


async def _check(settings: RecipeSettings, as_one_object: bool) -> int:
    """Print the verdict of each plain case; return 0 when both are right, else 1."""
    cases = []
    importlib.import_module("openai")  # takes seconds, which are not the judge's
    async with Judge(settings) as judge:
        for name, answer, evidence, want in _cases(settings.judge_evidence_tokens):
            judgement = await judge.score(TASK, answer, evidence, _REFERENCE)
            right = judgement.verdict.outcome is want
            kind = judgement.verdict.kind
            advice = None if right else WRONG_VERDICT if kind is None else ADVICE[kind]
            cases.append({"case": name, "right": right, **as_json(judgement), "advice": advice})
            if not as_one_object:
                _print_case(cases[-1])
            if kind in (FailureKind.JUDGE_UNREACHABLE, FailureKind.JUDGE_REJECTED):
                break  # the next case would end in the same way
        healthy = all(case["right"] for case in cases)
        known = {"url": settings.judge_url, "model": settings.judge_model, "output_format": str(judge.output_format)}
    if as_one_object:
        print(json.dumps({"healthy": healthy, **known, "cases": cases}))
    else:
        state = "healthy" if healthy else "unhealthy"
        print(f"{state}: {known['model']} at {known['url']} (output format: {known['output_format']})")
    return 0 if healthy else 1


def _print_case(case: dict[str, Any]) -> None:
    tokens = f"{case['prompt_tokens']} + {case['completion_tokens']} tokens in {case['calls']} call(s)"
    state = "ok" if case["right"] else "FAILED"
    print(f"{case['case']:<8} {state:<6} {case['elapsed_s']:7.3f} s  {case['outcome']}, {tokens}", flush=True)
    print(f"  {'reason' if case['kind'] is None else case['kind']}: {case['reason']}", flush=True)
    if case["advice"]:
        print(f"  what to do: {case['advice']}", flush=True)


async def _calibrate(settings: RecipeSettings, arguments: argparse.Namespace) -> int:
    """Print how far the judge agrees with the labels; return 0, or 1 when no row has a usable verdict."""
    rows = read_labelled(arguments.calibrate)
    async with Judge(settings) as judge:
        calibration: Calibration = await calibrate(judge, rows, settings, arguments.output)
    if arguments.json:
        print(json.dumps(calibration.as_json()))
    else:
        for line in report_lines(calibration):
            print(line)
    return 0 if calibration.figures.n else 1
