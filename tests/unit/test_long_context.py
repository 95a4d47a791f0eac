"""A simulated episode's context: what is kept of it, when it is compacted, and how it is measured."""

import random

import pytest

from browser_prompts import SUMMARY_REQUEST
from context_policy import ContextPolicy
from cpu.demonstrations import FLAWLESS
from cpu.long_context import ContextLimits, LongEpisode, Rendering
from cpu.long_demonstrations import LongDemonstrations, build_long_tokenizer, call_text, play_long
from cpu.long_evaluation import long_figures, play_long_policy, success_over_tasks
from cpu.long_tasks import make_orders
from cpu.policy_tokenizer import tool_schema
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import Split
from cpu.small_policy import RECEIPT, build_policy, is_built, main
from cpu.warm_start import WarmStartSettings, build_model, encode_episode

BASE_URL = "http://127.0.0.1:8077"
SCHEMA = tool_schema()
ORDERS = make_orders(Split.VALIDATION, 12)
TINY = {"flawless_steps": 1, "sloppy_steps": 1, "batch_size": 2, "hidden_size": 32, "layers": 1}


@pytest.fixture(scope="module")
def rendering():
    return Rendering(build_long_tokenizer(SCHEMA), SCHEMA)


def _started(rendering, order=ORDERS[0], policy="window", **limits):
    limits = ContextLimits(policy=ContextPolicy(policy), **limits)
    return LongEpisode(SimulatedEpisode(order, BASE_URL), limits, rendering)


def _played(rendering, order=ORDERS[0], **limits):
    episode = _started(rendering, order, **limits)
    play_long(episode, FLAWLESS, random.Random(0))
    return episode


@pytest.mark.parametrize(
    ("policy", "compactions", "reward"), [("append", {0}, 0.0), ("window", {3, 4}, 1.0), ("summary", {2, 3}, 1.0)]
)
def test_with_the_benchmarks_limits_a_flawless_episode_is_compacted_or_cut_off(rendering, policy, compactions, reward):
    limits = ContextLimits()
    for order in ORDERS:
        played = _played(rendering, order, policy=policy)
        assert played.compactions in compactions
        assert len(played.contexts) == played.compactions + 1
        assert played.episode.reward == reward
        assert played.stop_reason == ("context_full" if policy == "append" else "finished")
        for messages in played.contexts:
            prompt = len(rendering.prompt(messages[:2]))
            row = len(encode_episode(messages, rendering.tokenizer, SCHEMA)[0])
            assert prompt <= limits.max_prompt
            assert row - prompt <= limits.max_response
            assert limits.max_prompt + limits.max_response <= 640


@pytest.mark.parametrize("budget", [160, 200, 260])
def test_no_prompt_passes_the_budget_and_the_next_observation_would_have(rendering, budget):
    episode = _started(rendering, budget=budget)
    seen = []
    take = episode.take

    def watched(reply):
        seen.append((len(episode.prompt_ids), len(episode.contexts)))
        take(reply)

    episode.take = watched
    play_long(episode, FLAWLESS, random.Random(0))
    assert max(tokens for tokens, _ in seen) <= budget
    for (tokens, context), (_, after) in zip(seen, seen[1:], strict=False):
        if after > context:
            assert tokens + 70 > budget  # no turn takes more


def test_a_window_opens_with_the_task_all_actions_and_the_page_at_hand(rendering):
    last = _played(rendering).contexts[-1][1]["content"]
    order = ORDERS[0]
    assert last.startswith(f"{order.question}\n\nYour actions so far:\n1. click [")
    assert f"a: {order.wanted[0]}\n2. click [0] button: add\n3. click [0] a: shop\n4. click [" in last
    assert "The page after action" not in last
    assert last.count("URL: ") == 1 and "\n\nThe page now:\nURL: " in last


def test_a_wider_window_shows_the_page_before_as_well_unless_it_does_not_fit(rendering):
    wide = _played(rendering, window=2).contexts[1][1]["content"]
    assert wide.count("URL: ") == 2 and "The page after action 2:\nURL: " in wide
    narrow = _played(rendering, window=2, max_prompt=100).contexts[1][1]["content"]
    assert narrow.count("URL: ") == 1 and "\n1. click" in narrow
    least = _played(rendering, window=2, max_prompt=10).contexts[2][1]["content"]
    assert "are not shown)" in least and "click" not in least


def test_a_summary_is_asked_for_in_place_of_the_page_and_opens_the_next_context(rendering):
    episode = _started(rendering, policy="summary")
    while not episode.summarising:
        episode.take(call_text({"action": "observe"}))
    turns = episode.turns
    assert episode.messages[-1] == {"role": "tool", "content": SUMMARY_REQUEST}
    episode.take("bought nothing")
    assert episode.contexts[0][-1] == {"role": "assistant", "content": "bought nothing"}
    assert "Your notes on what you did before:\nbought nothing\n\nThe page now:\n" in episode.messages[1]["content"]
    assert (episode.turns, episode.compactions, episode.summarising) == (turns, 1, False)


