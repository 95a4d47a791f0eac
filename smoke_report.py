"""What a load run measured, whether that is enough to train on, and both as text and as JSON.

The JSON object is a LoadReport with the fields' own names: the text is made from the same object.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from recipe_settings import RecipeSettings
from rollout_failures import FailureKind
from smoke_advice import advice_under_load
from smoke_episode import Report
from smoke_load import STOPPED, Ended, LoadPlan, LoadRun

ACTIONS = ("seed", "observe", "click", "finish", "verify", "close")
_TIMEOUTS = (FailureKind.SEED_TIMEOUT, FailureKind.ACT_TIMEOUT, FailureKind.VERIFY_TIMEOUT)
MAX_FAILURE_SHARE = 0.02
"""Failed episodes over episodes that were healthy or failed."""
SHARE_OF_DEADLINE = 0.5
"""The slowest per cent may take this much of the deadline that a training gives up at."""


@dataclass(frozen=True)
class Limits:
    """The thresholds of the verdict; seconds are those of the 99th percentile."""

    failure_share: float
    seed_s: float
    act_s: float
    """Of observe, click and finish."""
    verify_s: float
    close_s: float

    @classmethod
    def from_settings(cls, settings: RecipeSettings) -> "Limits":
        """Return the default thresholds: half of the deadline of each call."""
        deadlines = (
            settings.seed_timeout_s,
            settings.act_timeout_s,
            settings.verify_timeout_s,
            settings.close_timeout_s,
        )
        return cls(MAX_FAILURE_SHARE, *(SHARE_OF_DEADLINE * deadline_s for deadline_s in deadlines))

    def of(self, action: str) -> float:
        """Return the limit of an action's 99th percentile."""
        return {"seed": self.seed_s, "verify": self.verify_s, "close": self.close_s}.get(action, self.act_s)


@dataclass(frozen=True)
class Latency:
    """Seconds that one action took, over those that went well and those given up on at their deadline.

    An error that comes back at once would make a broken server look fast, so other failures are left out. A click
    includes the observe that follows where the click's own answer still showed the old page.
    """

    action: str
    calls: int
    p50_s: float | None
    """Nearest rank, as the other percentiles: a time that was measured; None without calls."""
    p90_s: float | None
    p99_s: float | None
    max_s: float | None


@dataclass(frozen=True)
class FailureGroup:
    """Failures of one kind at one step."""

    step: str
    kind: str
    count: int
    example: str
    """What the server answered the first time."""
    url: str
    """The server of that example."""
    start_page: str
    """The start page of that example."""
    what_to_do: str


@dataclass(frozen=True)
class Counts:
    """Episodes and sessions, of all servers or of one."""

    begun: int
    """Episodes whose seed was sent."""
    healthy: int
    failed: int
    cut_short: int
    """Neither healthy nor failed, since the run was stopped."""
    opened: int
    """Sessions whose seed was answered."""
    closed: int
    """Sessions whose close was answered."""
    leaked: int
    """Opened minus closed."""
    seeds_given_up: int
    """Seeds without an answer until their deadline or the run's end: each may keep a browser open in the server."""
    peak_open: int
    """Most sessions open at once: the highest concurrency that held."""


@dataclass(frozen=True)
class ServerReport:
    """One server's part."""

    url: str
    concurrency: int
    """Its share of the sessions that were to be open at once."""
    given_up: bool
    """It refused so many connections in a row that it got no more."""
    counts: Counts
    seed: Latency


@dataclass(frozen=True)
class Broken:
    """One threshold that does not hold."""

    threshold: str
    value: float | None
    limit: float
    said: str
    what_to_do: str


