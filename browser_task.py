"""The task of one rollout, as the dataset's columns carry it through verl."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class TaskError(ValueError):
    """A dataset row that is no browser task: the key, what it holds, and which dataset class makes such rows."""


@dataclass(frozen=True)
class BrowserTask:
    """What a rollout needs to know of its row."""

    initial_url: str
    verifier_metadata: dict[str, Any]
    messages: list[dict[str, Any]]
    """The prompt without the start page; the last message is the user's."""
    task_id: str
    split: str
    data_source: str
    uid: str
    """The group: verl's id of the prompt in this step."""
    rollout: int
    """Index of the rollout in its group."""
    global_step: int
    question: str = ""
    """The user's words, for the judge."""
    judged: bool = False
    """Whether the judge scores the task; if not, the environment does, by verifier_metadata."""
    reference_answer: str | None = None
    """What a right answer says, for the judge alone."""

    @property
    def rollout_name(self) -> str:
        """Name for messages: the task and the rollout's index in its group."""
        return f"{self.task_id or self.uid}/{self.rollout}"

    @property
    def site(self) -> str:
        """Host of the start page; empty for a page of the server's own."""
        try:
            return urlsplit(self.initial_url).hostname or ""
        except ValueError:  # an address that is none: the seed will say so
            return ""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "BrowserTask":
        """Return the task in the columns that verl hands to an agent loop. Raises TaskError naming the column."""
        columns = (row.get("tools_kwargs") or {}).get("browser")
        if not isinstance(columns, Mapping):
            raise TaskError(
                "The row has no tools_kwargs['browser']. Load rows with data.custom_cls.path=pkg://dataset "
                "data.custom_cls.name=NeMoGymBrowserDataset"
            )
        messages = [dict(message) for message in row["raw_prompt"]]
        if not messages or messages[-1].get("role") != "user" or not isinstance(messages[-1].get("content"), str):
            raise TaskError("raw_prompt must end with a user message of plain text: the task")
        try:
            metadata = json.loads(columns["verifier_metadata_json"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise TaskError(f"tools_kwargs['browser']['verifier_metadata_json'] is no JSON text: {error}") from error
        extra = row.get("extra_info") or {}
        return cls(
            initial_url=columns["initial_url"],
            verifier_metadata=metadata,
            messages=messages,
            task_id=str(extra.get("task_id", "")),
            split=str(extra.get("split", "")),
            data_source=str(row.get("data_source", "")),
            uid=str(row.get("uid", "")),
            rollout=int(row.get("session_id", 0)),
            global_step=int(row.get("global_steps", -1)),
            question=str(columns.get("task") or messages[-1]["content"]),
            judged=bool(columns.get("judged", False)),
            reference_answer=columns.get("reference_answer") or None,
        )
