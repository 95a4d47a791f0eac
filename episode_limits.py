"""How long an episode may be: the `browser` section of the Hydra config, checked and frozen."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from call_forest import CallForestError, find_policy
from context_policy import ContextPolicy
from rollout_failures import DEFAULT_BLOCKED_PATTERNS

_MAY_BE_ZERO = ("retry_unusable_calls",)


class LimitsError(ValueError):
    """Every key of the `browser` section that can't be used, one line each."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one rollout; each key is `browser.<name>` in the config and on the command line.

    Raises LimitsError for an unknown key, a wrong type, a number that is too small, or a policy that does not exist.
    """

    max_turns: int = 30
    """Turns of one episode. The last turn's action is run; then the episode is scored as it stands."""
    max_unusable_calls: int = 3
    """Consecutive replies without a usable tool call after which the episode ends and is scored as it stands."""
    max_observation_tokens: int = 1024
    """An observation longer than this is cut, with a visible mark."""
    max_tokens_per_turn: int = 512
    """Tokens that the policy may generate in one turn, thoughts included."""
    episode_deadline_s: float = 1200.0
    """Seconds of generation and environment time of all attempts at a rollout; waiting for a session isn't counted."""
    max_attempts: int = 3
    """Attempts at one rollout; a further one is made only after a failure of the environment, within the deadline."""
    retry_backoff_s: float = 2.0
    """Longest wait before the second attempt; it doubles up to 60 s and is shortened at random by up to half."""
    blocked_page_patterns: tuple[str, ...] = DEFAULT_BLOCKED_PATTERNS
    """Regular expressions, case ignored, that tell a human check or a block page from a page of the task's site."""
    context_policy: str = ContextPolicy.APPEND
    """What happens when the next prompt would pass the budget: context_policy.py."""
    context_budget_tokens: int | None = None
    """Longest prompt of a call; None: only data.max_prompt_length and data.max_response_length bound it."""
    window_observations: int = 2
    """`window`: how many of the last observations a fresh context holds, the page at hand included."""
    max_summary_tokens: int = 256
    """`summary`: tokens that the policy may generate for one; so much room is kept free for it."""
    retry_unusable_calls: int = 0
    """How often a reply that is no usable call is discarded and generated anew, in each turn."""
    max_rows_per_rollout: int = 16
    """Training rows of one rollout; an episode that would need another fresh context ends with `context_full`."""
    selection_policy: str = "returned_history"
    """Which of a rollout's model calls train: a name of call_forest.POLICIES, or `module:function`."""

    def __post_init__(self) -> None:
        problems = [*_bad_patterns(self.blocked_page_patterns), *_bad_policies(self)]
        for field in fields(self):
            if field.type in (int, float, int | None):
                problems += _bad_number(field.name, getattr(self, field.name), field.type)
        if problems:
            raise LimitsError("\n".join(problems))

    @classmethod
    def from_section(cls, section: Mapping | None) -> "EpisodeLimits":
        """Return the limits of a `browser` section, defaults where a key is absent; no section means all defaults.

        `blocked_page_patterns: null` means its default as well.
        """
        given = dict(section or {})
        known = sorted(field.name for field in fields(cls))
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise LimitsError("\n".join(f"browser.{key}: no such key; there are {', '.join(known)}" for key in unknown))
        patterns = given.pop("blocked_page_patterns", None)
        if patterns is not None:
            given["blocked_page_patterns"] = patterns if isinstance(patterns, str) else tuple(patterns)
        return cls(**given)

    @property
    def blocked_patterns(self) -> tuple[re.Pattern[str], ...]:
        """The patterns of blocked pages, compiled."""
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in self.blocked_page_patterns)


def _bad_number(name: str, value: object, kind: object) -> list[str]:
    """Return a line if the value of this key is no number of its kind, or too small."""
    if value is None and kind == int | None:
        return []
    least = 0 if name in _MAY_BE_ZERO else 1 if kind is not float else None
    allowed = (int, float) if kind is float else int
    if not isinstance(value, bool) and isinstance(value, allowed) and (value > 0 if least is None else value >= least):
        return []
    words = "a number above 0" if kind is float else f"a whole number {'of at least' if least == 0 else 'above'} 0"
    return [f"browser.{name}={value!r}: must be {words}{', or null' if kind == int | None else ''}"]


def _bad_policies(limits: EpisodeLimits) -> list[str]:
    """Return a line for a context policy or a selection policy that does not exist."""
    problems = []
    if limits.context_policy not in ContextPolicy.__members__.values():
        names = ", ".join(ContextPolicy)
        problems.append(f"browser.context_policy={limits.context_policy!r}: no such policy; there are {names}")
    try:
        find_policy(limits.selection_policy)
    except CallForestError as error:
        problems.append(f"browser.selection_policy={limits.selection_policy!r}: {error}")
    return problems


def _bad_patterns(patterns: object) -> list[str]:
    """Return a line for each pattern that is no regular expression, or that would match every page."""
    key = "browser.blocked_page_patterns"
    if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        return [f"{key}={patterns!r}: must be a list of regular expressions"]
    problems = []
    for pattern in patterns:
        try:
            if re.search(pattern, ""):
                problems.append(f"{key}: {pattern!r} matches an empty page, so it would match every page")
        except re.error as error:
            problems.append(f"{key}: {pattern!r} is no regular expression: {error}")
    return problems
