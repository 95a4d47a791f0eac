"""The verdict of a load run: percentiles, thresholds and what to do; the text and the JSON say the same numbers."""

import json
import re
from dataclasses import replace

import pytest

from recipe_settings import RecipeSettings
from smoke_episode import SHIPPED_PAGE, Report, Step
from smoke_load import Ended, LoadPlan, LoadRun, ServerCounts
from smoke_report import ACTIONS, Limits, load_report, percentile, report_lines

URL = "http://gym:18080"
LIMITS = Limits.from_settings(RecipeSettings())


def episode(failed=None, kind="", took=None, cut_short=False, url=URL):
    """Return an episode whose steps took 0.1 s, or what `took` says; after a failed step only the close follows."""
    report = Report(url, SHIPPED_PAGE, "opened")
    for name in ACTIONS:
        if report.failed_step and (name != "close" or report.failed_step == "seed"):
            continue
        ok = name != failed
        report.steps.append(Step(name, ok, (took or {}).get(name, 0.1), "", "" if ok else kind))
        if not ok:
            report.failed_step, report.kind, report.answered = name, kind, f"answer {kind}"
    report.cut_short = cut_short
    return report


def run_of(episodes, n=None, peak=None, ended=Ended.EPISODES, given_up=False, elapsed_s=30.0):
    n = len(episodes) if n is None else n
    peak = n if peak is None else peak
    plan = LoadPlan((URL,), (SHIPPED_PAGE,), n, len(episodes), 600.0, 2, RecipeSettings())
    return LoadRun(plan, ended, elapsed_s, peak, (ServerCounts(URL, n, peak, given_up),), tuple(episodes))


@pytest.mark.parametrize(
    ("values", "share", "want"),
    [
        ([], 0.5, None),
        ([7.0], 0.99, 7.0),
        ([3.0, 1.0, 2.0, 4.0], 0.5, 2.0),
        (range(1, 101), 0.9, 90),
        (range(1, 101), 0.99, 99),
        (range(1, 101), 1.0, 100),
        (range(1, 11), 0.99, 10),
    ],
    ids=["none", "one", "unsorted", "p90", "p99", "max", "few"],
)
def test_a_percentile_is_a_value_that_was_measured(values, share, want):
    assert percentile(list(values), share) == want


def test_the_default_limits_are_half_of_the_deadlines():
    settings = RecipeSettings(seed_timeout_s=200, act_timeout_s=50, verify_timeout_s=130, close_timeout_s=8)
    assert Limits.from_settings(settings) == Limits(0.02, seed_s=100, act_s=25, verify_s=65, close_s=4)


