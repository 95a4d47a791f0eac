"""The recipe's settings: frozen, validated, and the only place where the recipe reads environment variables."""

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NewType
from urllib.parse import urlsplit

PREFIX = "NEMO_GYM_BROWSER_"
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


Url = NewType("Url", str)
"""A base address, without a trailing slash."""
Secret = NewType("Secret", str)
"""Text that no message and no `repr` shows."""


class SettingsError(ValueError):
    """Every setting that cannot be used, one line each: variable, value, what is allowed, what to do."""


def _setting(variable: str, default: object, kind: type, minimum: float | None = None, why: str = ""):
    """Return a dataclass field that remembers its environment variable and the least value allowed from there."""
    metadata = {"variable": variable, "kind": kind, "minimum": minimum, "why": why}
    return field(default=default, repr=kind is not Secret, metadata=metadata)


@dataclass(frozen=True)
class RecipeSettings:
    """Settings of one process.

    The constructor refuses what can never work, `from_env` also what would harm a training run. Both raise
    SettingsError naming every bad setting.
    """

    environment_url: str | None = _setting("NEMO_GYM_URL", None, Url)
    """Base address of the NeMo Gym `interactive_browser` server, without a trailing slash."""

    seed_timeout_s: float = _setting(
        f"{PREFIX}SEED_TIMEOUT_S", 150.0, float, 120.0, "giving up on a seed leaks a browser in the server"
    )
    """Deadline of one `/seed_session` call."""

    act_timeout_s: float = _setting(
        f"{PREFIX}ACT_TIMEOUT_S", 60.0, float, 45.0, "the server's own limit for a navigation is 30 s"
    )
    """Deadline of one browser action."""

    verify_timeout_s: float = _setting(
        f"{PREFIX}VERIFY_TIMEOUT_S", 150.0, float, 120.0, "giving up on a verify leaks a browser in the server"
    )
    """Deadline of one `/verify` call."""

    close_timeout_s: float = _setting(f"{PREFIX}CLOSE_TIMEOUT_S", 20.0, float)
    """Longest time that closing a session may hold up its rollout."""

    max_open_sessions: int = _setting(f"{PREFIX}MAX_OPEN_SESSIONS", 16, int)
    """Browser sessions open at once, over all agent-loop workers."""

    max_concurrent_seeds: int = _setting(f"{PREFIX}MAX_CONCURRENT_SEEDS", 2, int)
    """Seeds and verifies under way at once, over all agent-loop workers."""

    outage_patience_s: float = _setting(f"{PREFIX}OUTAGE_PATIENCE_S", 600.0, float)
    """How long sessions wait for an environment that is down before they give up."""

    outage_after_seeds: int = _setting(f"{PREFIX}OUTAGE_AFTER_SEEDS", 10, int)
    """Seeds in a row spoiled by the environment after which it counts as down; a refused connection counts at once."""

    drop_invalid: bool = _setting(f"{PREFIX}DROP_INVALID", False, bool)
    """Whether an invalid rollout returns no row at all; if not, one flagged row that neither trains nor votes."""

    episode_log_dir: Path | None = _setting(f"{PREFIX}EPISODE_LOG_DIR", None, Path)
    """Folder for the episode log; None writes no log."""

    judge_url: str | None = _setting(f"{PREFIX}JUDGE_URL", None, Url)
    """Base address of the judge's OpenAI-compatible API, such as `http://HOST:8000/v1`; None: there is no judge."""

    judge_model: str | None = _setting(f"{PREFIX}JUDGE_MODEL", None, str)
    """Name of the model that judges, as the endpoint knows it."""

    judge_api_key: str | None = _setting(f"{PREFIX}JUDGE_API_KEY", None, Secret)
    """Key of the endpoint; None for one that asks for none."""

    judge_timeout_s: float = _setting(f"{PREFIX}JUDGE_TIMEOUT_S", 120.0, float)
    """Deadline of one call of the judge."""

    judge_deadline_s: float = _setting(f"{PREFIX}JUDGE_DEADLINE_S", 900.0, float)
    """How long one rollout's verdict may take, waiting for a free call and repetitions included."""

    judge_concurrency: int = _setting(f"{PREFIX}JUDGE_CONCURRENCY", 8, int)
    """Calls of the judge under way at once in one agent-loop worker."""

    judge_votes: int = _setting(f"{PREFIX}JUDGE_VOTES", 1, int)
    """Usable verdicts of which the majority decides."""

    judge_evidence_tokens: int = _setting(
        f"{PREFIX}JUDGE_EVIDENCE_TOKENS", 6000, int, 256, "hardly a page would be shown to the judge"
    )
    """Tokens of the actions and observations that the judge is shown."""

    record_dir: Path | None = _setting(f"{PREFIX}RECORD_DIR", None, Path)
    """Folder for recordings of the attempts' HTTP exchanges, for a replay; None records none."""

    def __post_init__(self) -> None:
        problems = []
        for f in fields(self):
            given = getattr(self, f.name)
            try:
                value = _checked(given, f.metadata["kind"])
            except ValueError as e:
                problems.append(f"{f.metadata['variable']} ({f.name}) = {_shown(given, f.metadata['kind'])}: {e}")
            else:
                # Normalised in place (trailing slash of the URL, `~` of the folder): frozen only for everyone else.
                object.__setattr__(self, f.name, value)
        if not problems and (self.judge_url is None) != (self.judge_model is None):
            problems.append(
                f"{PREFIX}JUDGE_URL and {PREFIX}JUDGE_MODEL: one is set without the other; set both or none"
            )
        _raise_if_any(problems)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "RecipeSettings":
        """Return the settings that the environment variables give; an unset or empty variable means the default.

        `environ` defaults to the process's own environment. Raises SettingsError listing every variable that is
        unknown, ill-typed or below its minimum.
        """
        environ = os.environ if environ is None else environ  # noqa: TID251 - the one reader of the environment
        values: dict[str, object] = {}
        problems = _unknown_variables(environ)
        for f in fields(cls):
            variable = f.metadata["variable"]
            text = environ.get(variable, "").strip()
            if not text:
                continue
            try:
                values[f.name] = _parsed(text, f.metadata)
            except ValueError as e:
                problems.append(f"{variable}={_shown(text, f.metadata['kind'])}: {e}")
        _raise_if_any(problems)
        return cls(**values)

    def require_environment_url(self) -> str:
        """Return the environment's address. Raises SettingsError when none is set."""
        if self.environment_url is None:
            raise SettingsError(
                "NEMO_GYM_URL is not set: it must hold the address of a running NeMo Gym interactive_browser server. "
                "Fix: export NEMO_GYM_URL=http://HOST:PORT (see config.env.example), "
                "then check it with: python smoke_environment.py"
            )
        return self.environment_url


