"""How long an episode may be: the `browser` section of the Hydra config, checked and frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, fields


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
    """Seconds of generation and environment time of one attempt together; waiting for a free session is not counted."""
    max_attempts: int = 3
    """Attempts at one rollout; a further one is made only after a failure of the environment."""
    retry_backoff_s: float = 2.0
    """Longest wait before the second attempt; it doubles up to 60 s and is shortened at random by up to half."""

    def __post_init__(self) -> None:
        problems = []
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = int if field.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
                kind = "a whole number" if field.type is int else "a number"
                problems.append(f"browser.{field.name}={value!r}: must be {kind} above 0")
        if problems:
            raise LimitsError("\n".join(problems))

    @classmethod
    def from_section(cls, section: Mapping | None) -> "EpisodeLimits":
        """Return the limits of a `browser` section, defaults where a key is absent; no section means all defaults."""
        given = dict(section or {})
        known = sorted(field.name for field in fields(cls))
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise LimitsError("\n".join(f"browser.{key}: no such key; there are {', '.join(known)}" for key in unknown))
        return cls(**given)
