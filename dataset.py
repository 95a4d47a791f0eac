"""`NeMoGymBrowserDataset`: NeMo Gym rollout rows as verl's columns; run as a program, a check of row files.

    python dataset.py FILE...     exit 0: every row can be trained on; 2: some cannot, all of them listed on stderr

In a training run:  data.custom_cls.path=pkg://dataset data.custom_cls.name=NeMoGymBrowserDataset

A column is one key of `__getitem__`'s answer and arrives under its name in the agent loop's `run(**kwargs)`:

    raw_prompt    [system message, user message with the task]; the agent loop appends the first observation
    tools_kwargs  {"browser": {"initial_url", "verifier_metadata_json", "task", "judged", "reference_answer"}}
    index         position of the row among all rows of all files, before any selection
    data_source   name under which validation metrics are kept
    agent_name    "browser_tool_agent"
    reward_model  {"style": "environment" or "judge", "ground_truth": ""}: the agent loop scores
    extra_info    {"index", "task_id", "split"}
    dummy_tensor  verl's trainers need one tensor in a batch

The row format is in rollout_rows.py. A row that was written for the released server's five tools gets
browser_prompts.SYSTEM_PROMPT in place of its own system message, a row without a system message gets it too, and any
other system message stays.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import patches
from recipe_settings import RecipeSettings
from rollout_rows import SCORING_KEYS, BrowserRow, FileRows, RowProblem, RowsError, read_file, read_rows

AGENT_NAME = "browser_tool_agent"

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Check row files: one line per file on stdout, every fault on stderr. Return 0 when all is well, else 2."""
    parser = argparse.ArgumentParser(
        prog="dataset.py", description="Check NeMo Gym rollout rows before a node is spent on them."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a JSON Lines file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line per file")
    arguments = parser.parse_args(argv)
    files = [read_file(path) for path in arguments.files]
    problems = [problem for file in files for problem in file.problems]
    if arguments.json:
        print(json.dumps({"ok": not problems, "files": [_as_json(file) for file in files]}))
    else:
        for file in files:
            print(_as_line(file))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 2 if problems else 0


def _as_json(file: FileRows) -> dict[str, Any]:
    problems = [{"line": p.line, "key": p.key, "reason": p.reason, "fix": p.fix} for p in file.problems]
    counts = {"rows": len(file.rows), "scored_by": file.scored_by, "data_sources": file.data_sources}
    return {"file": file.file, **counts, "problems": problems}


def _as_line(file: FileRows) -> str:
    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{name} {count}" for name, count in counts.items()) or "-"

    state = f"{len(file.problems)} problem(s)" if file.problems else "ok"
    counts = f"scored by: {listed(file.scored_by)} | data sources: {listed(file.data_sources)}"
    return f"{file.file}: {state}, {len(file.rows)} good row(s) | {counts}"


def columns(row: BrowserRow, index: int) -> dict[str, Any]:
    """Return the row's columns without the tensor; fresh objects, since agent loops edit their messages.

    The scoring spec travels as JSON text: columnar stores merge the keys of dictionaries over rows and would fill
    the absent scoring keys with None, which the server scores as the string "None".
    """
    browser = {
        "initial_url": row.initial_url,
        "verifier_metadata_json": json.dumps(dict(row.verifier_metadata)),
        "task": row.task,
        "judged": row.scoring.judged,
        "reference_answer": row.scoring.reference_answer,
    }
    return {
        "raw_prompt": row.messages,
        "tools_kwargs": {"browser": browser},
        "index": index,
        "data_source": row.data_source,
        "agent_name": AGENT_NAME,
        "reward_model": {"style": "judge" if row.scoring.judged else "environment", "ground_truth": ""},
        "extra_info": {"index": index, "task_id": row.task_id, "split": row.split},
    }


def _require_judge(rows: Sequence[BrowserRow], settings: RecipeSettings) -> None:
    """Raise RowsError naming the first row that needs a judge, if there is none."""
    judged = [row for row in rows if row.scoring.judged]
    if judged and settings.judge_url is None:
        reason = f"is missing here and in {len(judged) - 1} more rows: they need a judge, and none is configured"
        fix = (
            "set NEMO_GYM_BROWSER_JUDGE_URL and NEMO_GYM_BROWSER_JUDGE_MODEL and try `python judge.py --check`, or add "
            f"a scoring spec with one of {', '.join(SCORING_KEYS)}"
        )
        raise RowsError((RowProblem(judged[0].file, judged[0].line, "verifier_metadata", reason, fix),))


if __name__ == "__main__":
    # Ends here, before torch is imported below: checking files must work and be quick on a machine without it.
    sys.exit(main())

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402


class NeMoGymBrowserDataset(Dataset):
    """Map-style dataset over the rows of several JSON Lines files, built by verl's `create_rl_dataset`.

    No subclass of verl's RLHFDataset: that one reads through Arrow (which merges the keys of nested objects over
    rows), takes its columns from the file and swallows errors of the chat template. Resuming needs no state here:
    the same files and `data` settings give the same rows, and the stateful dataloader keeps its own position.

    Raises RowsError listing every row that cannot be trained on, those that need a judge where none is configured
    among them; ValueError when no row is left; patches.PatchError in a trainer's process without the recipe's patch,
    since verl builds its datasets where it computes advantages.
    """

    def __init__(
        self,
        data_files: str | list[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ):
        from verl.utils.fs import copy_to_local

        patches.require_applied()
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        paths = [data_files] if isinstance(data_files, str) else list(data_files)
        # As in RLHFDataset: a no-op for local files, a download for remote ones.
        local = [copy_to_local(str(p), config.get("cache_dir"), use_shm=config.get("use_shm", False)) for p in paths]
        self._rows = list(enumerate(read_rows(local)))
        _require_judge([row for _, row in self._rows], RecipeSettings.from_env())
        self._select(max_samples)
        self.dropped_overlong = 0
        """Rows whose opening prompt is longer than data.max_prompt_length."""
        if config.get("filter_overlong_prompts", False):
            self._drop_overlong(config.max_prompt_length)

    def _select(self, max_samples: int) -> None:
        """Keep `max_samples` rows as RLHFDataset does: the first ones, or with data.shuffle a random choice."""
        total = len(self._rows)
        if not 0 < max_samples < total:
            return
        if not self.config.get("shuffle", False):
            self._rows = self._rows[:max_samples]
            return
        seed = self.config.get("seed")
        if seed is None:
            logger.warning(
                "data.seed is unset: %d of %d rows are chosen anew at every start, so a resumed run trains on others. "
                "Set data.seed to keep the choice.",
                max_samples,
                total,
            )
        chosen = np.random.default_rng(seed).choice(total, size=max_samples, replace=False)
        self._rows = [self._rows[i] for i in chosen]

    def _drop_overlong(self, max_prompt_length: int) -> None:
        """Drop the rows whose opening prompt, before any observation, takes more than `max_prompt_length` tokens."""
        tools = self._tool_schemas()
        kept = [(i, row) for i, row in self._rows if self._prompt_tokens(row, tools) <= max_prompt_length]
        self.dropped_overlong = len(self._rows) - len(kept)
        if self.dropped_overlong:
            logger.warning(
                "data.filter_overlong_prompts dropped %d of %d rows (more than data.max_prompt_length=%d tokens)",
                self.dropped_overlong,
                len(self._rows),
                max_prompt_length,
            )
        if not kept:
            raise ValueError(
                f"data.filter_overlong_prompts dropped all {len(self._rows)} rows: system prompt, tool schema and task "
                f"take more than data.max_prompt_length={max_prompt_length} tokens. Fix: raise data.max_prompt_length"
            )
        self._rows = kept

    def _tool_schemas(self) -> list[dict] | None:
        """Return the schemas that the rollout's chat template gets, from the same files (data.tool_config_path)."""
        native, functions = self.config.get("tool_config_path"), self.config.get("function_tool_path")
        if not native and not functions:
            return None
        from verl.tools.tool_registry import load_all_tools

        tools = load_all_tools(tool_config_path=native, function_tool_path=functions)
        return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]

    def _prompt_tokens(self, row: BrowserRow, tools: list[dict] | None) -> int:
        arguments = dict(self.config.get("apply_chat_template_kwargs") or {})
        if tools is not None:
            arguments["tools"] = tools
        renderer = self.tokenizer if self.processor is None else self.processor
        text = renderer.apply_chat_template(row.messages, add_generation_prompt=True, tokenize=False, **arguments)
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index, row = self._rows[item]
        return {**columns(row, index), "dummy_tensor": torch.zeros(1, dtype=torch.uint8)}

    @classmethod
    async def process_multi_modal_info(
        cls, messages: list[dict], image_patch_size: int, config: Any
    ) -> tuple[None, None, None]:
        """Return no images, videos, audios: the policy reads pages as text. Called when the model has a processor."""
        return None, None, None

    @classmethod
    async def process_vision_info(cls, messages: list[dict], image_patch_size: int, config: Any) -> tuple[None, None]:
        """Return no images and videos, for callers that know only this older hook."""
        return None, None
