"""The recipe's settings: frozen, validated, and the only place where the recipe reads environment variables.

`RecipeSettings` is what a training process needs, `LaunchSettings` what submit_webvoyager.sh needs to start one.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

from setting_kinds import Name, Secret, SettingsError, Url, Urls, checked, parsed, setting, shown

PREFIX = "NEMO_GYM_BROWSER_"


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
                value = None if given is None and f.default is None else checked(given, f.metadata["kind"])
                if value is not None and f.metadata["choices"] and value not in f.metadata["choices"]:
                    raise ValueError(f"must be one of {', '.join(f.metadata['choices'])}, or empty")
            except ValueError as e:
                problems.append(f"{f.metadata['variable']} ({f.name}) = {shown(given, f.metadata['kind'])}: {e}")
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
                values[f.name] = parsed(text, f.metadata)
            except ValueError as e:
                problems.append(f"{variable}={shown(text, f.metadata['kind'])}: {e}")
        _raise_if_any(problems)
        return cls(**values)


@dataclass(frozen=True)
class RecipeSettings(_FromEnvironment):
    """Settings of one process of a training."""

    environment_url: str | None = setting("NEMO_GYM_URL", None, Urls)
    """Base address of the NeMo Gym `interactive_browser` server, without a trailing slash; of several, a comma between.

    Whoever talks to a server takes the settings for it alone from `servers()`.
    """

    seed_timeout_s: float = setting(
        f"{PREFIX}SEED_TIMEOUT_S", 150.0, float, 120.0, "giving up on a seed leaks a browser in the server"
    )
    """Deadline of one `/seed_session` call."""

    act_timeout_s: float = setting(
        f"{PREFIX}ACT_TIMEOUT_S", 60.0, float, 45.0, "the server's own limit for a navigation is 30 s"
    )
    """Deadline of one browser action."""

    verify_timeout_s: float = setting(
        f"{PREFIX}VERIFY_TIMEOUT_S", 150.0, float, 120.0, "giving up on a verify leaks a browser in the server"
    )
    """Deadline of one `/verify` call."""

    close_timeout_s: float = setting(f"{PREFIX}CLOSE_TIMEOUT_S", 20.0, float)
    """Longest time that closing a session may hold up its rollout."""

    max_open_sessions: int = setting(f"{PREFIX}MAX_OPEN_SESSIONS", 16, int)
    """Browser sessions open at once, over all agent-loop workers and all servers."""

    max_concurrent_seeds: int = setting(f"{PREFIX}MAX_CONCURRENT_SEEDS", 2, int)
    """Seeds and verifies under way at once, over all agent-loop workers and all servers."""

    outage_patience_s: float = setting(f"{PREFIX}OUTAGE_PATIENCE_S", 600.0, float)
    """How long sessions wait for an environment that is down before they give up."""

    outage_after_seeds: int = setting(f"{PREFIX}OUTAGE_AFTER_SEEDS", 10, int)
    """Seeds in a row spoiled by the environment after which it counts as down; a refused connection counts at once."""

    drop_invalid: bool = setting(f"{PREFIX}DROP_INVALID", False, bool)
    """Whether an invalid rollout returns no row at all; if not, one flagged row that neither trains nor votes."""

    episode_log_dir: Path | None = setting(f"{PREFIX}EPISODE_LOG_DIR", None, Path)
    """Folder for the episode log; None writes no log."""

    judge_url: str | None = setting(f"{PREFIX}JUDGE_URL", None, Url)
    """Base address of the judge's OpenAI-compatible API, such as `http://HOST:8000/v1`; None: there is no judge."""

    judge_model: str | None = setting(f"{PREFIX}JUDGE_MODEL", None, str)
    """Name of the model that judges, as the endpoint knows it."""

    judge_api_key: str | None = setting(f"{PREFIX}JUDGE_API_KEY", None, Secret)
    """Key of the endpoint; None for one that asks for none."""

    judge_timeout_s: float = setting(f"{PREFIX}JUDGE_TIMEOUT_S", 120.0, float)
    """Deadline of one call of the judge."""

    judge_deadline_s: float = setting(f"{PREFIX}JUDGE_DEADLINE_S", 900.0, float)
    """How long one rollout's verdict may take, waiting for a free call and repetitions included."""

    judge_concurrency: int = setting(f"{PREFIX}JUDGE_CONCURRENCY", 8, int)
    """Calls of the judge under way at once in one agent-loop worker."""

    judge_votes: int = setting(f"{PREFIX}JUDGE_VOTES", 1, int)
    """Usable verdicts of which the majority decides."""

    judge_evidence_tokens: int = setting(
        f"{PREFIX}JUDGE_EVIDENCE_TOKENS", 6000, int, 256, "hardly a page would be shown to the judge"
    )
    """Tokens of the actions and observations that the judge is shown."""

    record_dir: Path | None = setting(f"{PREFIX}RECORD_DIR", None, Path)
    """Folder for recordings of the attempts' HTTP exchanges, for a replay; None records none."""

    def _problems_together(self) -> list[str]:
        problems = self._caps_below_one_a_server()
        if (self.judge_url is None) != (self.judge_model is None):
            problems.append(
                f"{PREFIX}JUDGE_URL and {PREFIX}JUDGE_MODEL: one is set without the other; set both or none"
            )
        return problems

    def require_environment_url(self) -> str:
        """Return the address of the one server. Raises SettingsError when none is set, or several are."""
        if self.environment_url is None:
            raise SettingsError(
                "NEMO_GYM_URL is not set: it must hold the address of a running NeMo Gym interactive_browser server. "
                "Fix: export NEMO_GYM_URL=http://HOST:PORT (see config.env.example), "
                "then check it with: python smoke_environment.py"
            )
        if len(self.environment_urls) > 1:
            raise SettingsError(
                f"NEMO_GYM_URL={self.environment_url} names {len(self.environment_urls)} servers, where one is needed. "
                f"Fix: name one of them, such as {self.environment_urls[0]}"
            )
        return self.environment_url

    @property
    def environment_urls(self) -> tuple[str, ...]:
        """The address of each server; empty if none is set."""
        return tuple(self.environment_url.split(",")) if self.environment_url else ()

    def servers(self) -> tuple["RecipeSettings", ...]:
        """Return the settings for each server: its address, and its share of the caps, which add up to these caps.

        Shares differ by one at most, the first servers have the larger ones. One server, or none: these settings.
        """
        urls = self.environment_urls
        if len(urls) < 2:
            return (self,)
        sessions, seeds = (shares(cap, len(urls)) for cap in (self.max_open_sessions, self.max_concurrent_seeds))
        return tuple(
            replace(self, environment_url=url, max_open_sessions=open_sessions, max_concurrent_seeds=under_way)
            for url, open_sessions, under_way in zip(urls, sessions, seeds, strict=True)
        )

    def _caps_below_one_a_server(self) -> list[str]:
        count = len(self.environment_urls)
        return [
            f"{PREFIX}{name}={cap}: NEMO_GYM_URL names {count} servers, and each needs a share of at least 1; "
            f"set {PREFIX}{name} to {count} or more, or name fewer servers in NEMO_GYM_URL"
            for name, cap in (
                ("MAX_OPEN_SESSIONS", self.max_open_sessions),
                ("MAX_CONCURRENT_SEEDS", self.max_concurrent_seeds),
            )
            if cap < count
        ]


