"""Builds the small policy of the CPU profile, and measures it on the simulated practice site.

    python -m cpu.small_policy --output DIR --seed 0
    python -m cpu.small_policy evaluate DIR

The output is an ordinary Hugging Face folder (Qwen3, fp32, about half a million parameters).
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from browser_prompts import SYSTEM_PROMPT
from cpu.policy_evaluation import play_policy, success_by_kind
from cpu.policy_tokenizer import build_tokenizer, chat_template, tool_schema
from cpu.practice_pages import Split
from cpu.practice_tasks import make_tasks
from cpu.warm_start import WarmStartSettings, build_model, warm_start

RECEIPT = "warm_start.json"
"""Written into the folder last, so a folder that has it is complete."""

_CODE = (
    "demonstrations", "policy_tokenizer", "practice_browser", "practice_pages", "practice_tasks", "small_policy",
    "warm_start",
)  # fmt: skip
_BASE_URL = "http://127.0.0.1:8077"


def settings_hash(settings: WarmStartSettings) -> str:
    """Return a digest of all that the built policy depends on: settings, code, prompts, tool schema."""
    digest = hashlib.sha256()
    for name in _CODE:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    parts = [dataclasses.asdict(settings), tool_schema(), SYSTEM_PROMPT, chat_template(), torch.__version__]
    digest.update(json.dumps(parts, sort_keys=True).encode())
    return digest.hexdigest()


def is_built(output: Path, settings: WarmStartSettings) -> bool:
    """Return whether the folder already holds the policy of these settings."""
    receipt = output / RECEIPT
    if not receipt.is_file():
        return False
    return json.loads(receipt.read_text(encoding="utf-8")).get("settings_hash") == settings_hash(settings)


def build_policy(output: Path, settings: WarmStartSettings) -> bool:
    """Build the policy in the folder and return True, or False if it stood there already."""
    if is_built(output, settings):
        return False
    schema = tool_schema()
    tokenizer = build_tokenizer(schema)
    model = build_model(tokenizer, settings)
    started = time.monotonic()
    loss = warm_start(model, tokenizer, schema, settings)
    # The old folder goes only now, so that an interrupted build leaves it as it was.
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    receipt = {
        "settings_hash": settings_hash(settings),
        "settings": dataclasses.asdict(settings),
        "final_loss": round(loss, 4),
        "seconds": round(time.monotonic() - started, 1),
    }
    (output / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    return True


def evaluate_policy(folder: Path, samples: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the success on validation tasks in the simulator, by task kind, sampled at temperature 1 and greedy."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    schema, tasks = tool_schema(), make_tasks(Split.VALIDATION, 50)
    torch.manual_seed(seed)
    sampled = play_policy(model, tokenizer, schema, tasks * samples, _BASE_URL)
    greedy = play_policy(model, tokenizer, schema, tasks, _BASE_URL, greedy=True)
    return {"sampled": success_by_kind(sampled), "greedy": success_by_kind(greedy)}


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
    options = parser.parse_args(arguments)
    if options.output.is_dir() and any(options.output.iterdir()) and not (options.output / RECEIPT).is_file():
        print(f"small policy: {options.output} holds other files. Choose another --output.", file=sys.stderr)
        return 2
    built = build_policy(options.output, WarmStartSettings(seed=options.seed, threads=options.threads))
    print(f"small policy: {'built' if built else 'already built, reused'}: {options.output}")
    return 0


def _evaluate(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpu.small_policy evaluate")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=3, help="sampled episodes per validation task")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for way, success in evaluate_policy(options.folder, options.samples, options.seed).items():
        print(f"{way:8}" + "".join(f"  {kind} {share:.2f}" for kind, share in success.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
