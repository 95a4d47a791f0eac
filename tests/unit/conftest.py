"""Fixtures of the agent loop's tests; what they need of verl is imported only where a test asks for it."""

from functools import partial

import pytest

import patches
from tests.fake_environment import FakeEnvironment

# As sitecustomize.py does in every process of a training.
patches.install()


@pytest.fixture(scope="session")
def tokenizer():
    from cpu.policy_tokenizer import build_tokenizer, tool_schema

    return build_tokenizer(tool_schema())


@pytest.fixture(scope="session")
def base_config():
    from hydra import compose, initialize_config_dir

    from cpu.training_run import REPO_ROOT

    with initialize_config_dir(str(REPO_ROOT / "configs"), version_base=None):
        return compose("cpu_practice")


@pytest.fixture
def build(tokenizer, base_config, tmp_path, monkeypatch):
    """Return a function that builds the loop as verl's worker does, and the scripted policy that it talks to."""
    from tests.agent_loop_harness import ScriptedPolicy, browser_section, make_loop

    monkeypatch.setenv("NEMO_GYM_URL", "http://127.0.0.1:1")

    def build(environment, replies, prompt_length=512, response_length=1024, settings=None, build_with=None, **given):
        config = base_config.copy()
        config.actor_rollout_ref.rollout.prompt_length = prompt_length
        config.actor_rollout_ref.rollout.response_length = response_length
        config.browser = browser_section(**given)
        policy = ScriptedPolicy(tokenizer, replies)
        loop = make_loop(config, tokenizer, policy, environment.url, tmp_path, settings, **(build_with or {}))
        return loop, policy

    return build


@pytest.fixture
async def environment():
    async with FakeEnvironment() as environment:
        yield environment


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """Return a function that prepares a task list: text, bytes or tasks, and flags of prepare_webvoyager_data.py."""
    from tests.prepared_lists import prepared

    monkeypatch.chdir(tmp_path)
    return partial(prepared, capsys)
