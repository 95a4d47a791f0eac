"""Made-up episode logs: seeded, plausible, with failures injected; for whoever reads logs and needs one at hand.

    python -m tests.episode_samples FOLDER [--episodes 600] [--seed 0]

Several steps with rewards that rise, a validation at every fifth step, three sites, several tasks, groups of four
rollouts, rollouts with several attempts, every context policy's call forest, unusable calls, judged tasks, and a half
written line at the end of one of the two files. Everything in a line goes together: counts, sums, rows and calls.
"""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from episode_record import (
    AttemptOutcome,
    AttemptRecord,
    CallKind,
    ModelCallRecord,
    ObservationRecord,
    RowRecord,
    TurnRecord,
)
from rollout_failures import FailureKind, failure_of

SITES = {
    "shop.example": ("red kettle", "blue lamp", "oak desk", "wool scarf"),
    "library.example": ("opening hours", "loan period", "branch address"),
    "127.0.0.1": ("practice 3", "practice 17"),
}
GROUP = 4
FAILURES = (
    (FailureKind.SESSION_LOST, "click: no active session; seed_session must be called first"),
    (FailureKind.BROWSER_DIED, "click failed: ElementHandle.click: Target page, context or browser has been closed"),
    (FailureKind.SEED_TIMEOUT, "seed: TimeoutError: "),
    (FailureKind.SERVER_ERROR, "navigate: HTTP 500 Internal Server Error"),
    (FailureKind.PAGE_BLOCKED, "'verify you are human' at https://shop.example/ (pattern ...)"),
    (FailureKind.JUDGE_UNPARSEABLE, "the reply is empty"),
    (FailureKind.ENGINE_ERROR, "RayActorError: The actor died"),
)
BEFORE_ANY_TURN = (FailureKind.SEED_TIMEOUT, FailureKind.PAGE_BLOCKED)


def sample_episodes(episodes: int = 600, seed: int = 0) -> Iterator[AttemptRecord]:
    """Yield at least this many attempts, in the order of their ends; the last rollout is complete."""
    made, clock, step = 0, 1_760_000_000.0, 0
    while made < episodes:
        step += 1
        for split in ("train", "validation") if step % 5 == 0 else ("train",):
            for prompt in range(4):
                rng = random.Random(f"{seed} {step} {split} {prompt}")
                site, subject = _task(rng)
                base = AttemptRecord(
                    global_step=step,
                    uid=f"{rng.getrandbits(64):016x}",
                    task_id=f"{site}--{subject}".replace(" ", "-"),
                    split=split,
                    data_source=f"nemo_gym_browser/{site}",
                    site=site,
                    question=f"Find the {subject} on {site} and tell its price or value.",
                    scored_by="judge" if site == "library.example" else "environment",
                )
                for rollout in range(GROUP if split == "train" else 1):
                    for record in _rollout(rng, replace(base, rollout=rollout), step):
                        clock += rng.uniform(0.2, 4.0)
                        used_s = record.generation_s + record.environment_s + record.waiting_s + record.judge_s
                        record.started_at, record.ended_at = clock - used_s, clock
                        made += 1
                        yield record


