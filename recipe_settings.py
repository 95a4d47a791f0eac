"""The recipe's settings: frozen, validated, and the only place where the recipe reads environment variables.

`RecipeSettings` is what a training process needs, `LaunchSettings` what submit_webvoyager.sh needs to start one.
"""

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NewType, Self
from urllib.parse import urlsplit

PREFIX = "NEMO_GYM_BROWSER_"
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


Url = NewType("Url", str)
"""A base address, without a trailing slash."""
Secret = NewType("Secret", str)
"""Text that no message and no `repr` shows."""
Name = NewType("Name", str)
"""Text that can be a file's name and a word on a command line: letters, digits, dots, dashes, underscores."""


class SettingsError(ValueError):
    """Every setting that cannot be used, one line each: variable, value, what is allowed, what to do."""


def _setting(
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


class _FromEnvironment:
    """What both dataclasses of settings share.

    The constructor refuses what can never work, `from_env` also what would harm a run. Both raise SettingsError naming
    every bad setting.
    """

    def __post_init__(self) -> None:
        problems = []
        for f in fields(self):
            given = getattr(self, f.name)
            try:
                value = None if given is None and f.default is None else _checked(given, f.metadata["kind"])
                if value is not None and f.metadata["choices"] and value not in f.metadata["choices"]:
                    raise ValueError(f"must be one of {', '.join(f.metadata['choices'])}, or empty")
            except ValueError as e:
                problems.append(f"{f.metadata['variable']} ({f.name}) = {_shown(given, f.metadata['kind'])}: {e}")
            else:
                # Normalised in place (trailing slash of the URL, `~` of the folder): frozen only for everyone else.
                object.__setattr__(self, f.name, value)
        _raise_if_any(problems or self._problems_together())

    def _problems_together(self) -> list[str]:
        """Return what is wrong with settings that are each well by themselves."""
        return []

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return the settings that the environment variables give; an unset or empty variable means the default.

        `environ` defaults to the process's own environment. Raises SettingsError listing every variable that is
        unknown, ill-typed or out of its range.
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


@dataclass(frozen=True)
class RecipeSettings(_FromEnvironment):
    """Settings of one process of a training."""

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

    def _problems_together(self) -> list[str]:
        if (self.judge_url is None) == (self.judge_model is None):
            return []
        return [f"{PREFIX}JUDGE_URL and {PREFIX}JUDGE_MODEL: one is set without the other; set both or none"]

    def require_environment_url(self) -> str:
        """Return the environment's address. Raises SettingsError when none is set."""
        if self.environment_url is None:
            raise SettingsError(
                "NEMO_GYM_URL is not set: it must hold the address of a running NeMo Gym interactive_browser server. "
                "Fix: export NEMO_GYM_URL=http://HOST:PORT (see config.env.example), "
                "then check it with: python smoke_environment.py"
            )
        return self.environment_url


@dataclass(frozen=True)
class LaunchSettings(_FromEnvironment):
    """What submit_webvoyager.sh starts, and with what. The script reads the same variables; this class checks them."""

    run_name: str | None = _setting("RUN_NAME", None, Name)
    """Name of the run. The same name goes on from the run's last checkpoint."""

    results_root: Path | None = _setting("RESULTS_ROOT", None, Path)
    """Folder that every node sees; a run's own folder in it holds its checkpoints and logs."""

    train_file: Path | None = _setting("TRAIN_FILE", None, Path)
    """Rows to train on (JSONL)."""

    val_file: Path | None = _setting("VAL_FILE", None, Path)
    """Rows to validate on (JSONL)."""

    train_config: str | None = _setting("TRAIN_CONFIG", None, Name)
    """Name of a config in configs/; None: webvoyager_grpo_one_node on one node, else webvoyager_grpo."""

    model_path: str | None = _setting("MODEL_PATH", None, str)
    """The policy to start from, as Hugging Face names it or a folder; None: the config's."""

    gpus_per_node: int = _setting("GPUS_PER_NODE", 8, int)
    """GPUs that each node gives to the training."""

    train_python: str = _setting("TRAIN_PYTHON", "python3", str)
    """The Python that has verl, in the container if there is one."""

    container_image: str | None = _setting("CONTAINER_IMAGE", None, str)
    """Image for pyxis (`srun --container-image`); None: no container."""

    container_mounts: str | None = _setting("CONTAINER_MOUNTS", None, str)
    """Further mounts, as pyxis takes them; the recipe's folder, the results and the data are mounted anyway."""

    ray_port: int = _setting("RAY_PORT", 6379, int, 1024, "ports below are the system's", 65535)
    """Port of Ray's head on the first node."""

    nodes_timeout_s: float = _setting("NODES_TIMEOUT_S", 600.0, float)
    """How long all nodes and GPUs may take to join."""

    requeue: bool = _setting("REQUEUE", False, bool)
    """Whether a job that reaches its time limit or is preempted is put into the queue again."""

    start_environment: str | None = _setting("START_ENVIRONMENT", None, str, choices=("head", "cpu-nodes"))
    """Where the job starts environment servers; None: it starts none and NEMO_GYM_URL says where they run."""

    environment_servers_per_node: int = _setting("ENVIRONMENT_SERVERS_PER_NODE", 1, int)
    """Servers that the job starts on each node that has any."""

    environment_port: int = _setting("ENVIRONMENT_PORT", 18080, int, 1024, "ports below are the system's", 65535)
    """Port of a node's first server; the others follow."""

    gym_venv: Path = _setting("GYM_VENV", Path(".venv-gym"), Path)
    """Virtual environment that has NeMo Gym, for servers that the job starts; `make setup` makes the default."""

    gym_container_image: str | None = _setting("GYM_CONTAINER_IMAGE", None, str)
    """Image for the servers that the job starts; None: no container."""

    preflight_sessions: int | None = _setting("PREFLIGHT_SESSIONS", None, int)
    """Sessions that are held open at once before training; None: as many as training may open."""

    def missing(self) -> list[str]:
        """Return the variables without which nothing can be started, each with what it is."""
        required = {
            "RUN_NAME": (self.run_name, "the run's name"),
            "RESULTS_ROOT": (self.results_root, "a folder that every node sees"),
            "TRAIN_FILE": (self.train_file, "rows to train on"),
            "VAL_FILE": (self.val_file, "rows to validate on"),
        }
        return [f"{variable} is not set: {what}" for variable, (value, what) in required.items() if value is None]


def variables() -> tuple[str, ...]:
    """Return the name of every environment variable that the recipe reads."""
    return tuple(f.metadata["variable"] for settings in (RecipeSettings, LaunchSettings) for f in fields(settings))


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
    if metadata["maximum"] is not None and value > metadata["maximum"]:
        raise ValueError(f"must be at most {metadata['maximum']:g}; lower it or unset it")
    return value


def _shown(value: object, kind: type) -> str:
    return "(not shown)" if kind is Secret else repr(value)


def _checked(value: object, kind: type) -> object:
    """Return `value` in the setting's type. Raises ValueError saying what is allowed."""
    if kind is Url:
        return _base_url(value)
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
