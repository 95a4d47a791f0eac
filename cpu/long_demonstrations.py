"""Scripted long episodes under every context policy, and the policy's tokenizer for them.

A training example is one context, as a row of a real episode is: from the start of the episode or from a compaction to
the next one. Budgets vary, so that the policy copes with one turn in a context as with several.
"""

import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from browser_prompts import SUMMARY_REQUEST
from context_policy import ContextPolicy
from cpu.demonstrations import Habits, sloppy_arguments
from cpu.long_context import ContextLimits, LongEpisode, Rendering
from cpu.long_tasks import BETWEEN_ITEMS, OrderTask, cart_at, random_order
from cpu.policy_tokenizer import MAX_NUMBERED_ELEMENTS, build_tokenizer
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import Split

LONG_HABITS = Habits(wrong_element=0.04, early_finish=0.02)
"""Mistakes of the warm start, far rarer than those at short tasks: nine decisions have to be right, not three."""

_POLICIES = (ContextPolicy.APPEND, ContextPolicy.WINDOW, ContextPolicy.SUMMARY)
_SHARES = (0.2, 0.5, 0.3)
_BUDGETS = (150, 330)
_WINDOWS = (1, 1, 2)

WORDS = ("bought", "left", "nothing")
"""Words that only long episodes have."""

_MEMORY_PIECES = (
    "\n\nYour actions so far:",
    "\n(the first ",
    " are not shown)",
    "\n\nThe page after action ",
    "\n\nThe start page:\n",
    "\n\nThe page now:\n",
    "\n\nYour notes on what you did before:\n",
    SUMMARY_REQUEST,
    BETWEEN_ITEMS,
)


def build_long_tokenizer(schema: dict) -> PreTrainedTokenizerFast:
    """Return the small policy's tokenizer in which the fixed words of a compacted context are single tokens too."""
    kinds = ("a", "button", "input")
    clicks = [f". click [{number}] {kind}: " for number in range(MAX_NUMBERED_ELEMENTS) for kind in kinds]
    return build_tokenizer(schema, words=WORDS, pieces=(*_MEMORY_PIECES, *clicks))


def expert_arguments(episode: SimulatedEpisode) -> dict:
    """Return the arguments of the expert's next tool call; all it needs stands in the task and on the page."""
    task: OrderTask = episode.task
    left = task.left(cart_at(episode.page.url))
    if not left:
        return {"action": "finish"}
    labels = [element.label for element in episode.page.elements]
    if "add" in labels:
        return {"action": "click", "element": "add" if episode.page.title == left[0] else "back"}
    return {"action": "click", "element": left[0] if left[0] in labels else "shop"}


def summary_text(episode: SimulatedEpisode) -> str:
    """Return what the expert notes down when it is asked for a summary."""
    cart = cart_at(episode.page.url)
    left = episode.task.left(cart)
    return f"bought {_listed(cart)}, left {_listed(left or ())}"


def _listed(items: tuple[str, ...]) -> str:
    return BETWEEN_ITEMS.join(items) or "nothing"


def call_text(arguments: dict) -> str:
    """Return a tool call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': 'browser', 'arguments': arguments})}\n</tool_call>"


def play_long(episode: LongEpisode, habits: Habits, rng: random.Random) -> None:
    """Let the scripted expert with these habits play the episode to its end."""
    simulated = episode.episode
    while episode.stop_reason is None:
        if episode.summarising:
            episode.take(summary_text(simulated))
        else:
            episode.take(call_text(sloppy_arguments(simulated, habits, rng, expert_arguments)))


class LongDemonstrations:
    """Endless training examples: each call returns the messages of the next context of scripted episodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, schema: dict) -> None:
        self._rendering = Rendering(tokenizer, schema)
        self._waiting: deque[list[dict]] = deque()

    def __call__(self, habits: Habits, rng: random.Random) -> list[dict]:
        """Return one context; a new episode, with these habits, is played whenever the last one is used up."""
        while not self._waiting:
            self._waiting.extend(self._contexts(habits, rng))
        return self._waiting.popleft()

    def _contexts(self, habits: Habits, rng: random.Random) -> Iterator[list[dict]]:
        (policy,) = rng.choices(_POLICIES, _SHARES)
        limits = replace(ContextLimits(), policy=policy, budget=rng.randint(*_BUDGETS), window=rng.choice(_WINDOWS))
        # The port of the real site is known only when it is served, so the policy must not get used to one.
        base_url = f"http://127.0.0.1:{rng.randint(1024, 65535)}"
        simulated = SimulatedEpisode(random_order(Split.DEMONSTRATION, rng), base_url)
        episode = LongEpisode(simulated, limits, self._rendering)
        play_long(episode, habits, rng)
        return iter(episode.contexts)