def write_samples(folder: Path, episodes: int = 600, seed: int = 0, half_line: bool = True) -> int:
    """Write a log of two processes into a folder, one of them killed in the middle of a line; return its attempts."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    paths = [folder / "episodes-node1-101.jsonl", folder / "episodes-node2-102.jsonl"]
    with paths[0].open("w", encoding="utf-8") as first, paths[1].open("w", encoding="utf-8") as second:
        for record in sample_episodes(episodes, seed):
            (first, second)[count % 2].write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
            count += 1
        if half_line:
            second.write('{"schema": 2, "started_at": 17600')
    return count


def _task(rng: random.Random) -> tuple[str, str]:
    site = rng.choice(list(SITES))
    return site, rng.choice(SITES[site])


def _rollout(rng: random.Random, base: AttemptRecord, step: int) -> Iterator[AttemptRecord]:
    """Yield the attempts at one rollout: failures, up to three, until one is measured."""
    for attempt in (1, 2, 3):
        spoiled = rng.random() < (0.35 if step == 7 else 0.12)
        episode = _Sample(rng, replace(base, attempt=attempt), step)
        if not spoiled:
            yield episode.measured()
            return
        record = episode.spoiled(*rng.choice(FAILURES), last=attempt == 3)
        yield record
        if record.final:
            return


@dataclass
class _Sample:
    """One attempt while it is made up."""

    rng: random.Random
    record: AttemptRecord
    step: int
    turns: list[TurnRecord] = field(default_factory=list)
    calls: list[ModelCallRecord] = field(default_factory=list)
    chains: list[list[str]] = field(default_factory=lambda: [[]])
    """Kept calls of each context."""
    context: int = 0
    """Tokens of the context so far."""
    unrecorded: int = 0
    """Tokens of the context that no call holds yet."""

    def measured(self) -> AttemptRecord:
        """Return a valid attempt; the later the step, the better."""
        skill = min(0.9, 0.15 + 0.02 * self.step + (0.2 if self.record.site == "shop.example" else 0.0))
        solved = self.rng.random() < skill
        policy = self.rng.choice(("append", "append", "window", "summary"))
        finished = solved or self.rng.random() < 0.7
        self._play(self.rng.randint(2, 6) if solved else self.rng.randint(3, 12), policy, finished)
        reward = 1.0 if solved else 0.0
        record = self._filled()
        record.reward, record.outcome = reward, AttemptOutcome.of(reward)
        record.stop_reason = "finished" if finished else self.rng.choice(("max_turns", "unusable_calls", "deadline"))
        record.answer = self.turns[-1].arguments.get("answer") if finished else None
        record.last_call = "finish" if record.scored_by == "judge" else "verify"
        if record.scored_by == "judge" and finished:
            record.judge_calls, record.judge_s = 1, round(self.rng.uniform(0.5, 6.0), 3)
            record.judge_reason = "The page shows the value." if reward else "The answer is not on the page."
        self._add_rows()
        return record

    def spoiled(self, kind: FailureKind, evidence: str, last: bool) -> AttemptRecord:
        """Return an attempt that the given failure made invalid."""
        if kind in BEFORE_ANY_TURN:
            turns = 0
        else:
            turns = self.rng.randint(1, 6)
            self._play(turns, "append", finish=kind is FailureKind.JUDGE_UNPARSEABLE)
        failure = failure_of(kind, evidence)
        record = self._filled()
        record.outcome = AttemptOutcome.INVALID
        record.failure_kind, record.failure_fault = str(failure.kind), str(failure.fault)
        record.failure_evidence = failure.evidence
        record.last_call = (self.turns[-1].action or "observe") if self.turns else "seed"
        if kind is FailureKind.JUDGE_UNPARSEABLE:
            record.scored_by, record.judge_calls, record.judge_s = "judge", 3, round(self.rng.uniform(3.0, 20.0), 3)
            record.judge_reason = evidence
        record.final = last or not failure.retryable
        return record

    def _play(self, turns: int, policy: str, finish: bool) -> None:
        self.record.start_page = self._page(0)
        self._open()
        for number in range(1, turns + 1):
            compacted = policy != "append" and number > 1 and self.context > 2600
            if compacted:
                if policy == "summary":
                    spent_s = self.turns[-1].generation_s + self._call(number - 1, CallKind.SUMMARY, 120)
                    self.turns[-1] = replace(
                        self.turns[-1],
                        generation_s=round(spent_s, 3),
                        summary="I looked at two pages; the price is left to find.",
                    )
                self._open()
                self.chains.append([])
            self.turns.append(self._turn(number, number == turns and finish, compacted))

    def _open(self) -> None:
        self.context = self.unrecorded = self.rng.randint(900, 1300)

    def _call(self, turn: int, kind: CallKind, tokens: int) -> float:
        """Record a model call and return its seconds."""
        chain = self.chains[-1]
        parent = chain[-1] if chain else None
        call = ModelCallRecord(f"{len(self.calls)}", parent, turn, kind, self.unrecorded, tokens)
        self.calls.append(call)
        if kind is not CallKind.DISCARDED:
            chain.append(call.id)
            self.context, self.unrecorded = self.context + tokens, 0
        return tokens * self.rng.uniform(0.01, 0.03)

    def _turn(self, number: int, finish: bool, compacted: bool) -> TurnRecord:
        rng, discarded, spent_s = self.rng, [], 0.0
        while rng.random() < 0.06 and len(discarded) < 2:
            discarded.append(rng.choice(("broken_json", "no_call")))
            spent_s += self._call(number, CallKind.DISCARDED, rng.randint(20, 200))
        prompt = self.context
        generated = rng.randint(25, 140)
        spent_s += self._call(number, CallKind.TURN, generated)
        mistake = "" if finish or rng.random() > 0.08 else rng.choice(("no_call", "broken_json", "bad_element"))
        action, arguments, element = ("", {}, "") if mistake else self._action(finish)
        failed = not mistake and not finish and rng.random() < 0.07
        observation = None if mistake or finish or failed else self._page(number)
        shown = 60 if observation is None else rng.randint(300, 900)
        self.context, self.unrecorded = self.context + shown, shown
        call = {"name": "browser", "arguments": {"action": action, **arguments}}
        reply = "I look for it." if mistake == "no_call" else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return TurnRecord(
            turn=number,
            action=action,
            arguments=arguments,
            element=element,
            mistake=mistake,
            discarded=discarded,
            failure_kind=str(FailureKind.ELEMENT_NOT_USABLE) if failed else "",
            error=f"{action} failed: Timeout 5000ms exceeded." if failed else "",
            observation=observation,
            reply=f"<think>Step {number}.</think>\n{reply}",
            reply_chars=len(f"<think>Step {number}.</think>\n{reply}"),
            call=self.chains[-1][-1],
            prompt_tokens=prompt,
            generated_tokens=generated,
            generation_s=round(spent_s, 3),
            environment_s=0.0 if mistake else round(rng.uniform(0.05, 1.8), 3),
            compaction_before=compacted,
        )

    def _action(self, finish: bool) -> tuple[str, dict, str]:
        if finish:
            return "finish", {"answer": f"{self.rng.randint(5, 80)}.99"}, ""
        action = self.rng.choice(("click", "click", "click", "type", "navigate", "observe"))
        element = self.rng.randint(0, 9)
        match action:
            case "click":
                label = self.rng.choice(("Next page", "Details", "Search", "Über uns"))
                return action, {"element_id": element}, f"a: {label}"
            case "type":
                return action, {"element_id": element, "text": self.record.task_id.partition("--")[2]}, "input:"
            case "navigate":
                return action, {"url": f"https://{self.record.site}/p/{element}"}, ""
        return action, {}, ""

    def _page(self, number: int) -> ObservationRecord:
        url = f"https://{self.record.site}/" + (f"p/{self.rng.randint(1, 5)}" if number else "")
        links = "".join(f"\n  [{i}] a: {label}" for i, label in enumerate(("Home", "Next page", "Details")))
        title = self.record.site
        text = f"URL: {url}\nTITLE: {title}\nELEMENTS:{links}\nTEXT:\n  Page {url} of {title} – <b>42 €</b>"
        return ObservationRecord(hashlib.sha256(text.encode()).hexdigest(), len(text), text, url)

    def _filled(self) -> AttemptRecord:
        """Return the record with what follows from turns and calls."""
        record, turns = self.record, self.turns
        record.turn_records, record.call_records = turns, self.calls
        record.turns = len(turns)
        record.actions = [turn.action or f"!{turn.mistake}" for turn in turns]
        record.discarded_calls = sum(len(turn.discarded) for turn in turns)
        record.unusable_calls = record.discarded_calls + sum(bool(turn.mistake) for turn in turns)
        record.generation_s = round(sum(turn.generation_s for turn in turns), 3)
        record.environment_s = round(sum(turn.environment_s for turn in turns) + self.rng.uniform(0.5, 2.5), 3)
        record.waiting_s = round(max(0.0, self.rng.gauss(0.3, 1.5)), 3)
        record.compactions = sum(turn.compaction_before for turn in turns)
        return record

    def _add_rows(self) -> None:
        """Make a row of each context and say which row trains each call."""
        record = self.record
        by_id = {call.id: call for call in self.calls}
        rows = []
        for chain in self.chains:
            calls = [by_id[id_] for id_ in chain]
            prompt, generated = calls[0].prompt_tokens, sum(call.generated_tokens for call in calls)
            total = sum(call.prompt_tokens for call in calls) + generated
            rows.append(RowRecord(chain, chain, prompt, total - prompt, generated))
        owner = {id_: number for number, row in enumerate(rows) for id_ in row.trains}
        record.call_records = [replace(call, row=owner.get(call.id)) for call in self.calls]
        record.row_records, record.rows = rows, len(rows)
        record.prompt_tokens = sum(row.prompt_tokens for row in rows)
        record.response_tokens = sum(row.response_tokens for row in rows)


def main() -> int:
    """Write a sample log and return 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.episode_samples", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count = write_samples(options.folder, options.episodes, options.seed)
    sys.stdout.write(f"{count} attempts in {options.folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
