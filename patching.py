"""How a patch of verl is decided and applied: to the pinned release, while its source reads as expected, else refused.

A release that is not the pinned one is tried out first: if its own code does what the patch is for, the patch is not
needed. The patches themselves are in verl_patches.py and verl_mini_batches.py.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

REQUIRED_VERL = Path(__file__).resolve().parent / "REQUIRED_VERL.txt"

_MARK = "_verl_browser_recipe_patch"
"""Attribute of every function that stands in place of verl's; holds the patch's status."""


class PatchStatus(StrEnum):
    """What became of a patch."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"


@dataclass(frozen=True)
class PatchRecord:
    """What became of one patched name in this process."""

    target: str
    """`module:attribute` of what is replaced."""
    verl_version: str
    status: PatchStatus
    reason: str = ""
    """Why it is refused or not needed, and what to do; empty when it is applied."""

    @property
    def applied(self) -> bool:
        """Whether the recipe's function stands in verl's place."""
        return self.status is PatchStatus.APPLIED

    @property
    def refused(self) -> bool:
        """Whether training must not start."""
        return self.status is PatchStatus.REFUSED

    @property
    def text(self) -> str:
        """The record in one line."""
        return f"{self.target}  verl {self.verl_version}  {self.status}" + (f": {self.reason}" if self.reason else "")

    def as_json(self) -> dict[str, str]:
        """Return the record in JSON's types."""
        return {
            "target": self.target,
            "verl_version": self.verl_version,
            "status": str(self.status),
            "reason": self.reason,
        }


Wrap = Callable[[ModuleType, Sequence[Callable]], Sequence[Callable]]
"""Takes a module and functions of it, gives what replaces them, in the same order."""


@dataclass(frozen=True)
class Patch:
    """Functions of one module that are replaced together or not at all."""

    module: str
    source: dict[str, str]
    """Fingerprint of each function in the pinned release, by its name from the module, with dots."""
    wrap: Wrap
    is_right: Callable[[ModuleType], bool] | None = None
    """Tries out whether the module's own code does what the patch is for; None: no release is known to do it."""
    guard: Wrap | None = None
    """Stands in place of `wrap` where the patch is not needed."""

    @property
    def targets(self) -> list[str]:
        """The functions as records name them."""
        return [f"{self.module}:{name}" for name in self.source]


def apply_patch(patch: Patch, module: ModuleType) -> list[PatchRecord]:
    """Replace a patch's functions in a module that has run, if that can be done; return a record for each."""
    owners = [_owner(module, name) for name in patch.source]
    functions = [getattr(owner, name, None) for owner, name in owners]
    version = installed_version()

    def records(status: PatchStatus, reason: str = "") -> list[PatchRecord]:
        return [PatchRecord(target, version, status, reason) for target in patch.targets]

    before = {getattr(function, _MARK, None) for function in functions}
    if len(before) == 1 and None not in before:
        return records(before.pop())
    differences = _differences(patch, functions, version)
    if not differences:
        _replace(owners, functions, patch.wrap(module, functions), PatchStatus.APPLIED)
        return records(PatchStatus.APPLIED)
    if patch.is_right is not None:
        right, why_not = _try_out(patch.is_right, module)
        if right:
            if patch.guard is not None:
                _replace(owners, functions, patch.guard(module, functions), PatchStatus.NOT_NEEDED)
            return records(PatchStatus.NOT_NEEDED, "this verl gives rollouts with flags the right advantages itself.")
        differences.append(why_not)
    fix = (
        f"Install verl=={pinned_version()}. To move to another release, compare these functions with that one, adapt "
        "their patch (verl_patches.py, verl_mini_batches.py) where they differ, and renew the fingerprints there and "
        "VERL_RELEASE in REQUIRED_VERL.txt."
    )
    return records(PatchStatus.REFUSED, f"{'; '.join(differences)}. {fix}")


def is_in_place(module: ModuleType, target: str) -> bool:
    """Return whether the function that a record names is one that a patch has put there."""
    owner, name = _owner(module, target.partition(":")[2])
    return hasattr(getattr(owner, name, None), _MARK)


def installed_version() -> str:
    """Return the version of the verl that is imported, 'unknown' if none is."""
    return str(getattr(sys.modules.get("verl"), "__version__", "unknown"))


def pinned_version() -> str:
    """Return the release of verl in REQUIRED_VERL.txt. Raises ValueError if the file does not name one."""
    match = re.search(r"^VERL_RELEASE=verl==(\S+)$", REQUIRED_VERL.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{REQUIRED_VERL} has no line VERL_RELEASE=verl==VERSION; restore it from the repository")
    return match[1]


def fingerprint(function: Callable | None) -> str:
    """Return the first 16 digits of the SHA-256 of a function's source; 'missing' or 'unreadable' without one."""
    if function is None:
        return "missing"
    try:
        # Of its code: for a function that something has wrapped, inspect would read the one inside.
        source = inspect.getsource(getattr(function, "__code__", function))
        return hashlib.sha256(source.encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return "unreadable"


def _owner(module: ModuleType, name: str) -> tuple[Any, str]:
    """Return the object that holds a name with dots, and the name's last part."""
    *path, last = name.split(".")
    return functools.reduce(lambda owner, part: getattr(owner, part, None), path, module), last


def _differences(patch: Patch, functions: Sequence[Callable | None], version: str) -> list[str]:
    """Return in what the installed verl differs from the one that the patch was written for."""
    differences = []
    if version != pinned_version():
        differences.append(f"verl {version} is installed, REQUIRED_VERL.txt pins {pinned_version()}")
    for (name, known), function in zip(patch.source.items(), functions, strict=True):
        found = fingerprint(function)
        if found != known:
            differences.append(f"the source of {name} is {found}, known is {known}")
    return differences


def _try_out(is_right: Callable[[ModuleType], bool], module: ModuleType) -> tuple[bool, str]:
    """Return whether the module's own code passes the trial, and why not."""
    try:
        return is_right(module), "its own advantages let a flagged rollout vote"
    except Exception as error:  # noqa: BLE001 - code of an unknown release may raise anything; it is then not right
        return False, f"trying out its own advantages failed with {type(error).__name__}: {error}"


def _replace(
    owners: Sequence[tuple[Any, str]],
    functions: Sequence[Callable],
    replacements: Sequence[Callable],
    status: PatchStatus,
) -> None:
    """Put each replacement into its owner, and into the verl modules that imported a function of the owner by name."""
    for (owner, name), function, replacement in zip(owners, functions, replacements, strict=True):
        setattr(replacement, _MARK, status)
        setattr(owner, name, replacement)
        if getattr(owner, "__name__", "") != function.__module__:
            continue
        for other_name, other in list(sys.modules.items()):
            if other_name.startswith("verl.") and vars(other).get(name) is function:
                setattr(other, name, replacement)