HEALTHY = [episode() for _ in range(100)]
THRESHOLDS = {
    "all well": (run_of(HEALTHY), {}, []),
    "two of a hundred fail": (run_of([*HEALTHY[:98], *[episode("click", "browser_died")] * 2]), {}, []),
    "three of a hundred fail": (
        run_of([*HEALTHY[:97], *[episode("click", "browser_died")] * 3]),
        {},
        ["--max-failure-share"],
    ),
    "one fails, none may": (
        run_of([*HEALTHY[:99], episode("click", "browser_died")]),
        {"failure_share": 0.0},
        ["--max-failure-share"],
    ),
    "one slow seed of a hundred": (run_of([*HEALTHY[:99], episode(took={"seed": 76.0})]), {}, []),
    "two slow seeds of a hundred": (run_of([*HEALTHY[:98], *[episode(took={"seed": 76.0})] * 2]), {}, ["--max-seed-s"]),
    "slow seeds, and may be": (run_of([episode(took={"seed": 76.0})]), {"seed_s": 80.0}, []),
    "a slow observe": (run_of([episode(took={"observe": 31.0})]), {}, ["--max-act-s"]),
    "a slow click": (run_of([episode(took={"click": 31.0})]), {}, ["--max-act-s"]),
    "a slow finish": (run_of([episode(took={"finish": 31.0})]), {}, ["--max-act-s"]),
    "a slow verify": (run_of([episode(took={"verify": 76.0})]), {}, ["--max-verify-s"]),
    "a slow close": (run_of([episode(took={"close": 11.0})]), {}, ["--max-close-s"]),
    "a session left open": (
        run_of([episode("close", "server_error"), *HEALTHY[:99]]),
        {},
        ["leaked sessions"],
    ),
    "two missing at the peak": (run_of(HEALTHY, peak=98), {}, []),
    "three missing at the peak": (run_of(HEALTHY, peak=97), {}, ["concurrency"]),
    "nothing was open": (run_of([], n=1, peak=0), {}, ["concurrency"]),
    "a server that refuses": (run_of(HEALTHY, given_up=True), {}, ["servers that refuse connections"]),
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_the_verdict_names_each_threshold_that_is_broken(name):
    run, limits, want = THRESHOLDS[name]
    report = load_report(run, replace(LIMITS, **limits))
    assert [b.threshold for b in report.broken] == want
    assert report.healthy is (not want)
    for b in report.broken:
        assert b.said in "\n".join(report_lines(report)) and b.what_to_do in "\n".join(report_lines(report))


def test_every_threshold_that_is_broken_is_named_with_value_and_limit():
    slow = {"seed": 80.0, "observe": 40.0, "click": 0.1, "finish": 0.1, "verify": 90.0, "close": 12.0}
    run = run_of([episode("close", "act_timeout", slow)] * 4, peak=2, given_up=True)
    report = load_report(run, LIMITS)
    assert [(b.threshold, b.value, b.limit) for b in report.broken] == [
        ("--max-failure-share", 1.0, 0.02),
        ("--max-seed-s", 80.0, 75.0),
        ("--max-act-s", 40.0, 30.0),
        ("--max-verify-s", 90.0, 75.0),
        ("--max-close-s", 12.0, 10.0),
        ("leaked sessions", 4, 0),
        ("concurrency", 2, 4),
        ("servers that refuse connections", 1, 0),
    ]


@pytest.mark.parametrize("ended", [Ended.INTERRUPTED, Ended.TERMINATED])
def test_a_run_that_was_stopped_has_no_verdict(ended):
    report = load_report(run_of(HEALTHY, ended=ended), LIMITS)
    assert not report.healthy and report_lines(report)[-1].startswith(f"no verdict: {ended}")


def test_episodes_that_were_cut_short_are_neither_healthy_nor_failed():
    no_answer = Report(URL, SHIPPED_PAGE, "opened", cut_short=True)
    counts = load_report(run_of([episode(), episode(cut_short=True), no_answer]), LIMITS).counts
    assert (counts.begun, counts.healthy, counts.failed, counts.cut_short) == (3, 1, 0, 2)
    assert counts.seeds_given_up == 1


def test_an_error_that_comes_back_at_once_does_not_make_a_server_look_fast():
    failing = [episode("seed", "server_error", {"seed": 0.001})] * 9
    timed_out = episode("seed", "seed_timeout", {"seed": 150.0})
    seed = load_report(run_of([*failing, timed_out, episode()]), LIMITS).latencies[0]
    assert (seed.calls, seed.p50_s, seed.max_s) == (2, 0.1, 150.0)


def test_failures_are_grouped_with_an_example_and_advice_for_a_server_under_load():
    episodes = [
        episode("observe", "browser_died"),
        *[episode("seed", "seed_timeout")] * 3,
        episode("click", "browser_died"),
    ]
    failures = load_report(run_of(episodes), LIMITS).failures
    assert [(f.step, f.kind, f.count) for f in failures] == [
        ("seed", "seed_timeout", 3),
        ("observe", "browser_died", 1),
        ("click", "browser_died", 1),
    ]
    assert failures[0].example == "answer seed_timeout"
    assert "NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS" in failures[0].what_to_do and "memory" in failures[1].what_to_do


def test_the_text_and_the_json_say_the_same_numbers():
    times = [{name: (i + 1) * (j + 1) / 7 for j, name in enumerate(ACTIONS)} for i in range(37)]
    episodes = [episode(took=took) for took in times] + [episode("close", "server_error")] * 3
    report = load_report(run_of(episodes, n=41, peak=39, elapsed_s=12.34567), LIMITS)
    found = json.loads(json.dumps(report.as_json()))
    lines = report_lines(report)
    for latency, line in zip(found["latencies"], lines[1:7], strict=True):
        shown = line.split()
        assert [shown[0], int(shown[1])] == [latency["action"], latency["calls"]]
        assert [float(x) for x in shown[2:6]] == [latency[k] for k in ("p50_s", "p90_s", "p99_s", "max_s")]
    counts = found["counts"]
    assert [int(n) for n in re.findall(r"(\d+) (?:healthy,|failed|cut short)", lines[7])] == [
        counts[key] for key in ("healthy", "failed", "cut_short")
    ]
    assert f"{found['healthy_per_min']:g} healthy a minute" in lines[7]
    assert [int(n) for n in re.findall(r"\d+", lines[8])] == [
        *(counts[key] for key in ("opened", "closed", "leaked", "seeds_given_up", "peak_open")),
        found["concurrency"],
        found["seeds_at_once"],
    ]
    for b in found["broken"]:
        assert any(b["said"] in line and f"{b['limit']:g}" in line for line in lines[9:])
