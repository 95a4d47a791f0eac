"""Files that appear whole or not at all: no reader finds half of one, and none stays behind where writing fails."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Put a file with this content in the path's place, in one step. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
