"""The whole recipe on this machine: a policy learns to browse, with every real part and no GPU.

python -m cpu.demo [--seed N] [--steps N] [--resume]      what `make demo` runs; Ctrl-C stops it and all that it started
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from cpu.demo_summary import summarize, summary_text, validation_success
from cpu.gym_server import GymServer
from cpu.practice_tasks import write_rows
from cpu.processes import ProcessError, ProcessTree, require_free_port, wait_until_answers
from cpu.training_run import REPO_ROOT, RunFolder, TrainingRun
from episode_report import write_report
from report_log import NoEpisodesError

SITE_PORT = 8077
GYM_PORT = 18080
NEEDED_GIB = 9.0
"""Measured peak of trainer, engine, environment server and browsers together, rounded up."""
POLL_S = 2.0


class DemoError(RuntimeError):
    """The demo can't go on; one line that says why and what to do."""


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0 trained, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C or TERM."""
    options = _parser().parse_args(argv)
    # TERM stops the demo as Ctrl-C does: the processes that it started must not outlive it. INT is set too, because a
    # shell starts a background job with INT ignored, and Python then leaves it so.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = None
    try:
        _check_machine(options)
        folder = _run_folder(options)
        status = _run(options, folder)
    except (DemoError, ProcessError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("\ndemo: stopped; nothing is left running. Go on with: make demo RESUME=1", file=sys.stderr)
        status = 130
    if folder is not None and folder.episodes.is_dir():
        _report(folder)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cpu.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the policy's first weights and of the data order")
    parser.add_argument("--steps", type=int, default=12, help="GRPO steps (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=REPO_ROOT / "runs", help="folder of all runs")
    parser.add_argument("--resume", action="store_true", help="go on with the newest run from its last checkpoint")
    parser.add_argument("--site-port", type=int, default=SITE_PORT, help="practice site (default: %(default)s)")
    parser.add_argument("--gym-port", type=int, default=GYM_PORT, help="environment server (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, passed on to verl")
    return parser


def _run_folder(options: argparse.Namespace) -> RunFolder:
    """Return the folder of a fresh run, or with --resume the newest one. Raises DemoError if there is none."""
    if not options.resume:
        name = f"demo-{datetime.now():%Y%m%d-%H%M%S}-seed{options.seed}"
        folder = RunFolder(options.runs.resolve() / name)
        folder.root.mkdir(parents=True)
        settings = {"seed": options.seed, "steps": options.steps, "overrides": options.overrides}
        (folder.root / "demo.json").write_text(json.dumps(settings))
        return folder
    found = sorted(options.runs.resolve().glob("demo-*/demo.json"))
    if not found:
        raise DemoError(f"there is no run to resume in {options.runs}; start one with: make demo")
    settings = json.loads(found[-1].read_text())
    options.seed, options.steps = settings["seed"], settings["steps"]
    options.overrides = [*settings["overrides"], *options.overrides]
    folder = RunFolder(found[-1].parent)
    if folder.last_checkpoint() >= options.steps:
        raise DemoError(f"{folder.root} is finished ({options.steps} steps); start a new run with: make demo")
    return folder


def _check_machine(options: argparse.Namespace) -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available_gib = int(meminfo["MemAvailable"].split()[0]) / 2**20
    if available_gib < NEEDED_GIB:
        raise DemoError(f"{available_gib:.1f} GiB of memory are available, {NEEDED_GIB:g} are needed; close something")
    require_free_port(options.site_port, "the practice site (DEMO_ARGS='--site-port N')")
    require_free_port(options.gym_port, "the environment server (DEMO_ARGS='--gym-port N')")


def _run(options: argparse.Namespace, folder: RunFolder) -> int:
    started = time.monotonic()
    site_url = f"http://127.0.0.1:{options.site_port}"
    say(f"run folder {folder.root}")
    site = gym = training = None
    try:
        site = _start_site(options.site_port, folder)
        say(f"practice site on {site_url}")
        gym = GymServer(options.gym_port, folder.root / "gym_server.log")
        gym.start()
        say(f"environment server (NeMo Gym interactive_browser, real Chromium) on {gym.url}")
        _smoke(gym.url)
        _build_policy(folder, options.seed)
        folder.train_rows.parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder.train_rows, folder.validation_rows, site_url)
        overrides = [
            f"trainer.total_training_steps={options.steps}",
            f"trainer.test_freq={options.steps}",
            f"trainer.val_before_train={not options.resume or folder.last_checkpoint() == 0}",
            *options.overrides,
        ]
        training = TrainingRun(folder, gym.url, options.seed, overrides)
        training.start()
        say(f"training: verl main_ppo, {options.steps} GRPO steps; everything it prints goes to {folder.log}")
        _follow(training, gym, options.steps)
    finally:
        # A second Ctrl-C must not cut this short.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # Training first: its sessions close their browsers as long as the environment server still answers.
        for part in (training, gym, site):
            if part is not None:
                part.stop()
    figures = summarize(folder, time.monotonic() - started)
    (folder.root / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"\nsummary of seed {options.seed} (also in {folder.root / 'summary.json'})", flush=True)
    print(summary_text(figures), flush=True)
    return 0


def _report(folder: RunFolder) -> None:
    """Write the page of what the run did so far and name it; a run that is over is none the worse without one."""
    try:
        say(f"report: {write_report(folder.root)} (open it in a browser)")
    except (NoEpisodesError, OSError) as error:
        say(f"no report: {error}")


def _start_site(port: int, folder: RunFolder) -> ProcessTree:
    command = [sys.executable, "-m", "cpu.practice_site", "serve", "--port", str(port)]
    site = ProcessTree("the practice site", command, log_path=folder.root / "site.log", env=os.environ, cwd=REPO_ROOT)
    try:
        wait_until_answers(site, f"http://127.0.0.1:{port}/", 20)
    except BaseException:  # a Ctrl-C while waiting must not leave it behind either
        site.stop()
        raise
    return site


def _smoke(url: str) -> None:
    """Run one episode without a policy. Raises DemoError with what the smoke test said if it isn't healthy."""
    command = [sys.executable, "smoke_environment.py", "--url", url]
    result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise DemoError(f"the environment is not healthy: {' | '.join(result.stdout.split(chr(10))[-4:])}")
    say("environment healthy: one episode seeded, observed, acted, verified and closed")


