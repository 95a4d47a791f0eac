"""What a training needs besides GPUs and an environment, checked before either is used.

    python preflight.py --nodes N -- ARGUMENTS OF verl.trainer.main_ppo     exit 0: all is well; 1: it is not; 2: usage

Settings, the recipe's own files, verl's release and the patches, the rows, the config with all its overrides (composed
by verl's own entry point), and the folder for the results. Every check runs, so that one submission shows every fault.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe_settings import LaunchSettings, RecipeSettings, SettingsError
from rollout_rows import FileRows, read_file

RECIPE = Path(__file__).resolve().parent
COMPOSE_TIMEOUT_S = 300
"""verl's entry point imports torch and vLLM first, which takes minutes from a cold network file system."""
SHOWN_PROBLEMS = 20


class PreflightError(Exception):
    """A check failed; the text says what is wrong and what to do."""


def check_settings() -> list[str]:
    """Return a line on the settings. Raises PreflightError naming every variable that is missing or unusable."""
    problems: list[str] = []
    recipe, launch = _settings(RecipeSettings, problems), _settings(LaunchSettings, problems)
    if launch is not None:
        problems += launch.missing()
    if launch is not None and recipe is not None:
        if launch.start_environment and recipe.environment_url:
            problems.append("START_ENVIRONMENT and NEMO_GYM_URL are both set: leave one of them empty")
        if not launch.start_environment and not recipe.environment_url:
            problems.append("NEMO_GYM_URL is not set, and neither is START_ENVIRONMENT: set one of them")
    if problems:
        raise PreflightError("\n".join(problems))
    return [f"run {launch.run_name} in {launch.results_root}"]


def _settings(kind: type, problems: list[str]):
    try:
        return kind.from_env()
    except SettingsError as error:
        problems += [line.strip() for line in str(error).splitlines()[1:]]
        return None