@dataclass(frozen=True)
class LaunchSettings(_FromEnvironment):
    """What submit_webvoyager.sh starts, and with what. The script reads the same variables; this class checks them."""

    run_name: str | None = setting("RUN_NAME", None, Name)
    """Name of the run. The same name goes on from the run's last checkpoint."""

    results_root: Path | None = setting("RESULTS_ROOT", None, Path)
    """Folder that every node sees; a run's own folder in it holds its checkpoints and logs."""

    train_file: Path | None = setting("TRAIN_FILE", None, Path)
    """Rows to train on (JSONL)."""

    val_file: Path | None = setting("VAL_FILE", None, Path)
    """Rows to validate on (JSONL)."""

    train_config: str | None = setting("TRAIN_CONFIG", None, Name)
    """Name of a config in configs/; None: webvoyager_grpo_one_node on one node, else webvoyager_grpo."""

    model_path: str | None = setting("MODEL_PATH", None, str)
    """The policy to start from, as Hugging Face names it or a folder; None: the config's."""

    gpus_per_node: int = setting("GPUS_PER_NODE", 8, int)
    """GPUs that each node gives to the training."""

    train_python: str = setting("TRAIN_PYTHON", "python3", str)
    """The Python that has verl, in the container if there is one."""

    container_image: str | None = setting("CONTAINER_IMAGE", None, str)
    """Image for pyxis (`srun --container-image`); None: no container."""

    container_mounts: str | None = setting("CONTAINER_MOUNTS", None, str)
    """Further mounts, as pyxis takes them; the recipe's folder, the results and the data are mounted anyway."""

    ray_port: int = setting("RAY_PORT", 6379, int, 1024, "ports below are the system's", 65535)
    """Port of Ray's head on the first node."""

    nodes_timeout_s: float = setting("NODES_TIMEOUT_S", 600.0, float)
    """How long all nodes and GPUs may take to join."""

    requeue: bool = setting("REQUEUE", False, bool)
    """Whether a job that reaches its time limit or is preempted is put into the queue again."""

    start_environment: str | None = setting("START_ENVIRONMENT", None, str, choices=("head", "cpu-nodes"))
    """Where the job starts environment servers; None: it starts none and NEMO_GYM_URL says where they run."""

    environment_servers_per_node: int = setting("ENVIRONMENT_SERVERS_PER_NODE", 1, int)
    """Servers that the job starts on each node that has any."""

    environment_port: int = setting("ENVIRONMENT_PORT", 18080, int, 1024, "ports below are the system's", 65535)
    """Port of a node's first server; the others follow."""

    gym_venv: Path = setting("GYM_VENV", Path(".venv-gym"), Path)
    """Virtual environment that has NeMo Gym, for servers that the job starts; `make setup` makes the default."""

    gym_container_image: str | None = setting("GYM_CONTAINER_IMAGE", None, str)
    """Image for the servers that the job starts; None: no container."""

    preflight_sessions: int | None = setting("PREFLIGHT_SESSIONS", None, int)
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


def shares(total: int, parts: int) -> list[int]:
    """Return `total` in whole parts that differ by one at most, the larger ones first."""
    share, rest = divmod(total, parts)
    return [share + (i < rest) for i in range(parts)]


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
