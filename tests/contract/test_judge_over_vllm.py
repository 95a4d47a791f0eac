"""The judge against vLLM's own OpenAI server on the CPU, with the small policy as the model that is asked.

The small policy can't judge anything. What holds for it as for any model: requests are accepted, structured output
holds the reply to the schema, and usage is counted. Needs about 4 GiB of memory.
"""

import os
import subprocess
import sys

import pytest

from cpu.processes import ProcessTree, free_port, wait_until_answers
from cpu.training_run import REPO_ROOT
from judge import Evidence, FailureKind, Judge, Outcome
from judge_client import JudgeClient, OutputFormat
from recipe_settings import RecipeSettings

pytestmark = pytest.mark.timeout(900)

START_S = 600
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """Return the base address of vLLM's server with the small policy as `judge`."""
    policy = REPO_ROOT / "runs" / "policy-for-tests"
    subprocess.run([sys.executable, "-m", "cpu.small_policy", "--output", policy], cwd=REPO_ROOT, check=True)
    port = free_port()
    command = [sys.executable, "-m", "tests.contract.vllm_server", "--model", str(policy)]
    command += ["--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "8192", "--max-num-seqs", "2", "--enforce-eager"]
    # The small policy was trained on 2048 positions; its vocabulary spells this prompt out in nearly as many tokens.
    command += ["--hf-overrides", '{"max_position_embeddings": 8192}']
    env = {**os.environ, **ENVIRONMENT}
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    server = ProcessTree("vLLM server", command, log_path=log, env=env, cwd=REPO_ROOT)
    try:
        wait_until_answers(server, f"http://127.0.0.1:{port}/health", START_S)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.stop()


def settings_for(endpoint, **given):
    return RecipeSettings(judge_url=endpoint, judge_model="judge", judge_evidence_tokens=256, **given)


async def test_a_reply_is_held_to_the_schema(endpoint):
    async with Judge(settings_for(endpoint)) as judge:
        judgement = await judge.score("Say a.", "a", Evidence(("finish",), ("URL: x",)), "a")
        assert judge.output_format is OutputFormat.JSON_SCHEMA
    # A model that writes on and on reaches the length limit inside the reason, which is a text of any length.
    assert judgement.verdict.kind in (None, FailureKind.JUDGE_TRUNCATED), judgement
    assert set(judgement.unusable) <= {FailureKind.JUDGE_TRUNCATED}
    assert (judgement.verdict.outcome is Outcome.UNUSABLE) == (judgement.verdict.kind is not None)
    assert judgement.prompt_tokens > 500
    assert judgement.completion_tokens > 5


@pytest.mark.parametrize("output_format", list(OutputFormat))
async def test_every_output_format_is_taken(endpoint, output_format):
    client = JudgeClient(settings_for(endpoint))
    client.output_format = output_format
    try:
        reply = await client.ask([{"role": "user", "content": "Say a."}], 0.0, 120.0)
    finally:
        await client.aclose()
    assert (reply.kind, reply.problem) == (None, "")
    assert reply.choice["finish_reason"] in ("stop", "length")


async def test_a_model_that_the_server_does_not_have_is_rejected_in_its_words(endpoint):
    settings = RecipeSettings(judge_url=endpoint, judge_model="no-such-model")
    async with Judge(settings) as judge:
        judgement = await judge.score("Say a.", "a", Evidence((), ()))
    assert (judgement.verdict.kind, judgement.calls) == (FailureKind.JUDGE_REJECTED, 1)
    assert "HTTP 404" in judgement.verdict.reason
    assert "no-such-model" in judgement.verdict.reason