def variables() -> tuple[str, ...]:
    """Return the name of every environment variable that the recipe reads."""
    return tuple(f.metadata["variable"] for f in fields(RecipeSettings))


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        raise SettingsError("Settings that cannot be used:\n" + "\n".join(f"  {p}" for p in problems))


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return one problem per variable that carries the recipe's prefix but means nothing to it.

    A misspelled name would otherwise leave the default in force without a word.
    """
    known = variables()
    problems = []
    for name in sorted(n for n in environ if n.startswith(PREFIX) and n not in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else f"unset it (known: {', '.join(known)})"
        problems.append(f"{name}={environ[name]!r}: no such setting; {hint}")
    return problems


def _parsed(text: str, metadata: Mapping) -> object:
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
    value = _checked(text, kind)
    if minimum is not None and value < minimum:
        raise ValueError(f"must be at least {minimum:g} ({metadata['why']}); raise it or unset it")
    return value


def _shown(value: object, kind: type) -> str:
    return "(not shown)" if kind is Secret else repr(value)


def _checked(value: object, kind: type) -> object:
    """Return `value` in the setting's type. Raises ValueError saying what is allowed."""
    if kind is Url:
        return None if value is None else _base_url(value)
    if kind in (str, Secret):
        if value is not None and (not isinstance(value, str) or not value or any(c.isspace() for c in value)):
            raise ValueError("must be text without white space")
        return value
    if kind is Path:
        return None if value is None else Path(value).expanduser()
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
