"""A rollout's model calls as a forest, a policy that picks which of them count, and the training rows that follow.

Each call continues at most one earlier call (its parent) or starts fresh, as after a compaction. A row is one chain of
counted calls, root first, put together from recorded token ids: text rendered again may differ from what the model saw.

POLICIES holds the selection policies; `module:function` names one of the user's own. `all_captured` trains every
session's calls with the rollout's reward, side calls of a harness (titles, probes) among them: record none of those.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import islice
from types import MappingProxyType

_MOST_NAMED = 10  # an error about 100,000 calls must stay readable
_MOST_CHARS = 200  # a whole call in a list of ids would bring all its tokens


class CallForestError(ValueError):
    """Calls that cannot be made into rows. The message names the ids and what to do."""


class CallStatus(StrEnum):
    """How a call ended."""

    OK = "ok"
    FAILED = "failed"
    """No usable answer came back."""
    TRUNCATED = "truncated"
    """Stopped by length: counts like `ok`, and is flagged."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One model call as it was recorded. Raises CallForestError on fields that contradict each other."""

    call_id: str
    parent_id: str | None = None
    """The call that this one continues; None for a root."""
    session_id: str = "main"
    """Which agent or sub-agent made the call."""
    _: KW_ONLY
    prompt_ids: Sequence[int]
    """Prompt tokens that the parent did not already hold; kept as a tuple."""
    response_ids: Sequence[int]
    """Generated tokens; kept as a tuple."""
    response_logprobs: Sequence[float] | None = None
    """One for each generated token; None when the engine gave none. Kept as a tuple."""
    status: CallStatus = CallStatus.OK
    finish_reason: str | None = None
    """The engine's word for why it stopped."""
    min_global_steps: int | None = None
    """Oldest weight version that generated tokens of this call; None when the engine gave none."""
    max_global_steps: int | None = None
    """Newest weight version; given together with the oldest."""

    def __post_init__(self) -> None:
        if not isinstance(self.call_id, str) or not self.call_id:
            raise CallForestError(f"call_id {self.call_id!r} is no id; pass a text that is not empty")
        for name in ("prompt_ids", "response_ids", "response_logprobs"):
            value = getattr(self, name)
            if value is not None and type(value) is not tuple:
                object.__setattr__(self, name, tuple(value))
        logprobs, steps = self.response_logprobs, (self.min_global_steps, self.max_global_steps)
        if logprobs is not None and len(logprobs) != len(self.response_ids):
            counts = f"{len(logprobs)} response_logprobs for {len(self.response_ids)} response_ids"
            raise CallForestError(f"call {self.call_id!r}: {counts}; pass one for each, or None")
        if self.status not in CallStatus.__members__.values():
            raise CallForestError(f"call {self.call_id!r}: status {self.status!r} is none of {', '.join(CallStatus)}")
        object.__setattr__(self, "status", CallStatus(self.status))
        if steps.count(None) == 1 or (None not in steps and steps[0] > steps[1]):
            given = f"min_global_steps {steps[0]!r} and max_global_steps {steps[1]!r}"
            raise CallForestError(f"call {self.call_id!r}: {given}; pass both, the older first, or neither")

    @property
    def truncated(self) -> bool:
        """Whether the call was stopped by length."""
        return self.status is CallStatus.TRUNCATED


@dataclass(frozen=True)
class CallForest:
    """A rollout's checked calls: what a selection policy gets. Raises CallForestError on a forest that is none."""

    records: tuple[CallRecord, ...]
    """In the order in which the calls were recorded; a parent comes before what continues it."""
    kept: tuple[str, ...] | None = None
    """Ids of the calls whose answers stand in the history that the agent returned, in its order; None if unknown."""
    scored: str | None = None
    """Id of the call whose answer was scored: by default the last kept call; None if unknown."""
    positions: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Place in `records` by call id."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", tuple(self.records))
        object.__setattr__(self, "positions", MappingProxyType(_positions(self.records)))
        if self.kept is not None:
            object.__setattr__(self, "kept", _recorded_ids(self.kept, self.positions, "kept"))
        if self.scored is None:
            object.__setattr__(self, "scored", self.kept[-1] if self.kept else None)
        else:
            _recorded_ids([self.scored], self.positions, "scored")

    def record(self, call_id: str) -> CallRecord:
        """Return the call of this id; KeyError if there is none."""
        return self.records[self.positions[call_id]]

    def path(self, call_id: str) -> tuple[CallRecord, ...]:
        """Return the calls from the root to this one."""
        records, positions, calls = self.records, self.positions, []
        while call_id is not None:
            calls.append(call := records[positions[call_id]])
            call_id = call.parent_id
        return tuple(reversed(calls))


