"""Scripted episodes on the practice site: a flawless expert, and the same expert with bad habits.

The habits are what reinforcement learning has to remove: each is a mistake that is made with a set probability at
one decision, independent of the others, while the right action stays the likelier one.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from browser_prompts import SYSTEM_PROMPT
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import CODES, ITEMS, NAMES, Split, observation_text
from cpu.practice_tasks import Task, TaskKind, random_task
from observations import read_elements
from tool_calls import RawCall, UnusableCall, to_action


@dataclass(frozen=True)
class Habits:
    """How often each mistake is made at a decision where it is possible."""

    wrong_element: float = 0.0
    wrong_word: float = 0.0
    """A wrong word is typed, or told as the answer."""
    early_finish: float = 0.0
    """The episode is ended although something is left to do."""


FLAWLESS = Habits()


def call_message(arguments: dict) -> dict:
    """Return the assistant message with one tool call."""
    call = {"type": "function", "function": {"name": "browser", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def opening_messages(episode: SimulatedEpisode) -> list[dict]:
    """Return the messages that a policy starts an episode with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": episode.first_message}]


def expert_arguments(episode: SimulatedEpisode) -> dict:
    """Return the arguments of the expert's next tool call; it reads the page and the task, and needs no memory but
    what it has typed."""
    task, page = episode.task, episode.page
    labels = [element.label for element in page.elements]
    if task.kind in (TaskKind.FORM, TaskKind.SEARCH) and "" in labels:
        if not episode.typed:
            return {"action": "type", "element": "input", "text": task.target}
        return {"action": "click", "element": "join" if task.kind is TaskKind.FORM else "search"}
    if task.target in labels:
        return {"action": "click", "element": task.target}
    if task.kind is TaskKind.SHOP and "add" in labels:
        return {"action": "click", "element": "add" if page.title == task.target else "back"}
    if task.kind is TaskKind.PAGING and page.title != task.target:
        return {
            "action": "click",
            "element": "next" if "next" in labels else "back" if "back" in labels else "previous",
        }
    if "answer_equals" in task.verifier_metadata:
        if task.kind is TaskKind.LIST and page.title != task.target:
            return {"action": "click", "element": "back"}
        return {"action": "finish", "answer": task.verifier_metadata["answer_equals"]}
    return {"action": "finish"}


def sloppy_arguments(
    episode: SimulatedEpisode,
    habits: Habits,
    rng: random.Random,
    expert: Callable[[SimulatedEpisode], dict] = expert_arguments,
) -> dict:
    """Return the arguments of the next tool call of an expert with bad habits."""
    right = expert(episode)
    if right["action"] != "finish" and rng.random() < habits.early_finish:
        return {"action": "finish"}
    others = [e.label for e in episode.page.elements if e.label and e.label != right.get("element")]
    if right["action"] == "click" and others and rng.random() < habits.wrong_element:
        return {**right, "element": rng.choice(others)}
    if "text" in right and rng.random() < habits.wrong_word:
        return {**right, "text": _another(NAMES if episode.task.kind is TaskKind.FORM else ITEMS, right["text"], rng)}
    if "answer" in right and rng.random() < habits.wrong_word:
        return {**right, "answer": _another(CODES, right["answer"], rng)}
    return right


def _another(words: list[str], word: str, rng: random.Random) -> str:
    return rng.choice([other for other in words if other != word])


def play(episode: SimulatedEpisode, habits: Habits, rng: random.Random, max_turns: int = 5) -> list[dict]:
    """Return the messages of an episode that is played to its end by the scripted expert with these habits."""
    messages = opening_messages(episode)
    for _ in range(max_turns):
        arguments = sloppy_arguments(episode, habits, rng)
        messages.append(call_message(arguments))
        action = to_action(RawCall("browser", arguments), read_elements(observation_text(episode.page)))
        if isinstance(action, UnusableCall):
            raise ValueError(f"{episode.task.task_id}: the script made an unusable call: {action.message}")
        response = episode.act(action)
        if episode.finished:
            break
        messages.append({"role": "tool", "content": response})
    return messages


def demonstration(habits: Habits, rng: random.Random) -> list[dict]:
    """Return the messages of an episode on a site of the demonstration split."""
    # The port of the real site is known only when it is served, so the policy must not get used to one.
    episode = SimulatedEpisode(random_task(Split.DEMONSTRATION, rng), f"http://127.0.0.1:{rng.randint(1024, 65535)}")
    return play(episode, habits, rng)


def expert_episode(task: Task, base_url: str) -> SimulatedEpisode:
    """Return the episode after the flawless expert has played it."""
    episode = SimulatedEpisode(task, base_url)
    play(episode, FLAWLESS, random.Random(0))
    return episode
