"""Long tasks and the scripted expert at them; and that the short tasks beside them are what they were."""

import hashlib
import json
import random

import pytest

from context_policy import ContextPolicy, window_memories
from cpu.demonstrations import FLAWLESS, Habits, demonstration
from cpu.long_context import ContextLimits, LongEpisode, Rendering
from cpu.long_demonstrations import LongDemonstrations, build_long_tokenizer, call_text, play_long
from cpu.long_tasks import LongTaskKind, cart_at, make_orders
from cpu.policy_tokenizer import build_tokenizer, tool_schema
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import Split
from cpu.practice_tasks import TaskKind, make_tasks, random_task, write_rows
from cpu.warm_start import WarmStartSettings, encode_episode

BASE_URL = "http://127.0.0.1:8077"
SCHEMA = tool_schema()
ORDERS = {split: make_orders(split, 90) for split in Split}


@pytest.fixture(scope="module")
def long_tokenizer():
    return build_long_tokenizer(SCHEMA)


@pytest.fixture(scope="module")
def rendering(long_tokenizer):
    return Rendering(long_tokenizer, SCHEMA)


def _digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _short_demonstrations():
    rng = random.Random("warm start 0")
    return [demonstration(habits, rng) for habits in (FLAWLESS, WarmStartSettings().habits) for _ in range(20)]


def _random_tasks():
    rng = random.Random(0)
    return [random_task(Split.TRAIN, rng).task_id for _ in range(50)]


@pytest.mark.parametrize(
    ("made", "digest"),
    [
        (lambda: build_tokenizer(SCHEMA).get_vocab(), "6762b02662e4a5dc"),
        (lambda: [task.row(BASE_URL) for split in Split for task in make_tasks(split, 50)], "09dafa6875f23385"),
        (_random_tasks, "c626f4579adf484b"),
        (_short_demonstrations, "3d3d859f0a054167"),
    ],
    ids=["vocabulary", "rows", "random tasks", "demonstrations"],
)
def test_long_tasks_leave_the_short_ones_bit_for_bit_what_they_were(made, digest):
    assert _digest(made()) == digest


def test_orders_are_distinct_and_the_same_every_time():
    for split, orders in ORDERS.items():
        assert len({order.task_id for order in orders}) == len({order.question for order in orders}) == 90
        assert {order.split for order in orders} == {split}
        assert [order.row(BASE_URL) for order in make_orders(split, 90)] == [order.row(BASE_URL) for order in orders]


def test_splits_share_no_shop_and_no_item_of_a_place():
    placed = [{(order.site.place, item) for order in orders for item in order.wanted} for orders in ORDERS.values()]
    shops = [{order.initial_url for order in orders} for orders in ORDERS.values()]
    for sets in (placed, shops):
        assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]


def test_more_orders_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr("cpu.long_tasks.random_order", lambda split, rng: ORDERS[split][0])
    with pytest.raises(ValueError, match="fewer than 2"):
        make_orders(Split.TRAIN, 2)


def test_rows_of_orders_are_written_like_those_of_short_tasks(tmp_path):
    train, validation = tmp_path / "train.jsonl", tmp_path / "validation.jsonl"
    assert write_rows(train, validation, BASE_URL, 3, 2, make_orders) == {"train": 3, "validation": 2}
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    assert [row["responses_create_params"]["metadata"]["kind"] for row in rows] == [LongTaskKind.ORDER] * 3
    assert rows[0]["verifier_metadata"] == dict(ORDERS[Split.TRAIN][0].verifier_metadata)


def _played(order, rendering, habits=FLAWLESS, seed=0, **limits):
    episode = LongEpisode(SimulatedEpisode(order, BASE_URL), ContextLimits(**limits), rendering)
    play_long(episode, habits, random.Random(seed))
    return episode


def test_the_expert_fills_every_order_in_nine_turns_and_doing_nothing_fills_none(rendering):
    for order in [order for orders in ORDERS.values() for order in orders[:6]]:
        assert SimulatedEpisode(order, BASE_URL).reward == 0.0
        played = _played(order, rendering)
        assert (played.turns, played.stop_reason, played.episode.reward) == (9, "finished", 1.0), order.task_id


@pytest.mark.parametrize(
    ("habits", "turns", "reward"),
    [(Habits(early_finish=1.0), 1, 0.0), (Habits(wrong_element=1.0), 3, 0.0)],
    ids=["finishes at once", "buys the wrong item and sees that all is lost"],
)
def test_habits_make_the_mistakes_they_name(rendering, habits, turns, reward):
    order = next(order for order in ORDERS[Split.TRAIN] if len(order.site.sold) == 4)
    played = _played(order, rendering, habits)
    assert (played.turns, played.episode.reward) == (turns, reward)


