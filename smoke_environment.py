"""Is this environment healthy? One episode over the HTTP contract without a policy, or as many at once as in training.

    python smoke_environment.py --url http://HOST:PORT                      one episode on each server
    python smoke_environment.py --url http://A:1,http://B:1 --concurrency   NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS at once
    python smoke_environment.py --replay FILE                               serves a recorded attempt: episode_replay.py

exit 0: healthy; 1: unhealthy; 2: wrong usage; 130 and 143: stopped by Ctrl-C or TERM. smoke_episode.py says what an
episode does, smoke_load.py how many of them run at once, smoke_report.py what is measured and when it is healthy.
"""

import argparse
import asyncio
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from tqdm import tqdm

import episode_replay
from recipe_settings import RecipeSettings, SettingsError
from rollout_rows import start_page_problem
from setting_kinds import Urls, checked
from smoke_episode import SHIPPED_PAGE, Report, check
from smoke_load import Ended, LoadPlan, Progress, run_load
from smoke_report import MAX_FAILURE_SHARE, Limits, load_report, report_lines

__all__ = ["SHIPPED_PAGE", "check", "main"]

TIMEOUT_S = 180.0
DURATION_S = 600.0
BAR_EVERY_S = 0.5
LINE_EVERY_S = 10.0
OTHER_FILES = 64
"""Open files of this process besides one connection for each session: Python's own, and those between two states."""
OF_SETTINGS = object()
"""--concurrency without a number."""
EXIT_CODES = {Ended.INTERRUPTED: 130, Ended.TERMINATED: 143}


@dataclass(frozen=True)
class Usage:
    """What the command line asks for."""

    servers: tuple[str, ...]
    start_pages: tuple[str, ...]
    timeout_s: float
    json: bool
    plan: LoadPlan | None
    """None: single episodes."""
    limits: Limits | None
    """The thresholds of a plan's verdict."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smoke_environment.py",
        description="Run one episode against each live interactive_browser server, or many at once.",
        epilog="--replay FILE [--port P] serves a recorded attempt instead. "
        "Exit code 0: healthy; 1: unhealthy; 2: wrong usage; 130, 143: stopped by Ctrl-C or TERM.",
    )
    parser.add_argument("--url", metavar="URL[,URL...]", help="the servers' addresses (default: NEMO_GYM_URL)")
    parser.add_argument(
        "--initial-url", nargs="+", metavar="U", help="observe these pages and finish (default: the shipped page)"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help=f"seconds for one episode (default {TIMEOUT_S:g})")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of lines (keys: Report in smoke_episode.py, LoadReport in smoke_report.py)",
    )
    _add_load_options(parser)
    _add_thresholds(parser)
    return parser


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group(
        "under load",
        "Deadlines are those of the training: NEMO_GYM_BROWSER_SEED_TIMEOUT_S, _ACT_, _VERIFY_ and _CLOSE_TIMEOUT_S. "
        "Totals are split evenly over the servers. A run is over one episode's longest course after --duration at the "
        "latest, 580 s with the default deadlines.",
    )
    load.add_argument(
        "--concurrency",
        type=int,
        nargs="?",
        const=OF_SETTINGS,
        metavar="N",
        help="hold N sessions open at once (without N: NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS)",
    )
    load.add_argument("--episodes", type=int, metavar="M", help="episodes in all (default: N)")
    load.add_argument(
        "--duration", type=float, metavar="S", help=f"begin no episode after S seconds (default {DURATION_S:g})"
    )
    load.add_argument(
        "--seeds-at-once",
        type=int,
        metavar="K",
        help="seeds and verifies under way at once (default: NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS)",
    )


def _add_thresholds(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group(
        "thresholds under load",
        "Besides these, no session may be left open, no server may refuse connection after connection, and N less the "
        "share that may fail must have been open at once.",
    )
    limits.add_argument(
        "--max-failure-share",
        type=float,
        metavar="X",
        help=f"failed episodes, as a share of all (default {MAX_FAILURE_SHARE})",
    )
    for name, what in (
        ("seed", "seed"),
        ("act", "observe, click and finish"),
        ("verify", "verify"),
        ("close", "close"),
    ):
        limits.add_argument(
            f"--max-{name}-s",
            type=float,
            metavar="S",
            help=f"99th percentile of {what} (default: half of NEMO_GYM_BROWSER_{name.upper()}_TIMEOUT_S)",
        )


LOAD_ONLY = ("episodes", "duration", "seeds_at_once", *(f"max_{f.name}" for f in fields(Limits)))


def _parsed(argv: list[str] | None) -> Usage:
    """Return what the command line asks for; leaves with exit code 2 on wrong usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _check_numbers(parser, arguments)
    pages = tuple(arguments.initial_url or (SHIPPED_PAGE,))
    for page in pages:
        problem = start_page_problem(page)
        if problem:
            parser.error(f"--initial-url {problem[0]}: {problem[1]}")
    under_load = arguments.concurrency is not None
    try:
        # A single check of a given address needs no setting, and so works where they are still wrong.
        settings = RecipeSettings.from_env() if under_load or not arguments.url else RecipeSettings()
        servers = _server_list(arguments.url or settings.environment_url or settings.require_environment_url())
    except SettingsError as e:
        parser.error(
            f"no usable address or settings ({'--url ' + repr(arguments.url) if arguments.url else 'no --url'}). {e}"
        )
    timeout_s = arguments.timeout or TIMEOUT_S
    if not under_load:
        return Usage(servers, pages, timeout_s, arguments.json, None, None)
    concurrency = settings.max_open_sessions if arguments.concurrency is OF_SETTINGS else arguments.concurrency
    plan = LoadPlan(
        servers=servers,
        start_pages=pages,
        concurrency=concurrency,
        episodes=arguments.episodes or concurrency,
        duration_s=arguments.duration or DURATION_S,
        seeds_at_once=arguments.seeds_at_once or settings.max_concurrent_seeds,
        settings=settings,
    )
    problem = plan.problem() or _file_problem(concurrency)
    if problem:
        parser.error(problem)
    given = {f.name: getattr(arguments, f"max_{f.name}") for f in fields(Limits)}
    limits = replace(Limits.from_settings(settings), **{k: v for k, v in given.items() if v is not None})
    return Usage(servers, pages, timeout_s, arguments.json, plan, limits)


