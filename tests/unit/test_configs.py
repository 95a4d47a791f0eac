"""Every config composes against the installed verl and passes verl's own validation."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import load_extern_object

import browser_sampler
from browser_agent_loop import BrowserToolAgentLoop
from cpu.training_run import REPO_ROOT
from dataset import NeMoGymBrowserDataset
from episode_limits import EpisodeLimits

PATHS = ["data.train_files=train.jsonl", "data.val_files=val.jsonl", "trainer.default_local_dir=checkpoints"]
RUNNABLE = {
    "cpu_practice": ["actor_rollout_ref.model.path=policy"],
    "cpu_practice_slurm": ["actor_rollout_ref.model.path=policy"],
    "webvoyager_grpo": [],
    "webvoyager_grpo_one_node": [],
}


@pytest.fixture(params=RUNNABLE)
def config(request):
    with initialize_config_dir(str(REPO_ROOT / "configs"), version_base=None):
        return compose(request.param, overrides=[*PATHS, *RUNNABLE[request.param]])


def test_every_runnable_config_is_covered_here():
    assert {path.stem for path in (REPO_ROOT / "configs").glob("*.yaml")} == {
        *RUNNABLE,
        "browser_base",
        "cpu_profile",
        "qwen3_8b_h100",
        "browser_tool",
        "browser_agent_loop",
        "interactive_browser",
    }


def test_it_resolves_and_passes_verls_validation(config):
    # verl's own: the name of an engine for a reward model, which this recipe doesn't have.
    assert OmegaConf.missing_keys(config) == {"reward.reward_model.rollout.name"}
    OmegaConf.to_container(config, resolve=True)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


def test_verl_builds_its_rollout_settings_from_it(config):
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.multi_turn.max_assistant_turns == config.browser.max_turns
    assert rollout.agent.default_agent_loop == "browser_tool_agent"


def test_its_limits_are_valid_and_complete(config):
    limits = EpisodeLimits.from_section(config.browser)
    assert set(config.browser) == set(vars(limits))


def test_its_sampler_is_this_recipes_and_takes_its_settings(config, monkeypatch):
    counters = SimpleNamespace(counters=lambda: None)
    monkeypatch.setattr(browser_sampler, "coordinator_for_driver", lambda settings: counters)
    settings = config.trainer.v1.sampler
    sampler = load_extern_object(settings.custom_sampler.path, settings.custom_sampler.name)
    assert sampler is browser_sampler.BrowserReplayBuffer
    built = sampler(
        trainer_mode=config.trainer.v1.trainer_mode,
        trainer_config={},
        max_off_policy_threshold=settings.max_off_policy_threshold,
        max_off_policy_strategy=settings.max_off_policy_strategy,
        sampler_kwargs=settings.sampler_kwargs,
        refill_fn=lambda count: None,
    )
    assert (built.max_invalid_share, built.halt_after_steps) == (0.5, 3)


def test_its_estimator_is_the_one_that_keeps_invalid_rollouts_out(config):
    assert config.algorithm.adv_estimator == "grpo_env_aware"


def test_it_loads_this_recipes_dataset_by_its_flat_name(config):
    custom = config.data.custom_cls
    assert load_extern_object(custom.path, custom.name) is NeMoGymBrowserDataset


def test_its_context_lengths_fit_together(config):
    rollout, data = config.actor_rollout_ref.rollout, config.data
    assert data.max_prompt_length + data.max_response_length <= rollout.max_model_len
    # The start page must not fill the prompt, and one observation with one reply must fit a response.
    assert config.browser.max_observation_tokens < data.max_prompt_length
    assert config.browser.max_observation_tokens + config.browser.max_tokens_per_turn < data.max_response_length


def test_a_mini_batch_holds_all_prompts_of_a_step(config):
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size


def test_the_agent_loop_file_names_the_registered_class():
    (entry,) = OmegaConf.load(REPO_ROOT / "configs" / "browser_agent_loop.yaml")
    assert entry.name == "browser_tool_agent"
    assert entry._target_ == f"{BrowserToolAgentLoop.__module__}.{BrowserToolAgentLoop.__qualname__}"


@pytest.mark.parametrize(("name", "nodes"), [("webvoyager_grpo", 2), ("webvoyager_grpo_one_node", 1)])
def test_its_row_lengths_fit_engine_and_micro_batch_and_its_nodes_are_what_its_name_says(name, nodes):
    with initialize_config_dir(str(REPO_ROOT / "configs"), version_base=None):
        config = compose(name, overrides=PATHS)
    row = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.rollout.max_model_len == row
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= row
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (nodes, 8)
    assert config.data.train_batch_size == 32 and config.actor_rollout_ref.rollout.n == 8


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["webvoyager_grpo", "webvoyager_grpo_one_node"])
def test_verls_own_entry_point_takes_it(name):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-path={REPO_ROOT / 'configs'}"]
    command += [f"--config-name={name}", "--cfg", "job", *PATHS]
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    done = subprocess.run(command, cwd=REPO_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = OmegaConf.create(done.stdout)
    assert shown.actor_rollout_ref.model.path == "Qwen/Qwen3-8B"
    assert shown.algorithm.adv_estimator == "grpo_env_aware"


def test_a_job_on_slurm_uses_the_ray_that_the_job_has_started():
    """RAY_ADDRESS counts only where the config names no address, and Ray refuses sizes for a cluster that runs."""
    for name in ("cpu_practice_slurm", "webvoyager_grpo", "webvoyager_grpo_one_node"):
        with initialize_config_dir(str(REPO_ROOT / "configs"), version_base=None):
            config = compose(name, overrides=[*PATHS, *RUNNABLE[name]])
        given = {key: value for key, value in config.ray_kwargs.ray_init.items() if value is not None}
        assert given.keys() <= {"runtime_env"}
