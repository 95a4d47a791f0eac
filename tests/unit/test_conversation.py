"""What is recorded of a rollout's calls, and what the engine is given next."""

import pytest

from call_forest import CallForestError, CallStatus
from conversation import Conversation, status_of


def opened(*prompt):
    conversation = Conversation()
    conversation.open([{"role": "user", "content": "x"}], list(prompt))
    return conversation


def recorded(conversation):
    return [(r.call_id, r.parent_id, r.prompt_ids, r.response_ids) for r in conversation.records]


def test_call_holds_only_what_its_parent_does_not():
    conversation = opened(1, 2)
    conversation.add_reply([3, 4], [-0.1, -0.2])
    conversation.extend(conversation.messages, [1, 2, 3, 4, 5, 6])
    conversation.add_reply([7], None)
    assert recorded(conversation) == [("0", None, (1, 2), (3, 4)), ("1", "0", (5, 6), (7,))]
    assert (conversation.token_ids, conversation.prompt_tokens, conversation.response_tokens) == ([*range(1, 8)], 2, 5)
    assert conversation.records[0].response_logprobs == (-0.1, -0.2)
    assert conversation.kept == ["0", "1"]


def test_discarded_reply_is_recorded_and_leaves_the_context_alone():
    conversation = opened(1, 2)
    conversation.add_reply([3], None, kept=False)
    conversation.add_reply([4], None, kept=False, status=CallStatus.TRUNCATED)
    conversation.add_reply([5], None)
    assert recorded(conversation) == [(f"{n}", None, (1, 2), (n + 3,)) for n in range(3)]
    assert (conversation.token_ids, conversation.kept, conversation.discarded) == ([1, 2, 5], ["2"], 2)
    assert [record.truncated for record in conversation.records] == [False, True, False]


def test_fresh_context_is_a_new_root():
    conversation = opened(1, 2)
    conversation.add_reply([3], None)
    conversation.open([], [8, 9])
    conversation.add_reply([10], None)
    assert recorded(conversation)[1] == ("1", None, (8, 9), (10,))
    assert (conversation.roots, conversation.prompt_tokens) == (2, 2)


@pytest.mark.parametrize(
    ("removed", "breaks", "second"), [(0, False, ("1", "0", (4, 5), (6,))), (1, True, ("1", None, (1, 2, 9), (6,)))]
)
def test_context_from_which_the_template_took_generated_tokens_is_a_fresh_root(removed, breaks, second):
    conversation = opened(1, 2)
    conversation.add_reply([3], None)
    assert conversation.would_break(removed) is breaks
    conversation.extend([], [1, 2, 9] if removed else [1, 2, 3, 4, 5], removed)
    conversation.add_reply([6], None)
    assert recorded(conversation)[1] == second


def test_template_may_take_away_what_it_added_itself():
    conversation = opened(1, 2)
    conversation.add_reply([3], None)
    conversation.extend([], [1, 2, 3, 4, 5])
    conversation.extend([], [1, 2, 3, 4, 7], 1)
    conversation.add_reply([6], None)
    assert recorded(conversation)[1] == ("1", "0", (4, 7), (6,))


def test_log_probs_that_do_not_go_with_the_tokens_are_refused():
    with pytest.raises(CallForestError, match="1 response_logprobs for 2 response_ids"):
        opened(1).add_reply([2, 3], [-0.1])


@pytest.mark.parametrize(
    ("tokens", "longest", "status"),
    [([1, 9], 2, "ok"), ([1, 2], 2, "truncated"), ([1, 2], 3, "ok"), ([9], 1, "ok"), ([1], 1, "truncated")],
)
def test_reply_that_fills_its_room_without_an_end_of_turn_is_truncated(tokens, longest, status):
    assert status_of(tokens, longest, {9}) == status
