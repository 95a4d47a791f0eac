"""What a fresh context tells of the turns before it."""

import pytest

from context_policy import action_line, summary_memory, window_memories
from environment_session import ActionName, BrowserAction
from observations import Element

ELEMENTS = [Element(0, "input", ""), Element(3, "a", "Next page")]


@pytest.mark.parametrize(
    ("action", "line"),
    [
        (BrowserAction(ActionName.OBSERVE), "observe"),
        (BrowserAction(ActionName.NAVIGATE, url="http://a/b"), "navigate http://a/b"),
        (BrowserAction(ActionName.CLICK, element_id=3), "click [3] a: Next page"),
        (BrowserAction(ActionName.TYPE, element_id=0, text="tea"), 'type "tea" into [0] input:'),
        (BrowserAction(ActionName.CLICK, element_id=7), "click [7]"),
    ],
)
def test_ledger_names_an_element_as_the_page_did(action, line):
    assert action_line(action, ELEMENTS) == line


ACTIONS = [f"act {n}" for n in range(1, 6)]
PAGES = ["start", *(f"page {n}" for n in range(1, 6))]
WHOLE = "Your actions so far:\n1. act 1\n2. act 2\n3. act 3\n4. act 4\n5. act 5"


@pytest.mark.parametrize(
    ("window", "fullest"),
    [
        (1, WHOLE),
        (2, f"{WHOLE}\n\nThe page after action 4:\npage 4"),
        (3, f"{WHOLE}\n\nThe page after action 3:\npage 3\n\nThe page after action 4:\npage 4"),
    ],
)
def test_fullest_memory_has_the_whole_ledger_and_the_observations_before_the_page_at_hand(window, fullest):
    memories = list(window_memories(ACTIONS, PAGES, window))
    assert memories[0] == fullest
    assert memories[window - 1 :] == [
        WHOLE,
        "Your actions so far:\n(the first 3 are not shown)\n4. act 4\n5. act 5",
        "Your actions so far:\n(the first 4 are not shown)\n5. act 5",
        "Your actions so far:\n(the first 5 are not shown)",
    ]
    assert not any("page 5" in memory for memory in memories)


def test_window_larger_than_the_episode_holds_all_of_it():
    memories = list(window_memories(ACTIONS[:1], PAGES[:2], 9))
    assert memories[0] == "Your actions so far:\n1. act 1\n\nThe start page:\nstart"
    assert len(memories) == 3


def test_each_memory_is_shorter_than_the_one_before_until_only_a_count_is_left():
    memories = list(window_memories(ACTIONS * 9, PAGES * 9, 4))
    lines = [memory.count("\n") for memory in memories]
    assert lines == sorted(lines, reverse=True) and len(set(lines)) == len(lines)


def test_empty_summary_says_that_there_is_none():
    assert summary_memory(" done: tea\n").endswith(":\ndone: tea")
    assert summary_memory(" \n").endswith(":\n(none)")
