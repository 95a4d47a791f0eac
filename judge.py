"""The judge: a language model that says whether an episode did its task; a verdict that can be trusted, or none.

    python judge.py --check                      two known cases go to the configured judge; exit 0, 1 or 2
    python judge.py --calibrate LABELLED.jsonl   how far the judge agrees with people's labels

A reply that can't be read, an endpoint that is down and a refusal are no verdict: the rollout has no measurement, and
that is never a 0. A policy that gave no answer has failed, and no judge is asked.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from judge_client import JudgeClient, OutputFormat, Reply
from judge_prompt import MIN_EVIDENCE_TOKENS, CountTokens, Evidence, build_messages, estimate_tokens
from judge_verdict import FailureKind, Outcome, Verdict, read_verdict, unusable
from recipe_settings import PREFIX, RecipeSettings, SettingsError

__all__ = ["Evidence", "FailureKind", "Judge", "Judgement", "Outcome", "Verdict", "estimate_tokens", "read_verdict"]

REPEATS = {
    FailureKind.JUDGE_UNPARSEABLE: 2,
    FailureKind.JUDGE_TRUNCATED: 2,
    FailureKind.JUDGE_REFUSED: 1,
}
"""How often a vote is asked for again in all, by what was wrong with the last reply; other kinds: never."""
VOTE_TEMPERATURE = 0.7
"""Temperature when several votes are taken: at 0 they would all be the same one. A single vote is taken at 0."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0


@dataclass(frozen=True)
class Judgement:
    """What came of one episode's judging, and what it cost."""

    verdict: Verdict
    calls: int
    """Requests to the endpoint, those that it refused included."""
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float
    unusable: tuple[FailureKind, ...]
    """Kind of each call that gave no verdict, in order; refusals of an output format, which is then changed, are not in
    it."""


@dataclass
class _Tally:
    """One judgement while it is made."""

    messages: list[dict[str, str]]
    deadline: float
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unusable: list[FailureKind] = field(default_factory=list)
    problem: str = ""
    """What was wrong with the last call that gave no verdict."""

    def note(self, reply: Reply) -> None:
        self.calls += 1
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens

    def last(self) -> str:
        return f"; the last one: {self.problem}" if self.problem else ", all of it spent waiting for a free one"


