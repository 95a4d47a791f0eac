"""What the policy still reads of a long episode: everything (`append`), a window of it, or its own summary.

`append` drops nothing; the episode ends when the context is full. `window` starts a fresh context with the task, a
ledger of the actions so far and the last observations. `summary` has the policy write down what it must remember and
starts a fresh context with that; the reply that is the summary is a model call like any other, and trains.

Nothing here knows of tokens or sessions: the agent loop says when a context is full, and takes the longest text that
fits.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from environment_session import ActionName, BrowserAction
from observations import Element


class ContextPolicy(StrEnum):
    """What happens when the next prompt would pass the budget."""

    APPEND = "append"
    WINDOW = "window"
    SUMMARY = "summary"


def action_line(action: BrowserAction, elements: Sequence[Element]) -> str:
    """Return the action as a line of the ledger, its element worded as in the observation that it refers to."""
    named = next((e for e in elements if e.id == action.element_id), None)
    element = f"[{action.element_id}] {named.kind}: {named.label}".rstrip() if named else f"[{action.element_id}]"
    match action.name:
        case ActionName.NAVIGATE:
            return f"navigate {action.url}"
        case ActionName.CLICK:
            return f"click {element}"
        case ActionName.TYPE:
            return f'type "{action.text}" into {element}'
        case _:
            return str(action.name)


def window_memories(actions: Sequence[str], observations: Sequence[str], window: int) -> Iterator[str]:
    """Yield what a fresh context tells of earlier turns, from the fullest text to the shortest, which is never empty.

    `observations` are the start page and the page after each action; the last of them is the page at hand and no part
    of the text, so the fullest text holds `window` - 1 older ones and all actions. Older observations go first, then
    the older half of the actions that are left.
    """
    older = list(enumerate(observations))[:-1]
    for shown in range(min(window - 1, len(older)), -1, -1):
        yield _memory(actions, len(actions), older[len(older) - shown :])
    shown = len(actions)
    while shown > 0:
        shown //= 2
        yield _memory(actions, shown, [])


def summary_memory(summary: str) -> str:
    """Return what a fresh context tells of earlier turns when the policy has summarised them."""
    return f"Your notes on what you did before:\n{summary.strip() or '(none)'}"


def _memory(actions: Sequence[str], shown: int, observations: Sequence[tuple[int, str]]) -> str:
    """Return the last `shown` actions and these (number of the action before, observation) as one text."""
    skipped = len(actions) - shown
    parts = ["Your actions so far:"]
    parts += [f"(the first {skipped} are not shown)"] if skipped else []
    parts += [f"{number}. {action}" for number, action in enumerate(actions[skipped:], skipped + 1)]
    for number, observation in observations:
        parts += ["", f"The page after action {number}:" if number else "The start page:", observation]
    return "\n".join(parts)
