"""Validation episodes in the trackers' tables: the task, an action a line, the answer, the score, or what failed.

verl fills these tables (`trainer.log_val_generations`) with the tokens of a rollout's last row: a system prompt with a
tool schema as input, and turns, pages and markup run together as output; invalid rollouts are missing. What stands
here instead comes with the rollouts' reports, and verl's own loggers bring it to W&B, TensorBoard and the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from verl.utils.tracking import ValidationGenerationsLogger

from episode_record import AttemptOutcome, AttemptRecord, TurnRecord
from rollout_stats import RolloutReport, ShownEpisode
from secret_masking import Masker

_TEXT_CHARS = 300
"""Characters of one text in a table; a report goes through the driver, so it has to be small."""
_TURNS = 60
"""Turns that are shown, half of them the last ones."""
_SEED = 42
"""Seed of the choice: the same tasks at every validation, as verl does it."""


def shown_episode(record: AttemptRecord, masker: Masker) -> ShownEpisode:
    """Return a rollout's last attempt in words, as Markdown that also reads well where it is not rendered."""
    place = f"{record.task_id} ({record.site})" if record.site else record.task_id
    ended = f"{record.outcome}"
    if record.outcome == AttemptOutcome.INVALID:
        ended += f": {record.failure_kind} – {record.failure_evidence}"
    else:
        ended += f": reward {record.reward:g} by the {record.scored_by}, {record.stop_reason}"
        ended += f" – {record.judge_reason}" if record.judge_reason else ""
    turns = [f"{turn.turn}. {_turn_line(turn)}" for turn in record.turn_records]
    if len(turns) > _TURNS:
        turns[_TURNS // 2 : -_TURNS // 2] = [f"({len(turns) - _TURNS} turns are not shown)"]
    lines = [ended, "", *turns, "", f"answer: {record.answer}" if record.answer is not None else "no answer"]
    # A line of Markdown ends with two spaces, or is joined with the next one.
    text = "  \n".join(_short(line, masker) for line in lines)
    return ShownEpisode(_short(f"{place}: {record.question}", masker), text)


def _turn_line(turn: TurnRecord) -> str:
    if turn.mistake:
        return f"no usable call ({turn.mistake})"
    given = turn.arguments
    parts = [turn.action, given.get("url")]
    parts += [f'"{given["text"]}" into'] if "text" in given else []
    parts += [f"[{given['element_id']}] {turn.element}".rstrip()] if "element_id" in given else []
    parts += [f"– {turn.failure_kind}"] if turn.failure_kind else []
    return " ".join(part for part in parts if part)


def _short(text: str, masker: Masker) -> str:
    line = " ".join(masker.mask(text).split())
    return line if len(line) <= _TEXT_CHARS else f"{line[: _TEXT_CHARS - 3]}..."


class EpisodeTables(ValidationGenerationsLogger):
    """verl's logger of validation samples, given episodes of this validation in place of verl's samples."""

    def __init__(self, project_name: str | None, experiment_name: str | None, count: int) -> None:
        super().__init__(project_name, experiment_name)
        self.count = count
        """trainer.log_val_generations."""
        self.reports: Sequence[RolloutReport] = ()
        """Of the validation that is under way."""

    def log(self, loggers: Any, samples: Sequence[tuple], step: int) -> None:
        """Log some of the episodes, or verl's samples where the rollouts told nothing."""
        super().log(loggers, chosen_episodes(self.reports, self.count) or samples, step)


def chosen_episodes(reports: Sequence[RolloutReport], count: int) -> list[tuple[str, str, float | None]]:
    """Return (task, episode, score) of so many rollouts, the same tasks for the same data; no score: not measured.

    Invalid rollouts are among them: W&B's table of verl 0.9.1 needs the same number of samples at every validation.
    """
    known = [report for report in reports if report.shown is not None]
    known.sort(key=lambda report: (report.shown.task, report.rollout))
    order = np.random.RandomState(_SEED).permutation(len(known))[:count]
    return [(known[place].shown.task, known[place].shown.episode, known[place].reward) for place in order]


def show_episodes(trainer: Any, reports: Sequence[RolloutReport]) -> None:
    """Have the trainer log these episodes of its validation; a trainer without verl's logger is left as it is."""
    logger = getattr(trainer, "validation_generations_logger", None)
    if type(logger) is ValidationGenerationsLogger:
        count = int(trainer.config.trainer.log_val_generations)
        logger = EpisodeTables(logger.project_name, logger.experiment_name, count)
        trainer.validation_generations_logger = logger
    if isinstance(logger, EpisodeTables):
        logger.reports = reports