class Judge:
    """The judge of one event loop. Close it (`async with`, or `aclose`) where the loop does not end with it.

    Raises SettingsError when no judge is configured, or its budget for evidence is too small to show a page.
    """

    def __init__(
        self,
        settings: RecipeSettings,
        count_tokens: CountTokens = estimate_tokens,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if settings.judge_url is None:
            raise SettingsError(
                f"{PREFIX}JUDGE_URL and {PREFIX}JUDGE_MODEL are not set: they must name an OpenAI-compatible endpoint "
                "and its model. Fix: set both (see config.env.example), then check with: python judge.py --check"
            )
        if settings.judge_evidence_tokens < MIN_EVIDENCE_TOKENS:
            raise SettingsError(
                f"{PREFIX}JUDGE_EVIDENCE_TOKENS={settings.judge_evidence_tokens}: must be at least "
                f"{MIN_EVIDENCE_TOKENS}, or the judge sees no page; raise it or unset it"
            )
        self._settings = settings
        self._count_tokens = count_tokens
        self._clock, self._sleep = clock, sleep
        self._slots = asyncio.Semaphore(settings.judge_concurrency)
        self._client = JudgeClient(settings)

    @classmethod
    def shared(cls, settings: RecipeSettings, count_tokens: CountTokens = estimate_tokens) -> Judge:
        """Return the judge of the running event loop; the same one for equal settings.

        It counts tokens as its first user does: verl builds a loop, and so a counting function, for each trajectory.
        """
        judges = _JUDGES.setdefault(asyncio.get_running_loop(), {})
        if settings not in judges:
            judges[settings] = cls(settings, count_tokens)
        return judges[settings]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @property
    def output_format(self) -> OutputFormat:
        """What holds the replies to the schema, as far as the endpoint has been asked."""
        return self._client.output_format

    async def score(self, task: str, answer: str | None, evidence: Evidence, reference: str | None = None) -> Judgement:
        """Return whether the episode did its task; within the deadline of the settings, and without raising.

        A cancellation goes through and frees what it held.
        """
        started = self._clock()
        if answer is None or not answer.strip():
            verdict = Verdict(Outcome.FAILURE, "The policy gave no answer.")
            return Judgement(verdict, 0, 0, 0, 0.0, ())
        messages = build_messages(
            task,
            answer,
            evidence,
            reference,
            budget_tokens=self._settings.judge_evidence_tokens,
            count_tokens=self._count_tokens,
        )
        tally = _Tally(messages, started + self._settings.judge_deadline_s)
        verdict = await self._majority(tally)
        used = (tally.calls, tally.prompt_tokens, tally.completion_tokens)
        return Judgement(verdict, *used, self._clock() - started, tuple(tally.unusable))

    async def _majority(self, tally: _Tally) -> Verdict:
        """Return what more than half of the votes say. Stops as soon as that is certain.

        A tie is a FAILURE: what the judge can't agree on is not credited. Votes that could not be had leave the verdict
        unusable unless they could not have changed it.
        """
        votes = self._settings.judge_votes
        needed = {Outcome.SUCCESS: votes // 2 + 1, Outcome.FAILURE: votes - votes // 2}
        said: dict[Outcome, list[Verdict]] = {Outcome.SUCCESS: [], Outcome.FAILURE: []}
        missing: Verdict | None = None
        for left in range(votes, 0, -1):
            if all(len(said[outcome]) + left < needed[outcome] for outcome in said):
                break
            verdict = await self._vote(tally)
            if verdict.kind is not None:
                missing = verdict
                if verdict.kind not in REPEATS:
                    break  # rejected, or out of time: the next vote would be as well
                continue
            said[verdict.outcome].append(verdict)
            if len(said[verdict.outcome]) == needed[verdict.outcome]:
                return said[verdict.outcome][0]
        # Every vote was taken and none decided only if one of them was missing.
        return missing or unusable(FailureKind.JUDGE_UNPARSEABLE, "no majority")

    async def _vote(self, tally: _Tally) -> Verdict:
        """Return one usable verdict, or why there is none after the repetitions that REPEATS allows."""
        repeats = attempt = 0
        while True:
            reply = await self._call(tally)
            if reply is None:
                return unusable(FailureKind.JUDGE_UNREACHABLE, f"out of time after {tally.calls} call(s){tally.last()}")
            verdict = _verdict_of(reply)
            if verdict.kind is None:
                return verdict
            tally.unusable.append(verdict.kind)
            tally.problem = verdict.reason
            if reply.retry:
                wait_s = _backoff_s(attempt, reply.retry_after_s)
                attempt += 1
                if self._clock() + wait_s >= tally.deadline:
                    asked = "" if reply.retry_after_s is None else f", asked to wait {reply.retry_after_s:g} s"
                    return unusable(verdict.kind, f"out of time after {tally.calls} call(s){asked}{tally.last()}")
                await self._sleep(wait_s)
                continue
            repeats += 1
            if repeats > REPEATS.get(verdict.kind, 0):
                return verdict

    async def _call(self, tally: _Tally) -> Reply | None:
        """Return one request's reply, or None when the deadline passes before it can be made.

        The slot is taken for the request alone, so that nobody waits while a retry does.
        """
        try:
            async with asyncio.timeout(tally.deadline - self._clock()):
                await self._slots.acquire()
        except TimeoutError:
            return None
        try:
            while (left_s := tally.deadline - self._clock()) > 0:
                temperature = 0.0 if self._settings.judge_votes == 1 else VOTE_TEMPERATURE
                reply = await self._client.ask(tally.messages, temperature, min(self._settings.judge_timeout_s, left_s))
                tally.note(reply)
                if not reply.other_format:
                    return reply
            return None
        finally:
            self._slots.release()


def _verdict_of(reply: Reply) -> Verdict:
    return read_verdict(reply.choice) if reply.kind is None else unusable(reply.kind, reply.problem)


def _backoff_s(attempt: int, asked_s: float | None) -> float:
    """Return the wait before the next attempt: growing, with jitter, and no shorter than the endpoint asks for."""
    backoff_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
    return backoff_s if asked_s is None else max(backoff_s, asked_s + random.uniform(0.0, 0.5))


_JUDGES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[RecipeSettings, Judge]] = weakref.WeakKeyDictionary()


if __name__ == "__main__":
    from judge_program import main  # imports this module by its own name

    sys.exit(main())
