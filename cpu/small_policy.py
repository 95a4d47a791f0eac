"""Builds the small policy of the CPU profile, and measures it on the simulated practice site.

    python -m cpu.small_policy --output DIR --seed 0 [--long-episodes]
    python -m cpu.small_policy evaluate DIR
    python -m cpu.small_policy evaluate DIR --long-episodes --context-policy window --budget 200

The output is an ordinary Hugging Face folder (Qwen3, fp32, about half a million parameters).
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from context_policy import ContextPolicy
from cpu.demonstrations import demonstration
from cpu.long_context import ContextLimits, Rendering
from cpu.long_demonstrations import LONG_HABITS, LongDemonstrations, build_long_tokenizer
from cpu.long_evaluation import LongFigures, long_figures, play_long_policy
from cpu.long_tasks import make_orders
from cpu.policy_evaluation import play_policy, success_by_kind
from cpu.policy_tokenizer import build_tokenizer, chat_template, tool_schema
from cpu.practice_pages import Split
from cpu.practice_tasks import make_tasks
from cpu.warm_start import WarmStartSettings, build_model, warm_start

RECEIPT = "warm_start.json"
"""Written into the folder last, so a folder that has it is complete."""

_CODE = (
    "demonstrations", "long_context", "long_demonstrations", "long_tasks", "policy_tokenizer", "practice_browser",
    "practice_pages", "practice_tasks", "small_policy", "warm_start",
)  # fmt: skip
_TEXTS = ("browser_prompts.py", "context_policy.py")
_BASE_URL = "http://127.0.0.1:8077"
_LONG_STEPS = {"flawless_steps": 320, "sloppy_steps": 80}


def policy_settings(seed: int = 0, threads: int = WarmStartSettings.threads, long: bool = False) -> WarmStartSettings:
    """Return the settings of the policy that plays the short tasks, or of the one for long episodes."""
    if not long:
        return WarmStartSettings(seed=seed, threads=threads)
    return WarmStartSettings(seed=seed, threads=threads, habits=LONG_HABITS, **_LONG_STEPS)


def settings_hash(settings: WarmStartSettings, long: bool = False) -> str:
    """Return a digest of all that the built policy depends on: settings, code, prompts, tool schema."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in (*(folder / f"{name}.py" for name in _CODE), *(folder.parent / name for name in _TEXTS)):
        digest.update(path.read_bytes())
    parts = [dataclasses.asdict(settings), long, tool_schema(), chat_template(), torch.__version__]
    digest.update(json.dumps(parts, sort_keys=True).encode())
    return digest.hexdigest()


def is_built(output: Path, settings: WarmStartSettings, long: bool = False) -> bool:
    """Return whether the folder already holds the policy of these settings."""
    receipt = output / RECEIPT
    if not receipt.is_file():
        return False
    return json.loads(receipt.read_text(encoding="utf-8")).get("settings_hash") == settings_hash(settings, long)


def build_policy(output: Path, settings: WarmStartSettings, long: bool = False) -> bool:
    """Build the policy in the folder and return True, or False if it stood there already."""
    if is_built(output, settings, long):
        return False
    schema = tool_schema()
    tokenizer = build_long_tokenizer(schema) if long else build_tokenizer(schema)
    demonstrate = LongDemonstrations(tokenizer, schema) if long else demonstration
    model = build_model(tokenizer, settings)
    started = time.monotonic()
    loss = warm_start(model, tokenizer, schema, settings, demonstrate)
    # The old folder goes only now, so that an interrupted build leaves it as it was.
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    receipt = {
        "settings_hash": settings_hash(settings, long),
        "settings": dataclasses.asdict(settings),
        "long_episodes": long,
        "final_loss": round(loss, 4),
        "seconds": round(time.monotonic() - started, 1),
    }
    (output / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    return True


def evaluate_policy(folder: Path, samples: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the success on validation tasks in the simulator, by task kind, sampled at temperature 1 and greedy."""
    tokenizer, model = _load(folder)
    schema, tasks = tool_schema(), make_tasks(Split.VALIDATION, 50)
    torch.manual_seed(seed)
    sampled = play_policy(model, tokenizer, schema, tasks * samples, _BASE_URL)
    greedy = play_policy(model, tokenizer, schema, tasks, _BASE_URL, greedy=True)
    return {"sampled": success_by_kind(sampled), "greedy": success_by_kind(greedy)}


def evaluate_long(folder: Path, samples: int, seed: int, limits: ContextLimits) -> dict[str, LongFigures]:
    """Return the figures of long validation tasks in the simulator, sampled at temperature 1 and greedy."""
    tokenizer, model = _load(folder)
    rendering, orders = Rendering(tokenizer, tool_schema()), make_orders(Split.VALIDATION, 50)
    torch.manual_seed(seed)
    sampled = play_long_policy(model, rendering, orders * samples, _BASE_URL, limits)
    greedy = play_long_policy(model, rendering, orders, _BASE_URL, limits, greedy=True)
    return {"sampled": long_figures(sampled), "greedy": long_figures(greedy)}


def _load(folder: Path) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder), model


def main(argv: list[str] | None = None) -> int:
    """Return the exit status of the command line."""
    arguments = sys.argv[1:] if argv is None else argv
    transformers_logging.disable_progress_bar()
    if arguments[:1] == ["evaluate"]:
        return _evaluate(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m cpu.small_policy", description="Build the small policy.")
    parser.add_argument("--output", type=Path, required=True, help="folder of the policy; replaced if it is another's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=WarmStartSettings.threads)
    parser.add_argument("--long-episodes", action="store_true", help="the policy for orders and compacted contexts")
    options = parser.parse_args(arguments)
    if options.output.is_dir() and any(options.output.iterdir()) and not (options.output / RECEIPT).is_file():
        print(f"small policy: {options.output} holds other files. Choose another --output.", file=sys.stderr)
        return 2
    settings = policy_settings(options.seed, options.threads, options.long_episodes)
    built = build_policy(options.output, settings, options.long_episodes)
    print(f"small policy: {'built' if built else 'already built, reused'}: {options.output}")
    return 0


def _evaluate(arguments: list[str]) -> int:
    defaults = ContextLimits()
    parser = argparse.ArgumentParser(prog="python -m cpu.small_policy evaluate")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=3, help="sampled episodes per validation task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--long-episodes", action="store_true", help="play orders, under a context policy")
    parser.add_argument("--context-policy", choices=list(ContextPolicy), default=defaults.policy)
    parser.add_argument("--budget", type=int, default=defaults.budget, help="tokens of a context (%(default)s)")
    parser.add_argument("--window", type=int, default=defaults.window, help="observations of a window (%(default)s)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.long_episodes:
        limits = replace(
            defaults, policy=ContextPolicy(options.context_policy), budget=options.budget, window=options.window
        )
        for way, figures in evaluate_long(options.folder, options.samples, options.seed, limits).items():
            print(f"{way:8}  {figures}")
        return 0
    for way, success in evaluate_policy(options.folder, options.samples, options.seed).items():
        print(f"{way:8}" + "".join(f"  {kind} {share:.2f}" for kind, share in success.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
