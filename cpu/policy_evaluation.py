"""Plays a policy on the simulated practice site and measures how often it succeeds."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from cpu.demonstrations import opening_messages
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_tasks import Task

_MAX_REPLY_TOKENS = 24


@dataclass
class PlayedEpisode:
    """An episode's tokens, as the trainer would see them."""

    episode: SimulatedEpisode
    ids: list[int]
    prompt_length: int
    written: list[bool] = field(default_factory=list)
    """For each token after the prompt, whether the policy wrote it."""
    turns: int = 0


def play_policy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    schema: dict,
    tasks: list[Task],
    base_url: str,
    *,
    greedy: bool = False,
    max_turns: int = 5,
) -> list[PlayedEpisode]:
    """Return one episode for each task, played by the policy, sampled at temperature 1 unless greedy."""
    played = []
    for task in tasks:
        episode = SimulatedEpisode(task, base_url)
        text = tokenizer.apply_chat_template(
            opening_messages(episode), tools=[schema], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        played.append(PlayedEpisode(episode, ids, len(ids)))
    running = list(played)
    for turn in range(max_turns):
        replies = sample_replies(model, tokenizer, [p.ids for p in running], greedy, _MAX_REPLY_TOKENS)
        for one, reply in zip(running, replies, strict=True):
            _take_turn(one, reply, tokenizer, last=turn == max_turns - 1)
        running = [p for p in running if not p.episode.finished]
        if not running:
            break
    return played


def _take_turn(played: PlayedEpisode, reply: list[int], tokenizer: PreTrainedTokenizerFast, last: bool) -> None:
    played.turns += 1
    played.ids += reply
    played.written += [True] * len(reply)
    response = played.episode.reply(tokenizer.decode(reply))
    if played.episode.finished or last:
        return
    text = f"\n<|im_start|>user\n<tool_response>\n{response}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    context = tokenizer.encode(text, add_special_tokens=False)
    played.ids += context
    played.written += [False] * len(context)


@torch.no_grad()
def sample_replies(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    greedy: bool,
    max_tokens: int,
) -> list[list[int]]:
    """Return the policy's reply to each prompt with its end-of-turn token, sampled at temperature 1 unless greedy."""
    length = max(len(ids) for ids in prompts)
    padding = tokenizer.pad_token_id
    ids = torch.tensor([[padding] * (length - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, **sampling)
    replies = []
    for row in output[:, length:].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        replies.append([token for token in row[:end] if token != padding])
    return replies


def success_by_kind(played: list[PlayedEpisode]) -> dict[str, float]:
    """Return the share of rewarded episodes by task kind, and over all under "all"."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for one in played:
        rewards[str(one.episode.task.kind)].append(one.episode.reward)
        rewards["all"].append(one.episode.reward)
    return {kind: sum(values) / len(values) for kind, values in rewards.items()}