SelectionPolicy = Callable[[CallForest], Iterable[str]]  # returns the ids of the calls that count, in any order


@dataclass(frozen=True)
class Row:
    """One training row: a chain of calls, root first. Its lists are made when first read, and kept."""

    calls: tuple[CallRecord, ...]
    trains: tuple[bool, ...]
    """One per call: False where an earlier row of the same rollout trains it."""
    has_logprobs: bool
    """Whether the rollout's calls have log-probs."""

    @cached_property
    def call_ids(self) -> tuple[str, ...]:
        return tuple(call.call_id for call in self.calls)

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens of the calls, (num_tokens,): each call's prompt_ids, then its response_ids."""
        tokens: list[int] = []
        for call in self.calls:
            tokens += call.prompt_ids
            tokens += call.response_ids
        return tokens

    @cached_property
    def loss_mask(self) -> list[int]:
        """1 on generated tokens of calls that train in this row, else 0, (num_tokens,)."""
        mask: list[int] = []
        for call, trains in zip(self.calls, self.trains, strict=True):
            mask += [0] * len(call.prompt_ids)
            mask += [int(trains)] * len(call.response_ids)
        return mask

    @cached_property
    def logprobs(self) -> list[float] | None:
        """Recorded log-probs of generated tokens and 0.0 elsewhere, (num_tokens,); None if the rollout has none."""
        if not self.has_logprobs:
            return None
        logprobs: list[float] = []
        for call in self.calls:
            logprobs += [0.0] * len(call.prompt_ids)
            logprobs += call.response_logprobs or ()
        return logprobs

    @property
    def prompt_ids(self) -> list[int]:
        """The root's prompt, (prompt_length,): what verl takes as the prompt."""
        return self.token_ids[: self.prompt_length]

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the root's prompt, (response_length,): what verl takes as the response."""
        return self.token_ids[self.prompt_length :]

    @property
    def response_mask(self) -> list[int]:
        """`loss_mask` over the response, (response_length,)."""
        return self.loss_mask[self.prompt_length :]

    @property
    def response_logprobs(self) -> list[float] | None:
        """`logprobs` over the response, (response_length,); None if the rollout has none."""
        return None if self.logprobs is None else self.logprobs[self.prompt_length :]

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the root's prompt."""
        return len(self.calls[0].prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole row."""
        return sum(len(call.prompt_ids) + len(call.response_ids) for call in self.calls)

    @property
    def num_trained_tokens(self) -> int:
        """Number of ones in `loss_mask`."""
        return sum(len(call.response_ids) for call in self._trained)

    @property
    def truncated_ids(self) -> tuple[str, ...]:
        """Ids of the row's calls that were stopped by length."""
        return tuple(call.call_id for call in self.calls if call.truncated)

    @property
    def global_steps(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of the trained tokens, for verl's min_global_steps and max_global_steps."""
        calls = [call for call in self._trained if call.min_global_steps is not None]
        return (min(c.min_global_steps for c in calls), max(c.max_global_steps for c in calls)) if calls else None

    @property
    def _trained(self) -> list[CallRecord]:
        return [call for call, trains in zip(self.calls, self.trains, strict=True) if trains]


def plan_rows(
    records: Iterable[CallRecord],
    *,
    policy: str = "returned_history",
    kept: Iterable[str] | None = None,
    scored: str | None = None,
) -> list[Row]:
    """Return one row per counted call that no counted call continues, by (place of its root, its own place).

    A counted call trains in the first row that holds it and is context in the others. Time and memory are linear in
    the records and the rows' calls. Raises CallForestError on what can't be planned.
    """
    select = find_policy(policy)
    forest = CallForest(records, kept, scored)
    calls = _selected(forest, select, policy)
    has_logprobs = _have_logprobs(calls)
    root_place: dict[str, int] = {}
    for place, call in enumerate(calls):
        root_place[call.call_id] = place if call.parent_id is None else root_place[call.parent_id]
    continued = {call.parent_id for call in calls}
    # `calls` are in recorded order and the sort is stable: ends of one root stay in the order of their own places.
    ends = sorted((id_ for id_ in root_place if id_ not in continued), key=root_place.__getitem__)
    rows, owned = [], set()
    for end in ends:
        path = forest.path(end)
        rows.append(Row(path, tuple(call.call_id not in owned for call in path), has_logprobs))
        owned.update(call.call_id for call in path)
    return rows


def rows_for_verl(rows: Iterable[Row], scored: str) -> list[Row]:
    """Return a rollout's rows with the one last in which the scored call trains; ownership stays as planned.

    Raises CallForestError where the last row has no trained token (verl reads the rollout's advantage off the first,
    and would give every row 0) or a row has an empty response, on which verl fails.
    """
    rows = list(rows)
    last = next((row for row in rows if (scored, True) in zip(row.call_ids, row.trains, strict=True)), None)
    if last is None:
        raise CallForestError(f"no row trains the scored call {scored!r}; let the selection policy count it")
    if not last.num_trained_tokens:
        raise CallForestError(f"the last row ({_named(last.call_ids)}) has no trained token; the rollout is invalid")
    if empty := [row.call_ids[-1] for row in rows if row.num_tokens == row.prompt_length]:
        raise CallForestError(f"empty responses in the rows that end in {_named(empty)}; leave these calls out")
    return [*(row for row in rows if row is not last), last]


def find_policy(name: str) -> SelectionPolicy:
    """Return the policy of this name: one of POLICIES, or the user's `module:function`. Raises CallForestError."""
    if policy := POLICIES.get(str(name)):
        return policy
    module_name, _, function_name = str(name).partition(":")
    if not (module_name and function_name):
        raise CallForestError(f"unknown selection policy {name!r}; there are {', '.join(POLICIES)}, module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 - the user's module runs while it is imported and may raise anything
        reason = f"{type(error).__name__}: {error}; is its folder on PYTHONPATH?"
        raise CallForestError(f"selection policy {name!r} can't be imported: {reason}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise CallForestError(f"selection policy {name!r}: {module_name} has no function {function_name!r}")
    return function


def returned_history(forest: CallForest) -> Iterable[str]:
    """Return the kept calls, which must lie in one session, each a root or after its own parent."""
    if forest.kept is None:
        raise CallForestError("it counts the calls of the history that the agent returned; pass kept")
    calls = [forest.record(id_) for id_ in forest.kept]
    last_ids = {call.session_id: call.call_id for call in calls}
    if len(last_ids) > 1:
        held = f"{len(last_ids)} sessions: (session, last call) {_named(last_ids.items())}"
        raise CallForestError(f"the kept calls lie in {held}; keep one session's, or use all_captured")
    places = {id_: place for place, id_ in enumerate(forest.kept)}
    if orphans := [call for place, call in enumerate(calls) if _place_of_parent(call, places) >= place]:
        raise CallForestError(f"kept calls whose parent was not kept before them: {_with_parents(orphans)}")
    return forest.kept


def all_captured(forest: CallForest) -> Iterable[str]:
    """Return every call but failed ones that no counted call continues and that are not the scored call."""
    counted: list[str] = []
    continued: set[str | None] = set()
    # What continues a call comes after it, so one pass from the end also drops chains of failed calls.
    for call in reversed(forest.records):
        if call.status is CallStatus.FAILED and call.call_id not in continued and call.call_id != forest.scored:
            continue
        counted.append(call.call_id)
        continued.add(call.parent_id)
    return counted


def main_chain(forest: CallForest) -> Iterable[str]:
    """Return the calls from the root to the scored call."""
    if forest.scored is None:
        raise CallForestError("it counts the path to the scored call; pass scored, or kept, of which it is the last")
    return [call.call_id for call in forest.path(forest.scored)]


POLICIES: Mapping[str, SelectionPolicy] = MappingProxyType(
    {"returned_history": returned_history, "all_captured": all_captured, "main_chain": main_chain}
)


def _selected(forest: CallForest, select: SelectionPolicy, name: str) -> list[CallRecord]:
    """Return the calls that the policy counts, in recorded order. Raises CallForestError on what is no selection."""
    what = f"selection policy {name!r}"
    try:
        ids = select(forest)
        # One more than there are calls is enough to be refused; a generator may never end.
        ids = ids if isinstance(ids, str) else tuple(islice(ids, len(forest.records) + 1))
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything, and no row may come of it
        reason = str(error) if isinstance(error, CallForestError) else f"{type(error).__name__}: {error}"
        raise CallForestError(f"{what}: {reason}") from error
    counted = set(_recorded_ids(ids, forest.positions, what))
    if not counted:
        raise CallForestError(f"{what}: it selected no call; {_named(forest.positions)} were recorded")
    calls = [call for call in forest.records if call.call_id in counted]
    if gaps := [call for call in calls if call.parent_id is not None and call.parent_id not in counted]:
        raise CallForestError(f"{what}: selected calls whose parent is not selected: {_with_parents(gaps)}")
    return calls


def _recorded_ids(ids: Iterable[object], positions: Mapping[str, int], what: str) -> tuple[str, ...]:
    """Return the ids as a tuple. Raises CallForestError on what is no id, was never recorded, or comes twice."""
    if isinstance(ids, str):
        raise CallForestError(f"{what}: {ids!r} is one text; a list of call ids is needed")
    ids = tuple(ids)
    if strange := [id_ for id_ in ids if not isinstance(id_, str)]:
        raise CallForestError(f"{what}: these are no call ids: {_named(strange)}; call ids are texts")
    if unknown := [id_ for id_ in ids if id_ not in positions]:
        raise CallForestError(f"{what}: these calls were never recorded: {_named(unknown)}")
    if twice := _repeated(ids):
        raise CallForestError(f"{what}: these calls come more than once: {_named(twice)}")
    return ids


def _positions(records: tuple[CallRecord, ...]) -> dict[str, int]:
    """Return each call's place. Raises CallForestError unless each id comes once and each parent before its calls."""
    if not records:
        raise CallForestError("no call was recorded; a rollout without calls has no rows")
    if strange := [call for call in records if not isinstance(call, CallRecord)]:
        raise CallForestError(f"these records are no CallRecord: {_named(strange)}")
    positions = {call.call_id: place for place, call in enumerate(records)}
    if twice := _repeated([call.call_id for call in records]):
        raise CallForestError(f"recorded more than once: {_named(twice)}; each call needs an id of its own")
    if early := [call for place, call in enumerate(records) if _place_of_parent(call, positions) >= place]:
        if never := [call for call in early if call.parent_id not in positions]:
            raise CallForestError(f"calls whose parent was never recorded: {_with_parents(never)}")
        raise CallForestError(f"calls recorded before their parent: {_with_parents(early)}")
    return positions


def _place_of_parent(call: CallRecord, places: Mapping[str, int]) -> int:
    """Return the parent's place; -1 for a root, a place after all others for a parent without one."""
    return -1 if call.parent_id is None else places.get(call.parent_id, len(places))


def _have_logprobs(calls: list[CallRecord]) -> bool:
    """Return whether the calls have log-probs. Raises CallForestError if some of those that generated have none."""
    generated = [call for call in calls if call.response_ids]
    without = [call.call_id for call in generated if call.response_logprobs is None]
    if 0 < len(without) < len(generated):
        # 0.0 in their place would say that the policy was certain of these tokens.
        raise CallForestError(f"without response_logprobs, beside calls with them: {_named(without)}")
    return not without


def _repeated(ids: Sequence[str]) -> list[str]:
    return [] if len(set(ids)) == len(ids) else [id_ for id_, count in Counter(ids).items() if count > 1]


def _with_parents(calls: Iterable[CallRecord]) -> str:
    return f"(call, parent) {_named((call.call_id, call.parent_id) for call in calls)}"


def _named(ids: Iterable[object]) -> str:
    """Return the ids (or what stands where an id should) for a message: the first ten, and how many more."""
    ids = list(ids)
    shown = ", ".join(repr(id_)[:_MOST_CHARS] for id_ in ids[:_MOST_NAMED])
    return shown if len(ids) <= _MOST_NAMED else f"{shown} and {len(ids) - _MOST_NAMED} more"