def _build_policy(folder: RunFolder, seed: int) -> None:
    """Build and warm-start the small policy, with its progress shown; a policy that is there is kept."""
    say("policy: building and warm-starting a small Qwen3")
    command = [sys.executable, "-m", "cpu.small_policy", "--output", str(folder.policy), "--seed", str(seed)]
    result = subprocess.run(command, cwd=REPO_ROOT, check=False)
    if result.returncode != 0:
        raise DemoError(f"the policy could not be built (exit code {result.returncode}): {' '.join(command)}")


def _follow(training: TrainingRun, gym: GymServer, steps: int) -> None:
    """Show training's progress to its end; bring back an environment server that died. Raises DemoError on failure."""
    progress = Progress(training.folder, steps)
    while training.tree.exit_code is None:
        if not gym.running:
            say("the environment server died; starting it again (rollouts wait and go on in fresh sessions)")
            gym.kill()
            gym.start()
        progress.show()
        time.sleep(POLL_S)
    progress.show()
    if training.tree.exit_code != 0:
        raise DemoError(
            f"training ended with exit code {training.tree.exit_code}: {training.tree.log_tail()} "
            f"(log: {training.folder.log})"
        )


class Progress:
    """Prints what is new: each validation, each step, and every half minute how many episodes have ended."""

    def __init__(self, folder: RunFolder, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._started = self._last_line = time.monotonic()
        self._shown_steps = set(folder.metrics())
        self._shown_validations = {path.name for path in folder.validations.glob("*.jsonl")}

    def show(self) -> None:
        """Print a line for whatever happened since the last call."""
        for path in sorted(self._folder.validations.glob("*.jsonl"), key=lambda p: int(p.stem)):
            if path.name not in self._shown_validations and path.read_bytes().endswith(b"\n"):
                self._shown_validations.add(path.name)
                self._say(f"validation at step {path.stem}: success {validation_success(path)}")
        for step, data in self._folder.metrics().items():
            if step not in self._shown_steps and "browser/reward_over_valid/mean" in data:
                self._shown_steps.add(step)
                self._say(
                    f"step {step}/{self._steps}: reward {data['browser/reward_over_valid/mean']:.3f}, "
                    f"{data['timing_s/step']:.0f} s, {data['num_turns/mean'] / 2:.1f} turns an episode"
                )
        if time.monotonic() - self._last_line > 30:
            lines = sum(path.read_bytes().count(b"\n") for path in self._folder.episodes.glob("*.jsonl"))
            self._say(f"{lines} episodes so far" if lines else "starting Ray, vLLM and the trainer")

    def _say(self, text: str) -> None:
        self._last_line = time.monotonic()
        say(f"[{self._last_line - self._started:4.0f} s] {text}")


def say(text: str) -> None:
    """Print one line of progress at once."""
    print(f"demo: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
