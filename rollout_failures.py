"""The taxonomy of what can go wrong in a rollout: which failures exist, whose fault each is, and how to tell.

Two tables hold all of it. TRAITS says for each kind whose fault it is, whether a fresh attempt can help and whether
the attempt can go on. SYMPTOMS (failure_symptoms.py) says which kind a symptom stands for; the `classify_*` functions
only look it up. A symptom that no row knows is `unclassified`: kept out of training, never guessed to be a zero.

Blame follows the cause, so that a policy can't get out of a bad rollout by breaking something: an address that the
policy made up is the policy's, the task's own site refusing connections is the environment's.

Source: nemo-gym 0.7.0, resources_servers/interactive_browser/app.py and nemo_gym/base_resources_server.py.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote_plus, urlsplit

from failure_symptoms import SYMPTOMS, Call, CallContext, Channel, FailureKind, Symptom, origin

__all__ = [
    "DEFAULT_BLOCKED_PATTERNS",
    "EVIDENCE_CHARS",
    "SYMPTOMS",
    "TRAITS",
    "Call",
    "CallContext",
    "Channel",
    "Failure",
    "FailureKind",
    "Fault",
    "Symptom",
    "Traits",
    "classify_error",
    "classify_exception",
    "classify_observation",
    "classify_status",
    "classify_verdict",
    "excerpt",
    "failure_of",
    "origin",
    "page_url",
]

EVIDENCE_CHARS = 300

DEFAULT_BLOCKED_PATTERNS: tuple[str, ...] = (
    r"\b(verify(ing)?|confirm(ing)?|check(ing)? (if|that|whether)|make sure|prove)"
    r"( that)? you( are|['’]re)( an?)? human\b",
    r"\b(verify|confirm|make sure|prove)( that)? you( are|['’]re) not an? (ro)?bot\b",
    r"\bpress (&|and) hold\b.{0,80}\b(human|(ro)?bot)\b",
    r"(?m)^just a moment\.\.\.$",  # Cloudflare's title
    r"\bchecking your browser before accessing\b",
    r"\bneeds to review the security of your connection\b",
    r"\b(complete|solve|solving|pass) (this|the|a|the above) (re|h)?captcha to (continue|proceed|access)\b",
    r"\bcomplete the security check to (access|continue)\b",
    r"\bdetected unusual (traffic|activity) from your (computer )?(network|device|connection)\b",
    r"\bgoogle\.[a-z.]{2,6}/sorry/",
    r"\bcaptcha-delivery\.com/",  # DataDome
    r"\bplease enable js and disable any ad blocker\b",  # DataDome
    r"\baccess to this page has been denied\b.{0,200}\bautomat",  # PerimeterX
    r"(?m)^pardon our interruption\b",  # Imperva
)
"""Phrases of human checks, case ignored, searched in address, title, labels and text of a page, one a line.