@dataclass(frozen=True)
class LoadReport:
    """The outcome of a run. Shares are from 0 to 1, times in seconds."""

    healthy: bool
    """Every threshold holds, and nobody stopped the run."""
    ended: str
    """episodes: all were played; duration; refused: no server took connections; interrupted; terminated."""
    concurrency: int
    """Sessions that were to be open at once."""
    seeds_at_once: int
    planned: int
    """Episodes that were to be played."""
    elapsed_s: float
    healthy_per_min: float
    failure_share: float | None
    """None while no episode was healthy or failed."""
    counts: Counts
    latencies: tuple[Latency, ...]
    failures: tuple[FailureGroup, ...]
    servers: tuple[ServerReport, ...]
    limits: Limits
    broken: tuple[Broken, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report for machines."""
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values does not exceed, or None of none."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else None


def load_report(run: LoadRun, limits: Limits) -> LoadReport:
    """Return what a run measured, held against the limits."""
    counts = _counts(run.episodes, run.peak_open)
    counted = counts.healthy + counts.failed
    servers = tuple(
        ServerReport(s.url, s.concurrency, s.given_up, _counts(own, s.peak_open), _latency("seed", own))
        for s in run.servers
        for own in [[report for report in run.episodes if report.url == s.url]]
    )
    report = LoadReport(
        healthy=False,
        ended=str(run.ended),
        concurrency=run.plan.concurrency,
        seeds_at_once=run.plan.seeds_at_once,
        planned=run.plan.episodes,
        elapsed_s=round(run.elapsed_s, 3),
        healthy_per_min=round(60 * counts.healthy / max(run.elapsed_s, 1e-9), 2),
        failure_share=round(counts.failed / counted, 4) if counted else None,
        counts=counts,
        latencies=tuple(_latency(action, run.episodes) for action in ACTIONS),
        failures=_failures(run.episodes),
        servers=servers,
        limits=limits,
        broken=(),
    )
    broken = tuple(_broken(report, run.plan))
    return replace(report, broken=broken, healthy=not broken and run.ended not in STOPPED)


def _counts(episodes: Sequence[Report], peak_open: int) -> Counts:
    opened, closed = sum(r.opened for r in episodes), sum(r.closed for r in episodes)
    failed = sum(not r.healthy for r in episodes)
    # A close that was still under way at the end of the run counts as leaked, and its episode as cut short.
    cut_short = sum(r.healthy and (r.cut_short or not r.closed) for r in episodes)
    given_up = sum(r.kind == FailureKind.SEED_TIMEOUT or not r.steps for r in episodes)
    healthy = len(episodes) - failed - cut_short
    return Counts(len(episodes), healthy, failed, cut_short, opened, closed, opened - closed, given_up, peak_open)


def _latency(action: str, episodes: Iterable[Report]) -> Latency:
    times = [s.elapsed_s for r in episodes for s in r.steps if s.name == action and (s.ok or s.kind in _TIMEOUTS)]
    marks = (percentile(times, 0.5), percentile(times, 0.9), percentile(times, 0.99), percentile(times, 1.0))
    return Latency(action, len(times), *(None if mark is None else round(mark, 3) for mark in marks))


def _failures(episodes: Iterable[Report]) -> tuple[FailureGroup, ...]:
    """Return the failures by step and kind, the most frequent first."""
    groups: dict[tuple[str | None, str], list[Report]] = {}
    for report in episodes:
        if not report.healthy:
            groups.setdefault((report.failed_step, report.kind), []).append(report)
    return tuple(
        FailureGroup(
            step or "",
            kind,
            len(reports),
            reports[0].answered,
            reports[0].url,
            reports[0].start_page,
            advice_under_load(FailureKind(kind)),
        )
        for (step, kind), reports in sorted(groups.items(), key=lambda item: -len(item[1]))
    )


_FEWER_SESSIONS = "lower NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS, or add servers or CPU"
_FEWER_SEEDS = "lower NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS, or add servers or CPU"
_LATENCY = {
    "seed": ("--max-seed-s", "NEMO_GYM_BROWSER_SEED_TIMEOUT_S", _FEWER_SEEDS),
    "observe": ("--max-act-s", "NEMO_GYM_BROWSER_ACT_TIMEOUT_S", _FEWER_SESSIONS),
    "click": ("--max-act-s", "NEMO_GYM_BROWSER_ACT_TIMEOUT_S", _FEWER_SESSIONS),
    "finish": ("--max-act-s", "NEMO_GYM_BROWSER_ACT_TIMEOUT_S", _FEWER_SESSIONS),
    "verify": ("--max-verify-s", "NEMO_GYM_BROWSER_VERIFY_TIMEOUT_S", _FEWER_SEEDS),
    "close": ("--max-close-s", "NEMO_GYM_BROWSER_CLOSE_TIMEOUT_S", _FEWER_SESSIONS),
}


def _broken(report: LoadReport, plan: LoadPlan) -> Iterable[Broken]:
    counts, limits = report.counts, report.limits
    share = report.failure_share
    if share is not None and share > limits.failure_share:
        said = f"{counts.failed} of {counts.healthy + counts.failed} episodes failed: a share of {share:.4g}"
        worst = f"begin with the most frequent failure, {report.failures[0].kind} at {report.failures[0].step}"
        yield Broken("--max-failure-share", share, limits.failure_share, said, worst)
    for latency in report.latencies:
        option, variable, what_to_do = _LATENCY[latency.action]
        limit_s = limits.of(latency.action)
        if latency.p99_s is not None and latency.p99_s > limit_s:
            said = f"the 99th percentile of {latency.action} is {latency.p99_s:.3f} s"
            beyond = f"{what_to_do}; only if it must be that slow, raise {variable} and with it this limit"
            yield Broken(option, latency.p99_s, limit_s, said, beyond)
    if counts.leaked:
        said = f"{counts.leaked} of {counts.opened} sessions were not closed"
        hung = "look for hung browsers on the server's machine and restart the server: each costs it 160 to 500 MiB"
        yield Broken("leaked sessions", counts.leaked, 0, said, hung)
    # As many may be missing as may fail; a training would have its share of them open nevertheless.
    least = math.ceil(plan.concurrency * (1 - limits.failure_share))
    if counts.peak_open < max(least, 1):
        said = f"at most {counts.peak_open} of {plan.concurrency} sessions were open at once"
        yield Broken("concurrency", counts.peak_open, max(least, 1), said, _how_to_open_more(report))
    refusing = [server.url for server in report.servers if server.given_up]
    if refusing:
        said = f"{', '.join(refusing)} refused one connection after the other and was left out"
        start = "start it, or take it out of NEMO_GYM_URL"
        yield Broken("servers that refuse connections", len(refusing), 0, said, start)


def _how_to_open_more(report: LoadReport) -> str:
    if report.ended == Ended.DURATION and not report.counts.failed:
        return "raise --duration or --seeds-at-once, so that all of them can open in time"
    return (
        "find out from the failures why sessions did not open, or set NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS to what held"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def report_lines(report: LoadReport) -> list[str]:
    """Return the report for people: what was measured, then the verdict."""
    c = report.counts
    lines = [f"{'seconds':<8} {'calls':>6} {'p50':>8} {'p90':>8} {'p99':>8} {'max':>8} {'limit':>8} (p99)"]
    for m in report.latencies:
        marks = " ".join(f"{_seconds(mark):>8}" for mark in (m.p50_s, m.p90_s, m.p99_s, m.max_s))
        lines.append(f"{m.action:<8} {m.calls:>6} {marks} {report.limits.of(m.action):>8g}")
    lines.append(
        f"episodes {c.healthy} healthy, {c.failed} failed, {c.cut_short} cut short, of {report.planned} planned, "
        f"in {report.elapsed_s:.1f} s: {report.healthy_per_min:g} healthy a minute (ended by: {report.ended})"
    )
    lines.append(
        f"sessions {c.opened} opened, {c.closed} closed, {c.leaked} leaked, {c.seeds_given_up} seeds given up on; "
        f"highest concurrency that held: {c.peak_open} of {report.concurrency}, {report.seeds_at_once} seeds at once"
    )
    if len(report.servers) > 1:
        lines += [_server_line(server) for server in report.servers]
    advised: set[str] = set()
    for f in report.failures:
        lines.append(f"failure  {f.count} times {f.kind} at {f.step}, first at {f.url} with {f.start_page}")
        lines.append(f"  answered: {f.example}")
        if f.what_to_do not in advised:  # a dead server fails many steps with one and the same advice
            lines.append(f"  what to do: {f.what_to_do}")
        advised.add(f.what_to_do)
    return lines + _verdict_lines(report)


def _server_line(server: ServerReport) -> str:
    c = server.counts
    left_out = ", left out: it refuses connections" if server.given_up else ""
    return (
        f"server   {server.url}: {c.healthy} healthy, {c.failed} failed, {c.leaked} leaked; held {c.peak_open} of "
        f"{server.concurrency}; seed p50 {_seconds(server.seed.p50_s)} p99 {_seconds(server.seed.p99_s)}{left_out}"
    )


def _verdict_lines(report: LoadReport) -> list[str]:
    where = ", ".join(server.url for server in report.servers)
    if report.ended in STOPPED:
        return [f"no verdict: {report.ended} before the check of {where} was over; the numbers are those so far"]
    if report.healthy:
        return [f"healthy: {where} held {report.counts.peak_open} open at once"]
    lines = [f"unhealthy: {where}"]
    for broken in report.broken:
        bound = "at least" if broken.threshold == "concurrency" else "at most"
        lines.append(f"  {broken.said}; {broken.threshold}: {bound} {broken.limit:g} is healthy")
        lines.append(f"    what to do: {broken.what_to_do}")
    return lines
