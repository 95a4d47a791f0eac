"""The small policy's tokenizer and model, without training: what verl and vLLM rely on."""

import json
import random

import pytest
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from browser_prompts import SYSTEM_PROMPT
from cpu.demonstrations import FLAWLESS, Habits, call_message, demonstration, play
from cpu.policy_evaluation import play_policy
from cpu.policy_tokenizer import build_tokenizer, tool_schema
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import CODES, ITEMS, LABELS, NAMES, PLACES, Split
from cpu.practice_tasks import make_tasks
from cpu.small_policy import RECEIPT, build_policy, is_built, main
from cpu.warm_start import WarmStartSettings, build_model, encode_episode

SCHEMA = tool_schema()
SLOPPY = Habits(wrong_element=0.3, wrong_word=0.3, early_finish=0.1)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(SCHEMA)


def _episodes(count):
    rng = random.Random(3)
    return [demonstration(SLOPPY, rng) for _ in range(count)]


def test_the_model_has_exactly_the_tokenizers_vocabulary(tokenizer):
    model = build_model(tokenizer, WarmStartSettings())
    assert model.config.vocab_size == len(tokenizer) == model.get_input_embeddings().weight.shape[0]
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1
    assert 400_000 < sum(p.numel() for p in model.parameters()) < 700_000


def test_model_and_tokenizer_are_set_by_the_seed(tokenizer):
    one, same, other = (build_model(tokenizer, WarmStartSettings(seed=seed)) for seed in (1, 1, 2))
    assert one.lm_head.weight.equal(same.lm_head.weight)
    assert not one.lm_head.weight.equal(other.lm_head.weight)
    assert build_tokenizer(SCHEMA).get_vocab() == tokenizer.get_vocab()


def test_the_prompt_holds_tool_schema_and_system_prompt_word_for_word(tokenizer):
    text = tokenizer.apply_chat_template(_episodes(1)[0][:2], tools=[SCHEMA], tokenize=False)
    assert json.dumps(SCHEMA) in text
    assert text.startswith(f"<|im_start|>system\n{SYSTEM_PROMPT}\n\n# Tools\n")


def test_the_schema_is_the_one_that_verl_renders():
    dumped = OpenAIFunctionToolSchema.model_validate(SCHEMA).model_dump(exclude_unset=True, exclude_none=True)
    assert json.dumps(dumped) == json.dumps(SCHEMA)


def test_episodes_are_short_and_survive_encoding_and_decoding(tokenizer):
    for messages in _episodes(60):
        text = tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert len(ids) < 450
        opening = tokenizer.apply_chat_template(
            messages[:2], tools=[SCHEMA], add_generation_prompt=True, return_dict=False
        )
        assert ids[: len(opening)] == opening and len(opening) < 90


@pytest.mark.parametrize("text", ["naïve café ünïcode 漢字", "  [12] textarea: x\n\n\tend", "steam teapot </tool_call"])
def test_any_text_can_be_encoded(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_word_of_the_site_is_one_token_wherever_it_stands(tokenizer):
    for word in {*ITEMS, *CODES, *PLACES, *NAMES, *LABELS}:
        (token,) = tokenizer.encode(word, add_special_tokens=False)
        for text in (f"the {word}.", f'"{word}"', f"/{word}/"):
            assert token in tokenizer.encode(text, add_special_tokens=False), (word, text)


def test_encoding_turn_by_turn_equals_encoding_the_whole_episode(tokenizer):
    for messages in _episodes(40):
        whole = tokenizer.apply_chat_template(messages, tools=[SCHEMA], return_dict=False)
        parts = []
        for turn in tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False).split("<|im_end|>"):
            parts += tokenizer.encode(turn, add_special_tokens=False) + [tokenizer.eos_token_id]
        assert parts[:-1] == whole


def test_verls_incremental_builder_yields_the_tokens_of_the_whole_episode(tokenizer):
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    for messages in _episodes(10):
        ids = builder.build_initial_tokens(messages[:2], tools=[SCHEMA])
        for position in range(2, len(messages)):
            if messages[position]["role"] == "assistant":
                call = json.dumps({"name": "browser", "arguments": _arguments(messages[position])})
                reply = tokenizer.encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>", add_special_tokens=False)
                ids = builder.merge_assistant_tokens(ids, reply).token_ids
            else:
                before, after = messages[:position], messages[: position + 1]
                ids = builder.merge_context_tokens(before, after, ids, tools=[SCHEMA]).token_ids
        if messages[-1]["role"] == "assistant":
            ids = [*ids, *tokenizer.encode("\n", add_special_tokens=False)]
            assert ids == tokenizer.apply_chat_template(messages, tools=[SCHEMA], return_dict=False)


def _arguments(message):
    return message["tool_calls"][0]["function"]["arguments"]


def test_the_policys_own_tokens_are_its_replies_up_to_the_end_of_turn(tokenizer):
    messages = play(SimulatedEpisode(make_tasks(Split.TRAIN, 1)[0], "http://127.0.0.1:80"), FLAWLESS, random.Random(0))
    ids, written = encode_episode(messages, tokenizer, SCHEMA)
    replies = [
        f"<tool_call>\n{json.dumps({'name': 'browser', 'arguments': _arguments(message)})}\n</tool_call><|im_end|>"
        for message in messages
        if message["role"] == "assistant"
    ]
    assert tokenizer.decode([i for i, by_policy in zip(ids, written, strict=True) if by_policy]) == "".join(replies)


def test_tool_calls_are_written_like_json_dumps(tokenizer):
    arguments = {"action": "type", "element": "input", "text": "mia"}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}, call_message(arguments)], tokenize=False)
    call = json.dumps({"name": "browser", "arguments": arguments})
    assert text.endswith(f"<|im_start|>assistant\n<tool_call>\n{call}\n</tool_call><|im_end|>\n")


def test_habits_make_the_mistakes_they_name():
    task = next(t for t in make_tasks(Split.TRAIN, 5) if "answer_equals" in t.verifier_metadata)

    def reward(habits):
        episode = SimulatedEpisode(task, "http://127.0.0.1:80")
        play(episode, habits, random.Random(1))
        return episode.reward

    assert reward(FLAWLESS) == 1.0
    assert (
        reward(Habits(early_finish=1.0)) == reward(Habits(wrong_element=1.0)) == reward(Habits(wrong_word=1.0)) == 0.0
    )


def test_an_untrained_policy_plays_to_the_last_turn_and_fails(tokenizer):
    model = build_model(tokenizer, WarmStartSettings(hidden_size=32, layers=1)).eval()
    tasks = make_tasks(Split.TRAIN, 2)
    played = play_policy(model, tokenizer, SCHEMA, tasks, "http://127.0.0.1:80", max_turns=2)
    assert [one.episode.reward for one in played] == [0.0, 0.0]
    assert all(len(one.ids) == one.prompt_length + len(one.written) for one in played)


def test_a_built_policy_is_reused_for_the_same_settings_only(tmp_path):
    tiny = {"flawless_steps": 2, "sloppy_steps": 1, "batch_size": 2, "hidden_size": 32, "layers": 1, "threads": 1}
    settings = WarmStartSettings(seed=1, **tiny)
    output = tmp_path / "policy"
    assert build_policy(output, settings)
    assert not build_policy(output, settings)
    assert is_built(output, settings) and not is_built(output, WarmStartSettings(seed=2, **tiny))
    (output / RECEIPT).unlink()
    assert not is_built(output, settings)


def test_a_folder_of_other_files_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("keep me")
    assert main(["--output", str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()
