"""A rollout of the agent loop for unit tests: the loop as verl's worker builds it, and a scripted policy."""

import json

from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.tools.tool_registry import initialize_tools_from_config
from verl.workers.rollout.replica import TokenOutput

from browser_agent_loop import BrowserToolAgentLoop
from cpu.training_run import REPO_ROOT
from dataset import NeMoGymBrowserDataset
from environment_gate import EnvironmentGate
from recipe_settings import RecipeSettings

TOOL_CONFIG = REPO_ROOT / "configs" / "browser_tool.yaml"
ROW = {
    "raw_prompt": [{"role": "system", "content": "Browse."}, {"role": "user", "content": "Open About."}],
    "tools_kwargs": {
        "browser": {
            "initial_url": "site/index.html",
            "verifier_metadata_json": '{"url_contains": "about"}',
            "task": "Open About.",
        }
    },
    "extra_info": {"index": 0, "task_id": "about", "split": "train"},
    "data_source": "gym",
    "uid": "u-1",
    "session_id": 2,
    "global_steps": 7,
}


def call(**arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'browser', 'arguments': arguments})}\n</tool_call>"


CLICK_ABOUT = call(action="click", element="About")
FINISH = call(action="finish", answer="ALPHA-42")


class ScriptedPolicy:
    """Stands in for verl's engine client: replies in turn, each token with log-probability -0.5."""

    def __init__(self, tokenizer, replies):
        self.tokenizer = tokenizer
        self.replies = list(replies)
        self.prompts, self.request_ids, self.max_tokens = [], [], []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.prompts.append(list(prompt_ids))
        self.request_ids.append(request_id)
        self.max_tokens.append(sampling_params["max_tokens"])
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        ids = self.tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)[: sampling_params["max_tokens"]]
        fields = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), num_preempted=0, extra_fields=fields)


class ReportingGate(EnvironmentGate):
    """The gate, with the reports of its rollouts kept for the test."""

    def __init__(self, settings):
        super().__init__(settings)
        self.reports = []

    async def report(self, report):
        """Keep the report."""
        self.reports.append(report)


def make_loop(
    config,
    tokenizer,
    policy,
    environment_url,
    log_dir,
    settings=None,
    dataset_cls=NeMoGymBrowserDataset,
    loop_cls=BrowserToolAgentLoop,
):
    """Return the loop as verl's agent-loop worker builds it, pointed at a fake environment."""
    loop = loop_cls(
        trainer_config=DictConfigWrap(config),
        server_manager=policy,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=dataset_cls,
        data_config=DictConfigWrap(config.data),
        hf_model_type="qwen3",
        tools=ToolListWrap(initialize_tools_from_config(str(TOOL_CONFIG))),
    )
    fast = {"act_timeout_s": 20.0, "close_timeout_s": 20.0, "outage_patience_s": 0.5, "drop_invalid": True}
    loop.settings = RecipeSettings(environment_url=environment_url, **fast | (settings or {}))
    loop.gate = ReportingGate(loop.settings)
    loop.episode_log = type(loop.episode_log)(log_dir)
    loop.recordings = type(loop.recordings)(loop.settings.record_dir)
    return loop


def browser_section(**given):
    """Return the `browser` section for tests: no waiting before a retry, five turns."""
    return {"retry_backoff_s": 0.001, "max_turns": 5} | given