def check_verl() -> list[str]:
    """Return what is installed and a line per patch. Raises PreflightError for another release or a refused patch."""
    pinned = re.search(r"^VERL_RELEASE=verl==(\S+)$", (RECIPE / "REQUIRED_VERL.txt").read_text(), re.MULTILINE)[1]
    try:
        found = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise PreflightError(f"{sys.executable} has no verl: set TRAIN_PYTHON to the Python that has it") from None
    if found != pinned:
        raise PreflightError(f"verl {found} is installed, REQUIRED_VERL.txt pins {pinned}: install that release")
    done = subprocess.run(
        [sys.executable, RECIPE / "patches.py", "--check", "--json"],
        capture_output=True,
        text=True,
        timeout=COMPOSE_TIMEOUT_S,
    )
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise PreflightError(f"patches.py --check ended with exit code {done.returncode}:\n{_tail(done.stderr)}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if not answer["ok"]:
        raise PreflightError("a patch of verl is refused; run: python patches.py --check")
    if not answer["hook_at_interpreter_start"]:
        raise PreflightError(f"sitecustomize.py did not run: {RECIPE} must be the first folder on PYTHONPATH")
    return [f"verl {found}, {len(answer['patches'])} patched names"]


def check_rows(launch: LaunchSettings, recipe: RecipeSettings) -> list[str]:
    """Return a line per row file. Raises PreflightError with every fault, or when judged rows have no judge."""
    lines, problems = [], []
    for variable, path in (("TRAIN_FILE", launch.train_file), ("VAL_FILE", launch.val_file)):
        file = read_file(path)
        problems += _row_problems(variable, file, recipe)
        scored = ", ".join(f"{name} {count}" for name, count in file.scored_by.items())
        lines.append(f"{variable} {path}: {len(file.rows)} rows (scored by: {scored or '-'})")
    if problems:
        raise PreflightError("\n".join(problems))
    return lines


def _row_problems(variable: str, file: FileRows, recipe: RecipeSettings) -> list[str]:
    problems = [f"{variable}: {problem}" for problem in file.problems[:SHOWN_PROBLEMS]]
    if len(file.problems) > SHOWN_PROBLEMS:
        problems.append(f"{variable}: {len(file.problems) - SHOWN_PROBLEMS} more; see: python dataset.py {file.file}")
    judged = [row for row in file.rows if row.scoring.judged]
    if judged and recipe.judge_url is None:
        problems.append(
            f"{variable}: {judged[0].file}:{judged[0].line} and {len(judged) - 1} more rows need a judge, and none is "
            "configured: set NEMO_GYM_BROWSER_JUDGE_URL and NEMO_GYM_BROWSER_JUDGE_MODEL"
        )
    return problems


def compose(arguments: Sequence[str]) -> DictConfig:
    """Return the config of a training as verl's own entry point composes it. Raises PreflightError with its words."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments, "--cfg", "job"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise PreflightError(f"composing the config took more than {COMPOSE_TIMEOUT_S} s") from None
    if done.returncode:
        raise PreflightError(f"verl does not take the config:\n{_tail(done.stderr)}")
    try:
        return OmegaConf.create(done.stdout)
    except OmegaConfBaseException as error:
        raise PreflightError(f"verl printed a config that can't be read: {error}") from error


def check_config(config: DictConfig, nodes: int, launch: LaunchSettings, recipe: RecipeSettings) -> list[str]:
    """Return what this training will do. Raises PreflightError when it can't fit the job or would save nothing."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    problems = []
    if (trainer.nnodes, trainer.n_gpus_per_node) != (nodes, launch.gpus_per_node):
        problems.append(
            f"the config asks for {trainer.nnodes} node(s) of {trainer.n_gpus_per_node} GPU(s), the job gives {nodes} "
            f"of {launch.gpus_per_node}: leave trainer.nnodes and trainer.n_gpus_per_node to the script"
        )
    if trainer.save_freq <= 0:
        problems.append(f"trainer.save_freq={trainer.save_freq}: no checkpoint would be written; set it above 0")
    if problems:
        raise PreflightError("\n".join(problems))
    rollouts = config.data.train_batch_size * rollout.n
    sessions = min(rollouts, recipe.max_open_sessions)
    waves = -(-rollouts // sessions)
    return [
        f"{rollouts} rollouts a step on {nodes * launch.gpus_per_node} GPU(s), {sessions} sessions at once: "
        f"{waves} episode(s) one after another",
        _starts_from(Path(trainer.default_local_dir)),
    ]


def _starts_from(checkpoints: Path) -> str:
    """Return where the training will begin. Raises PreflightError when the newest checkpoint is not there."""
    marker = checkpoints / "latest_checkpointed_iteration.txt"
    if not marker.exists():
        return f"starts at step 1: no checkpoint in {checkpoints}"
    step = marker.read_text().strip()
    if not (checkpoints / f"global_step_{step}").is_dir():
        raise PreflightError(
            f"{marker} names step {step}, but there is no global_step_{step} beside it. Fix: write a step that is "
            "there into that file, or move the file away to start at step 1"
        )
    return f"resumes at step {step} of {checkpoints}"


def check_results(launch: LaunchSettings) -> list[str]:
    """Return nothing when the run's folder can be written. Raises PreflightError."""
    folder = launch.results_root / launch.run_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PreflightError(f"RESULTS_ROOT: {folder} can't be written: {error.strerror}") from error
    return []


def _tail(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-SHOWN_PROBLEMS:])


def main(argv: list[str] | None = None) -> int:
    """Run every check and print a line each. Return 0 when all is well, else 1; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="preflight.py", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, required=True, help="nodes that train")
    parser.add_argument("arguments", nargs="+", help="after --: the arguments of verl.trainer.main_ppo")
    arguments = parser.parse_args(argv)
    failed = []

    def run(name: str, check: Callable[[], list[str]]) -> bool:
        try:
            lines = check()
        except PreflightError as error:
            failed.append(name)
            print(f"preflight: {name} FAILED", flush=True)
            for line in str(error).splitlines():
                print(f"  {line}", flush=True)
            return False
        print(f"preflight: {name} ok{''.join(f'; {line}' for line in lines)}", flush=True)
        return True

    if run("settings", check_settings):
        launch, recipe = LaunchSettings.from_env(), RecipeSettings.from_env()
        # Two programs that import all of verl, side by side.
        with ThreadPoolExecutor(max_workers=1) as pool:
            config = pool.submit(compose, arguments.arguments)
            run("verl", check_verl)
        run("rows", lambda: check_rows(launch, recipe))
        run("results", lambda: check_results(launch))
        run("config", lambda: check_config(config.result(), arguments.nodes, launch, recipe))
    else:
        run("verl", check_verl)
    if failed:
        print(f"preflight: not started; failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