Never the bare word captcha, which ordinary pages discuss; and no firewall's page ("Sorry, you have been blocked"),
which a policy can bring about by typing an injection.
"""

# A human check is a few sentences and one or two elements; a page of the site that merely speaks of one has more.
_CHECK_CHARS = 2_000
_CHECK_ELEMENTS = 12


class Fault(StrEnum):
    """Whose doing a failure is."""

    ENVIRONMENT = "environment"  # the browser, its server, the site under test, the inference engine
    POLICY = "policy"  # what the policy asked for
    MEASUREMENT = "measurement"  # neither: the task's data, the scoring, or a symptom that nobody knows


@dataclass(frozen=True)
class Failure:
    """One failure of a rollout, classified."""

    kind: FailureKind
    fault: Fault
    retryable: bool
    """A fresh attempt of the same rollout may succeed."""
    fatal: bool
    """This attempt can't go on; if not, the policy reads the server's text and carries on."""
    evidence: str
    """Excerpt of what was seen, at most EVIDENCE_CHARS characters."""
    retry_after_s: float | None = None
    """Seconds that the server asked to wait before the next attempt; None if it did not say."""


@dataclass(frozen=True)
class Traits:
    """What follows from a kind."""

    fault: Fault
    retryable: bool
    fatal: bool


_BROKEN_ENVIRONMENT = Traits(Fault.ENVIRONMENT, retryable=True, fatal=True)
_PASSING_TROUBLE = Traits(Fault.ENVIRONMENT, retryable=False, fatal=False)
_POLICY_MISTAKE = Traits(Fault.POLICY, retryable=False, fatal=False)
_POLICY_WRECKED_IT = Traits(Fault.POLICY, retryable=False, fatal=True)
_NO_MEASUREMENT = Traits(Fault.MEASUREMENT, retryable=False, fatal=True)

TRAITS: Mapping[FailureKind, Traits] = MappingProxyType(
    {
        # Not retryable: the gate has already waited as long as the settings allow.
        FailureKind.ENVIRONMENT_DOWN: Traits(Fault.ENVIRONMENT, retryable=False, fatal=True),
        FailureKind.ENVIRONMENT_UNREACHABLE: _BROKEN_ENVIRONMENT,
        FailureKind.ENVIRONMENT_DISCONNECTED: _BROKEN_ENVIRONMENT,
        FailureKind.ENVIRONMENT_SHUTDOWN: _BROKEN_ENVIRONMENT,
        FailureKind.SERVER_ERROR: _BROKEN_ENVIRONMENT,
        FailureKind.PROVIDER_FULL: _BROKEN_ENVIRONMENT,
        FailureKind.MALFORMED_ANSWER: _BROKEN_ENVIRONMENT,
        FailureKind.SEED_TIMEOUT: _BROKEN_ENVIRONMENT,
        FailureKind.ACT_TIMEOUT: _BROKEN_ENVIRONMENT,
        FailureKind.VERIFY_TIMEOUT: _BROKEN_ENVIRONMENT,
        FailureKind.SESSION_LOST: _BROKEN_ENVIRONMENT,
        FailureKind.BROWSER_LAUNCH_FAILED: _BROKEN_ENVIRONMENT,
        FailureKind.BROWSER_DIED: _BROKEN_ENVIRONMENT,
        FailureKind.BROWSER_CRASHED_BY_POLICY: _POLICY_WRECKED_IT,
        FailureKind.START_PAGE_FAILED: _BROKEN_ENVIRONMENT,
        FailureKind.SITE_DOWN: _BROKEN_ENVIRONMENT,
        FailureKind.PAGE_BLOCKED: _BROKEN_ENVIRONMENT,
        FailureKind.DEAD_LINK: _PASSING_TROUBLE,
        FailureKind.CLICK_STILL_LOADING: _PASSING_TROUBLE,
        FailureKind.PAGE_CHANGED: _PASSING_TROUBLE,
        FailureKind.BAD_ELEMENT: _POLICY_MISTAKE,
        FailureKind.ELEMENT_NOT_USABLE: _POLICY_MISTAKE,
        FailureKind.BAD_URL: _POLICY_MISTAKE,
        FailureKind.NAVIGATION_FAILED: _POLICY_MISTAKE,
        FailureKind.HUNG_BY_POLICY: _POLICY_WRECKED_IT,
        FailureKind.ACTION_REJECTED: _POLICY_MISTAKE,
        FailureKind.TASK_DATA_ERROR: _NO_MEASUREMENT,
        FailureKind.REQUEST_REJECTED: _NO_MEASUREMENT,
        FailureKind.SCORING_FAILED: Traits(Fault.MEASUREMENT, retryable=True, fatal=True),
        FailureKind.REWARD_MASKED: Traits(Fault.MEASUREMENT, retryable=True, fatal=True),
        # No fresh attempt: the judge is asked again with what the episode left, which needs no browser (judge.py).
        FailureKind.JUDGE_UNREACHABLE: _NO_MEASUREMENT,
        FailureKind.JUDGE_REJECTED: _NO_MEASUREMENT,
        FailureKind.JUDGE_UNPARSEABLE: _NO_MEASUREMENT,
        FailureKind.JUDGE_REFUSED: _NO_MEASUREMENT,
        FailureKind.JUDGE_TRUNCATED: _NO_MEASUREMENT,
        FailureKind.ENGINE_ERROR: _BROKEN_ENVIRONMENT,
        # Not retryable: no time is left for another attempt.
        FailureKind.EPISODE_DEADLINE: Traits(Fault.ENVIRONMENT, retryable=False, fatal=True),
        FailureKind.PROMPT_TOO_LONG: _NO_MEASUREMENT,
        FailureKind.ROWS_NOT_PLANNED: _NO_MEASUREMENT,
        FailureKind.UNCLASSIFIED: _NO_MEASUREMENT,
    }
)


def failure_of(kind: FailureKind, evidence: str) -> Failure:
    """Return the failure of a kind that is already known, with the kind's traits."""
    traits = TRAITS[kind]
    return Failure(kind, traits.fault, traits.retryable, traits.fatal, excerpt(evidence))


def excerpt(text: str) -> str:
    """Return text on one line, cut visibly at EVIDENCE_CHARS characters."""
    line = " ".join(text.split())
    return line if len(line) <= EVIDENCE_CHARS else line[: EVIDENCE_CHARS - 3] + "..."


def _look_up(channel: Channel, text: str, context: CallContext) -> FailureKind:
    for row in SYMPTOMS:
        if row.channel is not channel or context.call not in row.calls or not re.search(row.pattern, text):
            continue
        if row.when is None or row.when(context):
            return row.kind
    return FailureKind.UNCLASSIFIED


def classify_status(status: int, body: str, context: CallContext, retry_after: str | None = None) -> Failure:
    """Return the failure behind an HTTP answer whose status is not 200; `retry_after` is that header's text."""
    text = " ".join(f"{status} {body}".split())
    failure = failure_of(_look_up(Channel.STATUS, text, context), f"{context.call}: HTTP {text}")
    wait_s = seconds_to_wait(retry_after) if failure.retryable else None
    return failure if wait_s is None else replace(failure, retry_after_s=wait_s)


