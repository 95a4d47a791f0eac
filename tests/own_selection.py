"""A selection policy as a user writes one; it leaves a trace of the process that it ran in."""

import os
from pathlib import Path

TRACE_FOLDER = "TEST_SELECTION_TRACE"


def kept_calls(forest):
    """Return the kept calls."""
    (Path(os.environ[TRACE_FOLDER]) / f"{os.getpid()}").touch()
    return forest.kept
