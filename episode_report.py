"""What happened in a training run: one HTML page made from its episode log, or a view that follows it in a terminal.

    python episode_report.py RUN_DIR [-o report.html]     the page; needs no network, may be made while training runs
    python episode_report.py RUN_DIR --follow             steps, success, failures, sessions, what is stuck; Ctrl-C ends

RUN_DIR is a run's folder with `episodes/` in it (`--episodes DIR` for a log elsewhere).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from report_details import choose, embed
from report_figures import Attempt, figures_of, new_attempts
from report_log import EpisodeFiles, NoEpisodesError, find_episodes
from report_metrics import read_sessions
from whole_file import write_whole

DETAILS = 300


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 page written or followed to the end, 1 nothing to report, 2 wrong usage."""
    options = _parser().parse_args(argv)
    if not options.run.is_dir():
        print(f"episode_report: error: {options.run} is no folder; name a run's folder", file=sys.stderr)
        return 2
    if options.follow:
        from report_follow import follow  # rich is needed here alone

        return follow(options.run, options.episodes, options.interval)
    try:
        output = write_report(options.run, options.output, options.episodes, options.details, options.include)
    except NoEpisodesError as error:
        print(f"episode_report: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"episode_report: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(output)
    return 0


def write_report(
    run: Path,
    output: Path | None = None,
    episodes: Path | None = None,
    details: int = DETAILS,
    include: Sequence[str] = (),
) -> Path:
    """Write a run's page, in one step, and return its path (`report.html` in the run's folder if none is given).

    Raises NoEpisodesError if there is no attempt to report, OSError if a file can't be read or written.
    """
    from report_page import Report, render  # matplotlib takes a second to import

    files = EpisodeFiles(find_episodes(run, episodes))
    attempts = read_attempts(files)
    if not attempts:
        raise NoEpisodesError(f"{files.folder} holds no attempt yet ({files.unreadable} lines can't be read)")
    report = Report(
        run=run.resolve().name,
        attempts=attempts,
        figures=figures_of(attempts),
        files=files,
        half_lines=files.half_lines(),
        details=embed(files, attempts, choose(attempts, details, include)),
        sessions=read_sessions(run),
    )
    output = output or run / "report.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    # Half a surrogate pair, which a policy can write, is no text that a file can hold.
    write_whole(output, render(report).encode("utf-8", "replace"))
    return output


def read_attempts(files: EpisodeFiles) -> list[Attempt]:
    """Return what the report keeps of every line, in the order of the attempts' ends."""
    with tqdm(total=files.unread_bytes(), unit="B", unit_scale=True, desc="reading", disable=None, delay=1) as bar:
        attempts = list(new_attempts(files, bar.update))
    return sorted(attempts, key=lambda attempt: attempt.ended_at)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="episode_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of a run, with `episodes/` in it")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: RUN_DIR/report.html)")
    parser.add_argument("--episodes", type=Path, metavar="DIR", help="the episode log, if it lies elsewhere")
    parser.add_argument(
        "--details",
        type=_whole_number,
        default=DETAILS,
        metavar="N",
        help="episodes that the page holds turn by turn (default: %(default)s)",
    )
    parser.add_argument(
        "--include", action="append", default=[], metavar="UID_OR_TASK", help="hold these turn by turn first"
    )
    parser.add_argument("--follow", action="store_true", help="follow the run in the terminal instead")
    parser.add_argument(
        "--interval", type=_seconds, default=5.0, metavar="S", help="of --follow, seconds (default: %(default)s)"
    )
    return parser


def _whole_number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
