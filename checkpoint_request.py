"""A checkpoint outside the schedule: whoever runs the job asks for it with a file, verl saves after the running step.

verl's trainer saves by `trainer.save_freq` alone and knows no signal (verl 0.9.1, trainer/ppo/v1/trainer_base.py:481).
submit_webvoyager.sh asks before the time limit, so that the steps since the last checkpoint are not lost.
"""

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FILE_NAME = "save_requested"
"""File in `trainer.default_local_dir` that asks for a checkpoint; it is removed when the request is taken."""


class CheckpointRequest:
    """Turns the file into a checkpoint of the running step, and puts the schedule back afterwards."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._scheduled: int | None = None

    def look(self, trainer: Any, step: int) -> None:
        """Have the trainer save after this step if someone asks for it. Called while the step is under way."""
        config = getattr(trainer, "config", None)
        if config is None:
            return
        if self._scheduled is not None and step != self._step:
            config.trainer.save_freq, self._scheduled = self._scheduled, None
        request = Path(config.trainer.default_local_dir) / FILE_NAME
        try:
            request.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("The request for a checkpoint, %s, can't be taken: %s", request, error.strerror)
            return
        logger.warning("Step %d is saved on request (%s)", step, request)
        if self._scheduled is None:
            self._step, self._scheduled = step, config.trainer.save_freq
        config.trainer.save_freq = 1