def _check_numbers(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Leave with exit code 2 on a number out of its range, or an option that has no meaning here."""
    for name in ("timeout", "duration", "max_seed_s", "max_act_s", "max_verify_s", "max_close_s"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value}: must be a number of seconds above 0")
    for name in ("episodes", "seeds_at_once"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be a whole number of at least 1")
    if arguments.concurrency not in (None, OF_SETTINGS) and arguments.concurrency < 1:
        parser.error(f"--concurrency {arguments.concurrency}: must be a whole number of at least 1")
    share = arguments.max_failure_share
    if share is not None and not 0 <= share < 1:
        parser.error(f"--max-failure-share {share}: must be from 0 to below 1")
    if arguments.concurrency is None:
        for name in LOAD_ONLY:
            if getattr(arguments, name) is not None:
                parser.error(f"--{name.replace('_', '-')}: goes with --concurrency only")
    elif arguments.timeout is not None:
        parser.error("--timeout: not with --concurrency, whose calls have the deadlines of the settings")


def _server_list(text: str) -> tuple[str, ...]:
    """Return the addresses of a comma-separated list. Raises SettingsError on one that is wrong or named twice."""
    # Not by RecipeSettings, which wants a share of the caps for each: --seeds-at-once may stand in their place.
    try:
        return tuple(checked(text, Urls).split(","))
    except ValueError as error:
        raise SettingsError(f"{text!r}: {error}") from None


def _file_problem(concurrency: int) -> str | None:
    """Return why this process can't have so many connections, or None once it may.

    Without this, a limit of this process would be reported as connections that the environment refuses.
    """
    need = concurrency + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return None
    if hard != resource.RLIM_INFINITY and hard < need:
        return f"--concurrency {concurrency}: needs {need} open files, and this process may have {hard} (ulimit -Hn)"
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    return None


def _check_singly(usage: Usage) -> int:
    """Run one episode for each server and page and print how it went; return the exit code."""

    def say(line: str) -> None:
        if not usage.json:
            print(line, flush=True)

    reports: list[Report] = []
    for url in usage.servers:
        for page in usage.start_pages:
            reports.append(asyncio.run(check(url, page, usage.timeout_s, say)))
            for line in _outcome(reports[-1]):
                say(line)
    healthy = all(report.healthy for report in reports)
    if usage.json:
        found = [report.as_json() for report in reports]
        print(json.dumps(found[0] if len(found) == 1 else {"healthy": healthy, "checks": found}))
    return 0 if healthy else 1


def _outcome(report: Report) -> list[str]:
    if report.healthy:
        return [f"healthy: {report.url} ({report.checked})"]
    return [
        f"unhealthy: step `{report.failed_step}` failed at {report.url} ({report.kind})",
        f"  answered: {report.answered}",
        f"  what to do: {report.advice}",
    ]


def _check_under_load(usage: Usage) -> int:
    """Run the plan and print what it measured; return the exit code."""
    with _progress_shown(usage.plan.episodes) as (watch, every_s):
        run = asyncio.run(run_load(usage.plan, watch, every_s))
    report = load_report(run, usage.limits)
    if usage.json:
        print(json.dumps(report.as_json()))
    else:
        print("\n".join(report_lines(report)))
    return EXIT_CODES.get(run.ended, 0 if report.healthy else 1)


@contextmanager
def _progress_shown(episodes: int) -> Iterator[tuple[Callable[[Progress], None], float]]:
    """Return what shows a Progress on stderr, and how often: a bar on a terminal, else lines, as for a job's log."""
    if not sys.stderr.isatty():
        yield (lambda progress: print(_progress_line(progress), file=sys.stderr, flush=True)), LINE_EVERY_S
        return
    with tqdm(total=episodes, unit="episode", file=sys.stderr) as bar:

        def show(progress: Progress) -> None:
            bar.n = progress.healthy + progress.failed
            bar.set_postfix_str(f"{progress.open} open, {progress.failed} failed")

        yield show, BAR_EVERY_S


def _progress_line(progress: Progress) -> str:
    return (
        f"{progress.elapsed_s:.0f} s: {progress.healthy + progress.failed} of {progress.planned} episodes, "
        f"{progress.failed} failed, {progress.open} sessions open"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the check and print it. Return 0 when healthy, 1 when not; wrong usage exits with 2."""
    given = sys.argv[1:] if argv is None else argv
    if any(text.partition("=")[0] == "--replay" for text in given):
        return episode_replay.main(given)
    usage = _parsed(given)
    try:
        return _check_singly(usage) if usage.plan is None else _check_under_load(usage)
    except KeyboardInterrupt:
        print("Stopped before the check was over.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
