"""What it costs to record each model call and plan the rows at the end, beside merging tokens into one row.

python benchmarks/recording.py [--turns 10 30 100] [--prompt 1500] [--observation 700] [--reply 60] [--repeats 7]

Both sides get the same replies and observations as token ids. The plain side keeps prompt, response, mask and log-probs
of one row with verl's continuous-token builder, as verl's own tool agent loop does; the recording side is
conversation.py, plan_rows and the rows' lists. CPU microseconds per turn, medians over the repeats, and their ratio.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult  # noqa: E402

from call_forest import plan_rows, rows_for_verl  # noqa: E402
from conversation import Conversation  # noqa: E402
from cpu.policy_tokenizer import build_tokenizer, tool_schema  # noqa: E402
from row_limits import limit_rows  # noqa: E402


def plain(builder: ContinuousTokenBuilder, prompt: list[int], turns: list[tuple[list[int], list[int]]]) -> tuple:
    """Return prompt, response, mask and log-probs of one row."""
    tokens, mask, logprobs = list(prompt), [], []
    for number, (reply, observation) in enumerate(turns):
        merged = builder.merge_assistant_tokens(tokens, reply)
        mask, logprobs = builder.align_response_metadata(merged, mask, logprobs, assistant_logprobs=[-0.5] * len(reply))
        tokens = merged.token_ids
        if number < len(turns) - 1:
            merged = MergeResult([*tokens, *observation], len(observation))
            mask, logprobs = builder.align_response_metadata(merged, mask, logprobs)
            tokens = merged.token_ids
    return tokens[: len(prompt)], tokens[len(prompt) :], mask, logprobs


def recording(prompt: list[int], turns: list[tuple[list[int], list[int]]]) -> tuple:
    """Return the same row, made of records."""
    calls = Conversation()
    calls.open([], prompt)
    for number, (reply, observation) in enumerate(turns):
        calls.add_reply(reply, [-0.5] * len(reply), min_global_steps=0, max_global_steps=0)
        if number < len(turns) - 1:
            calls.extend([], [*calls.token_ids, *observation])
    scored = calls.kept[-1]
    rows = plan_rows(calls.records, kept=calls.kept, scored=scored)
    wide = {"max_rows": 16, "max_prompt_tokens": 10**9, "max_response_tokens": 10**9}
    (row,) = rows_for_verl(limit_rows(rows, scored, **wide).rows, scored)
    return row.prompt_ids, row.response_ids, row.response_mask, row.response_logprobs


def main() -> int:
    """Run the benchmark and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[10, 30, 100])
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the prompt")
    parser.add_argument("--observation", type=int, default=700, help="tokens of an observation")
    parser.add_argument("--reply", type=int, default=60, help="tokens of a reply")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    builder = ContinuousTokenBuilder(build_tokenizer(tool_schema()))
    print("turns  row tokens  plain us/turn  recording us/turn  ratio")
    for count in options.turns:
        prompt = list(range(options.prompt))
        turns = [(list(range(options.reply)), list(range(options.observation))) for _ in range(count)]
        sides = {"plain": lambda: plain(builder, prompt, turns), "recording": lambda: recording(prompt, turns)}  # noqa: B023
        assert sides["plain"]() == sides["recording"]()
        spent: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.repeats):
            for name, side in sides.items():
                began = time.process_time()
                side()
                spent[name].append((time.process_time() - began) / count * 1e6)
        low, high = statistics.median(spent["plain"]), statistics.median(spent["recording"])
        tokens = len(prompt) + count * options.reply + (count - 1) * options.observation
        print(f"{count:>5} {tokens:>11} {low:>14.1f} {high:>18.1f} {high / low:>6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