def seconds_to_wait(retry_after: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for, or None where it says nothing that can be read.

    Source: RFC 9110, section 10.2.3: a number of seconds or an HTTP date.
    """
    text = (retry_after or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text):
        return float(text)
    try:
        until = parsedate_to_datetime(text)
    except (TypeError, ValueError, OverflowError):
        return None
    # A date with the zone -0000 comes back without one; HTTP dates are in UTC.
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def classify_error(error: str, context: CallContext) -> Failure:
    """Return the failure behind the `error` of a 200 answer to an action."""
    return failure_of(_look_up(Channel.ERROR, error, context), error)


def classify_observation(observation: str, context: CallContext) -> Failure | None:
    """Return the failure that an observation without `error` shows, or None for an ordinary page."""
    url = page_url(observation)
    if url is None:
        return None
    if url.startswith("chrome-error:"):
        return failure_of(_look_up(Channel.PAGE, url, context), f"the browser shows its error page: {url}")
    return _blocked_page(url, observation, context)


def _blocked_page(url: str, observation: str, context: CallContext) -> Failure | None:
    """Return the failure of a page that is a human check in place of what the task needs, or None.

    A policy must not get out of a lost task by a page of its own making. So the words that tell the check must not all
    be the policy's own, and once it has done anything, the check must stand on the task's own site and fill the page.
    """
    if not context.blocked_patterns or (context.acted and not _may_be_blocked(url, observation, context)):
        return None
    shown = _shown_text(observation)
    said = "".join(_words(context.said))
    for pattern in context.blocked_patterns:
        for match in pattern.finditer(shown):
            if not all(word in said for word in _words(match.group())):
                evidence = f"{match.group()[:80]!r} at {url[:100]} (pattern {pattern.pattern!r})"
                return failure_of(FailureKind.PAGE_BLOCKED, evidence)
    return None


def _may_be_blocked(url: str, observation: str, context: CallContext) -> bool:
    own, host = (_host(address) for address in (context.start_url, url))
    if own is None or host is None or not (own == host or own.endswith(f".{host}") or host.endswith(f".{own}")):
        return False
    elements = len(re.findall(r"(?m)^  \[\d+\] ", observation))
    return elements <= _CHECK_ELEMENTS and len(observation) <= _CHECK_CHARS


def _host(url: str | None) -> str | None:
    try:
        return urlsplit((url or "").strip()).hostname
    except ValueError:
        return None


def _shown_text(observation: str) -> str:
    """Return address, title, labels and text of an observation, one a line, without the server's own words."""
    return re.sub(r"(?m)^(URL: |TITLE: |ELEMENTS:$|TEXT:$|  \[\d+\] \w+: ?|  )", "", observation)


def _words(text: str) -> list[str]:
    """Return the runs of letters and digits, unescaped and casefolded: a page may show typed text in another form."""
    plain = html.unescape(unquote_plus(unquote_plus(text)))
    plain = unicodedata.normalize("NFKC", plain).casefold()
    return "".join(c if c.isalnum() else " " for c in plain).split()


def page_url(observation: str) -> str | None:
    """Return the address in the first line of an observation ("URL: ..."), or None where there is none."""
    first = observation.partition("\n")[0]
    return first.removeprefix("URL: ").strip() if first.startswith("URL: ") else None


def classify_exception(error: BaseException, context: CallContext) -> Failure:
    """Return the failure behind an exception of the HTTP client, told by the names of its classes."""
    names = " ".join(cls.__name__ for cls in type(error).__mro__)
    kind = _look_up(Channel.EXCEPTION, f"{names}: {error}", context)
    return failure_of(kind, f"{context.call}: {type(error).__name__}: {error}")


def classify_verdict(answer: Mapping[str, Any], context: CallContext) -> Failure | None:
    """Return why the reward in an answer of /verify is no measurement, or None if it is one.

    Honours `failure_reason` (all that interactive_browser sets), `mask_sample` and `failure_kind`, the latter two also
    in `instance_config`, where older NeMo Gym servers put them. The text that says most is looked up first. A named
    failure counts even where `mask_sample` is false: a lost rollout costs less than a reward that measured nothing.
    """
    nested = answer.get("instance_config")
    nested = nested if isinstance(nested, Mapping) else {}
    masked = any(bool(place.get("mask_sample")) for place in (answer, nested))
    reason, gym_kind = answer.get("failure_reason"), answer.get("failure_kind") or nested.get("failure_kind")
    evidence = f"verify: mask_sample={masked} failure_kind={gym_kind} failure_reason={reason}"
    for channel, text in ((Channel.REASON, reason), (Channel.GYM_KIND, gym_kind)):
        kind = _look_up(channel, str(text), context) if text else FailureKind.UNCLASSIFIED
        if kind is not FailureKind.UNCLASSIFIED:
            return failure_of(kind, evidence)
    if masked:
        return failure_of(FailureKind.REWARD_MASKED, evidence)
    if reason or gym_kind:
        return failure_of(FailureKind.UNCLASSIFIED, evidence)
    reward = answer.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        return failure_of(FailureKind.MALFORMED_ANSWER, f"verify: reward is {reward!r}, not a finite number")
    return None