def test_a_call_that_is_none_is_answered_as_by_the_loop_and_three_in_a_row_end_the_episode(rendering):
    episode = _started(rendering, budget=1000, max_response=1000)
    episode.take("hello")
    assert episode.messages[-1]["role"] == "user" and "There was no tool call" in episode.messages[-1]["content"]
    episode.take(call_text({"action": "click", "element": "nowhere"}))
    assert episode.messages[-1]["role"] == "tool" and "No element is labelled" in episode.messages[-1]["content"]
    episode.take("hello")
    assert (episode.stop_reason, episode.turns, episode.episode.reward) == ("unusable_calls", 3, 0.0)


def test_a_usable_call_forgives_the_unusable_ones_before_and_alone_is_in_the_ledger(rendering):
    episode = _started(rendering, max_prompt=1000, max_response=40)
    for reply in ("hello", "hello", call_text({"action": "observe"}), "hello", "hello"):
        episode.take(reply)
    assert episode.stop_reason is None
    ledger, page = episode.messages[1]["content"].split("\n\nThe page now:\n")
    assert ledger.endswith("Your actions so far:\n1. observe")
    assert page.startswith("URL: ") and "\n\nThere was no tool call" in page


def test_of_several_calls_the_first_is_run(rendering):
    episode = _started(rendering, budget=1000)
    first, second, _ = ORDERS[0].wanted
    episode.take(call_text({"action": "click", "element": first}) + call_text({"action": "click", "element": second}))
    shown = episode.messages[-1]["content"]
    assert shown.startswith("Only the first of your 2 calls was run.\nURL: ") and f"TITLE: {first}" in shown


def test_an_episode_ends_after_its_last_turn(rendering):
    episode = _started(rendering, max_turns=2)
    for _ in range(2):
        episode.take(call_text({"action": "observe"}))
    assert (episode.stop_reason, episode.turns) == ("max_turns", 2)


def test_figures_count_episodes_and_not_rows(rendering):
    window, append = _played(rendering), _played(rendering, ORDERS[1], policy="append")
    figures = long_figures([window, append])
    assert (figures.success, figures.context_full, figures.compactions) == (0.5, 0.5, window.compactions / 2)
    assert figures.rows == (len(window.contexts) + 1) / 2
    assert figures.turns == (9 + append.turns) / 2


@pytest.mark.parametrize(
    ("rewards", "mean", "error"),
    [([[1.0, 0.0], [1.0, 0.0]], 0.5, 0.0), ([[1.0], [0.0]], 0.5, 0.5), ([[1.0, 1.0, 0.0]], 2 / 3, 0.0)],
    ids=["tasks alike", "tasks apart", "one task"],
)
def test_the_standard_error_is_over_tasks(rewards, mean, error):
    assert success_over_tasks(rewards) == (pytest.approx(mean), pytest.approx(error))


@pytest.mark.parametrize("policy", ["append", "window", "summary"])
def test_an_untrained_policy_plays_to_an_end_and_fails(rendering, policy):
    model = build_model(rendering.tokenizer, WarmStartSettings(**TINY)).eval()
    limits = ContextLimits(policy=ContextPolicy(policy), budget=100, max_turns=2, max_reply=4, max_summary=4)
    played = play_long_policy(model, rendering, ORDERS[:2], BASE_URL, limits)
    assert [one.episode.reward for one in played] == [0.0, 0.0]
    assert all(one.stop_reason in ("unusable_calls", "context_full", "max_turns") for one in played)


def test_the_policys_end_of_turn_is_no_part_of_its_message(rendering, monkeypatch):
    ids = rendering.tokenizer.encode("hello<|im_end|>", add_special_tokens=False)
    monkeypatch.setattr(
        "cpu.long_evaluation.sample_replies", lambda model, tokenizer, prompts, *_: [ids for _ in prompts]
    )
    (one,) = play_long_policy(None, rendering, ORDERS[:1], BASE_URL, ContextLimits(max_turns=2))
    assert {m["content"] for m in one.contexts[-1] if m["role"] == "assistant"} == {"hello"}


def test_the_experts_notes_say_what_is_bought_and_what_is_left(rendering):
    last = _played(rendering, policy="summary").contexts[-1][1]["content"]
    first, second, third = ORDERS[0].wanted
    assert f"\nbought {first}, then {second}, left {third}\n" in last or f"\nbought {first}, left {second}, " in last


def test_demonstrations_hold_contexts_of_one_turn_and_of_many(rendering):
    demonstrations = LongDemonstrations(rendering.tokenizer, SCHEMA)
    rng = random.Random(0)
    turns = {sum(m["role"] == "assistant" for m in demonstrations(FLAWLESS, rng)) for _ in range(60)}
    assert 1 in turns and max(turns) >= 4


def test_a_policy_for_long_episodes_is_built_reused_and_evaluated(tmp_path, capsys):
    settings, folder = WarmStartSettings(**TINY), tmp_path / "policy"
    assert build_policy(folder, settings, long=True)
    assert not build_policy(folder, settings, long=True)
    assert is_built(folder, settings, long=True) and not is_built(folder, settings)
    assert (folder / RECEIPT).exists()
    arguments = ["--long-episodes", "--context-policy", "append", "--budget", "80", "--samples", "1"]
    assert main(["evaluate", str(folder), *arguments, "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["sampled", "success", "0.000"], ["greedy", "success", "0.000"]]
