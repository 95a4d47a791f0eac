"""How long an episode may be: the `browser` section of the Hydra config, checked and frozen."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from rollout_failures import DEFAULT_BLOCKED_PATTERNS


class LimitsError(ValueError):
    """Every key of the `browser` section that can't be used, one line each."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one rollout; each key is `browser.<name>` in the config and on the command line.

    Raises LimitsError for an unknown key, a wrong type or a value that is not above 0.
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

    def __post_init__(self) -> None:
        problems = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "blocked_page_patterns":
                problems += _bad_patterns(value)
                continue
            allowed = int if field.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
                kind = "a whole number" if field.type is int else "a number"
                problems.append(f"browser.{field.name}={value!r}: must be {kind} above 0")
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
