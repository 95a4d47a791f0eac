"""NeMo Gym rollout rows made of tasks, and the split that each belongs to.

    {"responses_create_params": {"input": [messages], "metadata": {...}},
     "initial_url": ..., "verifier_metadata": {...}}

`metadata` holds strings only: `task_id`, `web_name`, `split` (`train` or `validation`), and for a task without a
scoring spec `scored_by` = `judge` and, where known, `reference_answer`. They stand there since other top-level keys are
an error in `gym dataset collate`'s example_validation mode. A row names no tools: the policy's one tool is the
trainer's own (configs/browser_tool.yaml), and the released checks ask for none. Nor does it name an agent: collate
routes a row by the config that declares its file, and drops an `agent_ref`.
"""

import hashlib
from typing import Any

from task_columns import Task

TRAIN = "train"
VALIDATION = "validation"
JUDGE = "judge"


def split_of(task_id: str, val_fraction: float, seed: str = "") -> str:
    """Return the task's split. It depends on nothing but the arguments, so new tasks move no other one.

    A greater fraction only adds to validation, and with another seed the choice is another one.
    """
    digest = hashlib.sha256(f"{seed}\0{task_id}".encode()).digest()
    return VALIDATION if int.from_bytes(digest[:8]) < val_fraction * 2**64 else TRAIN


def row(
    task: Task, split: str, system_prompt: str | None, spec: dict[str, str] | None, answer: str | None
) -> dict[str, Any]:
    """Return the task's row. `answer`, a judge's reference, goes into the metadata and never into the messages.

    With `spec` the environment scores, and the row says nothing of a judge.
    """
    messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    messages.append({"role": "user", "content": task.question})
    metadata = {"task_id": task.task_id, "web_name": task.site, "split": split}
    if spec is None:
        metadata["scored_by"] = JUDGE
        if answer is not None:
            metadata["reference_answer"] = answer
    made = {"responses_create_params": {"input": messages, "metadata": metadata}, "initial_url": task.url}
    return made if spec is None else {**made, "verifier_metadata": spec}