def test_the_expert_puts_a_wrong_item_back_and_still_fills_the_order(rendering):
    (order,) = make_orders(Split.TRAIN, 1)
    episode = LongEpisode(SimulatedEpisode(order, BASE_URL), ContextLimits(), rendering)
    episode.take(call_text({"action": "click", "element": order.wanted[1]}))
    play_long(episode, FLAWLESS, random.Random(0))
    assert (episode.turns, episode.episode.reward) == (11, 1.0)


@pytest.mark.parametrize(
    ("path", "cart"),
    [("/delta/40/shop", ()), ("/delta/40/shop/cart?cart=tea.bus", ("tea", "bus")), ("/delta/40/shop?cart=", ())],
)
def test_the_cart_is_read_from_the_address(path, cart):
    assert cart_at(BASE_URL + path) == cart


def test_what_is_left_of_an_order_is_nothing_sensible_once_the_cart_is_wrong():
    order = ORDERS[Split.TRAIN][0]
    first, second, third = order.wanted
    assert order.left((first,)) == (second, third)
    assert order.left(order.wanted) == ()
    assert order.left((second,)) is None


@pytest.mark.parametrize("line", ["1. click [2] a: tea", "8. click [0] button: add"])
def test_a_line_of_the_ledger_is_three_tokens(long_tokenizer, line):
    assert len(long_tokenizer.encode(line, add_special_tokens=False)) == 3


def test_the_fixed_words_of_a_compacted_context_are_few_tokens(long_tokenizer):
    pages = ["URL: http://127.0.0.1:8077/a"] * 9
    for memory in window_memories(["click [0] a: tea"] * 8, pages, 2):
        text = f"\n\n{memory}\n\nThe page now:\n"
        shown = text.count("click")
        pages_shown = text.count("URL: ")
        tokens = len(long_tokenizer.encode(text, add_special_tokens=False))
        assert tokens <= 2 + 4 * shown + 3 * (shown < 8) + 13 * pages_shown, text


def test_the_long_tokenizer_keeps_the_short_ones_tokens(long_tokenizer):
    short = build_tokenizer(SCHEMA)
    messages = _short_demonstrations()[0]
    texts = [tokenizer.convert_ids_to_tokens(encode_episode(messages, tokenizer, SCHEMA)[0])
             for tokenizer in (short, long_tokenizer)]  # fmt: skip
    assert texts[0] == texts[1]


def test_contexts_survive_encoding_turn_by_turn(long_tokenizer):
    demonstrate, rng = LongDemonstrations(long_tokenizer, SCHEMA), random.Random(5)
    for _ in range(25):
        messages = demonstrate(Habits(wrong_element=0.3, early_finish=0.05), rng)
        text = long_tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False)
        whole = long_tokenizer.encode(text, add_special_tokens=False)
        assert long_tokenizer.decode(whole) == text
        parts = []
        for turn in text.split("<|im_end|>"):
            parts += long_tokenizer.encode(turn, add_special_tokens=False) + [long_tokenizer.eos_token_id]
        assert parts[:-1] == whole
        assert len(whole) < 400


def test_demonstrations_are_of_every_context_policy_and_set_by_the_seed(long_tokenizer):
    def contexts(seed):
        demonstrate, rng = LongDemonstrations(long_tokenizer, SCHEMA), random.Random(seed)
        return [demonstrate(FLAWLESS, rng) for _ in range(40)]

    texts = [json.dumps(messages) for messages in contexts(1)]
    for phrase in ("Your actions so far:", "The page after action", "Your notes on", "Your context is full"):
        assert any(phrase in text for text in texts), phrase
    assert texts == [json.dumps(messages) for messages in contexts(1)] != [json.dumps(m) for m in contexts(2)]


def test_a_call_is_written_as_the_chat_template_renders_it(long_tokenizer):
    arguments = {"action": "click", "element": "tea"}
    call = {"type": "function", "function": {"name": "browser", "arguments": arguments}}
    rendered = [
        long_tokenizer.apply_chat_template([{"role": "user", "content": "x"}, reply], tokenize=False)
        for reply in (
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "assistant", "content": call_text(arguments)},
        )
    ]
    assert rendered[0] == rendered[1]


def test_long_kinds_are_none_of_the_short_ones():
    assert not set(LongTaskKind) & set(TaskKind)
    assert {policy.value for policy in ContextPolicy} == {"append", "window", "summary"}
