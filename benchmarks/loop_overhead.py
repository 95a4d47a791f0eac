"""What the agent loop costs over bare HTTP: rollouts of the loop beside the same requests without it, in one run.

python benchmarks/loop_overhead.py [--turns 10] [--repeats 3] [--levels 1 64 512]

Both sides talk to the fake environment in a process of its own, with a policy that answers at once, so what differs is
the loop's own work: sessions, parsing, tokenising, failure checks. Two environments: one that answers as fast as it
can, so that every millisecond of the client shows, and one that answers after the time that the real server took when
it was measured with one session (LATENCY_S). Printed per number of concurrent rollouts in one worker, medians over the
repeats: milliseconds per turn of both, their ratio, the client's own CPU milliseconds per turn beyond the bare
requests', and how much memory a rollout holds at the peak and how much of it stays.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from hydra import compose, initialize_config_dir
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.tools.tool_registry import initialize_tools_from_config
from verl.workers.rollout.replica import TokenOutput

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from browser_agent_loop import BrowserToolAgentLoop  # noqa: E402
from cpu.policy_tokenizer import build_tokenizer, tool_schema  # noqa: E402
from dataset import NeMoGymBrowserDataset  # noqa: E402
from environment_session import _VERIFY_BODY  # noqa: E402
from episode_log import EpisodeLog  # noqa: E402
from recipe_settings import RecipeSettings  # noqa: E402
from server_choice import ServerChoice  # noqa: E402

# Seconds, one session on the real server (Debian's chromium-headless-shell, 2 cores).
LATENCY_S = {"/seed_session": 0.476, "/browser_observe": 0.086, "/browser_finish": 0.05, "/verify": 0.058}
SERVER = """
import asyncio, json, sys
from tests.fake_environment import FakeEnvironment
async def main():
    async with FakeEnvironment(latency_s=json.loads(sys.argv[1])) as environment:
        print(environment.url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""
SEED = {"initial_url": "site/index.html", "verifier_metadata": {"url_contains": "index"}}
OBSERVE = '<tool_call>\n{"name": "browser", "arguments": {"action": "observe"}}\n</tool_call><|im_end|>'
FINISH = '<tool_call>\n{"name": "browser", "arguments": {"action": "finish"}}\n</tool_call><|im_end|>'
ROW = {
    "raw_prompt": [{"role": "user", "content": "Look around."}],
    "tools_kwargs": {
        "browser": {
            "initial_url": SEED["initial_url"],
            "verifier_metadata_json": json.dumps(SEED["verifier_metadata"]),
            "task": "Look around.",
        }
    },
}


class InstantPolicy:
    """An engine that answers at once: observe until the last turn, then finish."""

    def __init__(self, tokenizer, turns: int) -> None:
        self.observe = tokenizer.encode(OBSERVE, add_special_tokens=False)
        self.finish = tokenizer.encode(FINISH, add_special_tokens=False)
        self.turns = turns
        self.made = 0

    async def generate(self, request_id, *, prompt_ids, sampling_params) -> TokenOutput:
        self.made += 1
        ids = self.finish if self.made >= self.turns else self.observe
        return TokenOutput(token_ids=ids, log_probs=[-0.1] * len(ids), extra_fields={"max_global_steps": 0})


class Loops:
    """Builds the loop as verl's worker does, one for each rollout."""

    def __init__(self, url: str, turns: int, policy_class: type[InstantPolicy] = InstantPolicy) -> None:
        self.policy_class = policy_class
        self.episode_log = EpisodeLog(None)
        with initialize_config_dir(str(ROOT / "configs"), version_base=None):
            config = compose("cpu_practice")
        config.actor_rollout_ref.rollout.prompt_length = 2048
        config.actor_rollout_ref.rollout.response_length = 1_000_000
        config.browser = {"max_turns": turns}
        self.config, self.turns = config, turns
        self.tokenizer = build_tokenizer(tool_schema())
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints each tool's schema as it loads it
            self.tools = ToolListWrap(initialize_tools_from_config(str(ROOT / "configs" / "browser_tool.yaml")))
        # No cap of its own: the bare side has none either.
        self.settings = RecipeSettings(environment_url=url, max_open_sessions=4096, max_concurrent_seeds=4096)

    async def run(self) -> None:
        """Run one rollout."""
        loop = BrowserToolAgentLoop(
            trainer_config=DictConfigWrap(self.config),
            server_manager=self.policy_class(self.tokenizer, self.turns),
            tokenizer=self.tokenizer,
            processor=None,
            dataset_cls=NeMoGymBrowserDataset,
            data_config=DictConfigWrap(self.config.data),
            hf_model_type="qwen3",
            tools=self.tools,
        )
        loop.settings, loop.servers = self.settings, ServerChoice.shared(self.settings)
        loop.episode_log = self.episode_log
        (output,) = await loop.run({"temperature": 1.0}, **ROW)
        assert output.reward_score == 1.0 and output.num_turns == 2 * self.turns + 1


async def bare_rollout(url: str, turns: int) -> None:
    """Send the requests of one rollout, and nothing else."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:

        async def post(path: str, body: dict) -> dict:
            async with http.post(url + path, json=body) as response:
                return await response.json()

        await post("/seed_session", SEED)
        for _ in range(turns):
            await post("/browser_observe", {})
        await post("/browser_finish", {"answer": ""})
        await post("/verify", dict(_VERIFY_BODY))
        await post("/close_session", {})


@dataclass(frozen=True)
class Cost:
    """What some rollouts took together."""

    wall_s: float
    cpu_s: float
    """Of this process alone."""


async def cost(rollouts: list) -> Cost:
    """Return what these rollouts take, run at once."""
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*rollouts)
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def resident_kib(field: str = "VmRSS") -> int:
    """Return the process's resident memory; VmHWM is its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


async def measure(url: str, turns: int, repeats: int, levels: list[int]) -> None:
    """Print a line for each level of concurrency; the two sides take turns, so that both see the same machine."""
    loops = Loops(url, turns)
    await loops.run()
    print("rollouts  bare ms/turn  loop ms/turn  ratio  own CPU ms  KiB each  stays")
    for level in levels:
        bare, own = [], []
        before = resident_kib()
        for _ in range(repeats):
            bare.append(await cost([bare_rollout(url, turns) for _ in range(level)]))
            own.append(await cost([loops.run() for _ in range(level)]))
        peak, after = resident_kib("VmHWM"), resident_kib()
        low, high = (statistics.median(c.wall_s for c in side) for side in (bare, own))
        cpu = statistics.median(c.cpu_s for c in own) - statistics.median(c.cpu_s for c in bare)
        scale = 1000 / (level * turns)
        print(
            f"{level:>8} {low * scale:>13.3f} {high * scale:>13.3f} {high / low:>6.2f} {cpu * scale:>11.3f} "
            f"{(peak - before) / level:>9.0f} {(after - before) / level / repeats:>6.1f}",
            flush=True,
        )


def main() -> int:
    """Run the benchmark and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 64, 512])
    options = parser.parse_args()
    for name, latency in (("the real server's latency", LATENCY_S), ("an environment that answers at once", {})):
        command = [sys.executable, "-c", SERVER, json.dumps(latency)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            url = os.environ["NEMO_GYM_URL"] = server.stdout.readline().strip()
            print(name)
            asyncio.run(measure(url, options.turns, options.repeats, options.levels))
            server.stdin.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
