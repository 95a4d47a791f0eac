"""What a setting can be: its kinds, how its text is read, and what is said when it can't be used."""

import math
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import NewType
from urllib.parse import urlsplit

_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


Url = NewType("Url", str)
"""A base address, without a trailing slash."""
Urls = NewType("Urls", str)
"""Base addresses, separated by commas."""
Secret = NewType("Secret", str)
"""Text that no message and no `repr` shows."""
Name = NewType("Name", str)
"""Text that can be a file's name and a word on a command line: letters, digits, dots, dashes, underscores."""


class SettingsError(ValueError):
    """Every setting that cannot be used, one line each: variable, value, what is allowed, what to do."""


def setting(
    variable: str,
    default: object,
    kind: type,
    minimum: float | None = None,
    why: str = "",
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
):
    """Return a dataclass field that remembers its environment variable and what is allowed from there."""
    metadata = {"variable": variable, "kind": kind, "minimum": minimum, "maximum": maximum, "why": why}
    return field(default=default, repr=kind is not Secret, metadata=metadata | {"choices": choices})


def parsed(text: str, metadata: Mapping) -> object:
    """Return the value that `text` spells. Raises ValueError saying what is allowed."""
    kind, minimum = metadata["kind"], metadata["minimum"]
    if kind is bool:
        if text.lower() not in _SWITCHES:
            raise ValueError(f"must be one of {', '.join(_SWITCHES)}")
        return _SWITCHES[text.lower()]
    if kind in (int, float):
        try:
            text = kind(text)
        except ValueError:
            raise ValueError(f"must be {'a whole number' if kind is int else 'a number of seconds'}") from None
    value = checked(text, kind)
    if minimum is not None and value < minimum:
        raise ValueError(f"must be at least {minimum:g} ({metadata['why']}); raise it or unset it")
    if metadata["maximum"] is not None and value > metadata["maximum"]:
        raise ValueError(f"must be at most {metadata['maximum']:g}; lower it or unset it")
    return value


def shown(value: object, kind: type) -> str:
    """Return the value as a message may show it."""
    return "(not shown)" if kind is Secret else repr(value)


def checked(value: object, kind: type) -> object:
    """Return `value` in the setting's type. Raises ValueError saying what is allowed."""
    if kind is Url:
        return _base_url(value)
    if kind is Urls:
        return _base_urls(value)
    if kind is Name:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise ValueError("must be a name of letters, digits, `.`, `-` and `_` that begins with a letter or digit")
        return value
    if kind in (str, Secret):
        if not isinstance(value, str) or not value or any(c.isspace() for c in value):
            raise ValueError("must be text without white space")
        return value
    if kind is Path:
        return Path(value).expanduser()
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError("must be True or False")
        return value
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError("must be a whole number of at least 1")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError("must be a finite number of seconds above 0")
    return float(value)


def _base_urls(value: object) -> str:
    """Return the addresses as `_base_url` does, a comma between. Raises ValueError for a bad one and for one twice."""
    if not isinstance(value, str):
        return _base_url(value)
    urls = []
    for text in value.split(","):
        try:
            url = _base_url(text.strip())
        except ValueError as error:
            where = f"{text.strip()!r} " if "," in value else ""
            raise ValueError(f"{where}{error}; several addresses have a comma between") from None
        if url in urls:
            raise ValueError(f"{url} is named twice; name each server once")
        urls.append(url)
    return ",".join(urls)


def _base_url(value: object) -> str:
    """Return the address without trailing slashes. Raises ValueError when it is no base address."""
    example = "must be http://HOST:PORT or https://HOST[:PORT], perhaps with a path, without query or fragment"
    if not isinstance(value, str) or any(c.isspace() for c in value):
        raise ValueError(example)
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # urlsplit on a broken bracket, .port on "http://host:abc"
        raise ValueError(example) from None
    if not usable or "?" in value or "#" in value:
        raise ValueError(example)
    return value.rstrip("/")
