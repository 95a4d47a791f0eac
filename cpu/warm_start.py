"""Warm start of the small policy: supervised training on scripted episodes, first flawless ones, then sloppy ones.

The first phase teaches what reinforcement learning could not find by itself: the form of a tool call, copying a word
from the task or the page, the order of the actions. The second phase, short, blends bad habits in, so that the policy
fails often enough for GRPO to have something to learn, while the right action stays the likeliest one.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cpu.demonstrations import FLAWLESS, Habits, demonstration
from cpu.policy_tokenizer import PADDING
from cpu.practice_pages import CODES, ITEMS, LABELS, NAMES
from environment_session import ActionName

_HEAD_SIZE = 32
_COPY_STRENGTH = 0.5


@dataclass(frozen=True)
class WarmStartSettings:
    """Everything that the warm-started policy depends on beside the code."""

    seed: int = 0
    flawless_steps: int = 260
    sloppy_steps: int = 80
    batch_size: int = 16
    learning_rate: float = 3e-3
    sloppy_learning_rate: float = 5e-4
    context_weight: float = 0.1
    """Weight of the loss on tokens that the policy only reads; predicting repeated words there trains copying."""
    habits: Habits = field(default_factory=lambda: Habits(wrong_element=0.2, wrong_word=0.25, early_finish=0.08))
    word_weight: float = 5.0
    """Weight of the loss on the words that a reply is about: the action, and what to click, to type or to answer."""
    hidden_size: int = 128
    layers: int = 3
    threads: int = 1
    """More would be faster alone, and many times slower beside a process that keeps a core busy."""


def build_model(tokenizer: PreTrainedTokenizerFast, settings: WarmStartSettings) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 model in fp32 whose vocabulary is the tokenizer's.

    A vocabulary larger than the tokenizer's would shift log-probabilities between the inference engine, which masks
    the surplus, and the trainer, which doesn't.
    """
    torch.manual_seed(settings.seed)
    padding = tokenizer.convert_tokens_to_ids(PADDING)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // _HEAD_SIZE,
        num_key_value_heads=settings.hidden_size // _HEAD_SIZE,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=2048,
        initializer_range=0.04,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=padding,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=padding,
    )
    model = Qwen3ForCausalLM(config).float()
    _make_attention_copy(model)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, padding], pad_token_id=padding, do_sample=True, temperature=1.0
    )
    return model


@torch.no_grad()
def _make_attention_copy(model: Qwen3ForCausalLM) -> None:
    """Start every attention layer as one that writes what it attends to: output projection = transposed value one.

    Copying a word is most of what the policy has to learn. From the usual start half of the words were copied after
    160 steps, from this one all after 60. Source: "Mimetic Initialization of Self-Attention Layers", Trockman & Kolter
    2023, https://arxiv.org/abs/2305.09828.
    """
    for layer in model.model.layers:
        values = layer.self_attn.v_proj.weight
        orthogonal, _ = torch.linalg.qr(torch.randn(values.shape))
        values.copy_(_COPY_STRENGTH * orthogonal)
        layer.self_attn.o_proj.weight.copy_(values.T)


def encode_episode(
    messages: list[dict], tokenizer: PreTrainedTokenizerFast, schema: dict
) -> tuple[list[int], list[bool]]:
    """Return the episode's token ids and, for each, whether the policy wrote it."""
    text = tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    opening, end = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False), tokenizer.eos_token_id
    written, speaking = [], False
    for position, token in enumerate(ids):
        written.append(speaking)
        if token == end:
            speaking = False
        elif ids[position - len(opening) + 1 : position + 1] == opening:
            speaking = True
    return ids, written


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    schema: dict,
    settings: WarmStartSettings,
    demonstrate: Callable[[Habits, random.Random], list[dict]] = demonstration,
) -> float:
    """Train the model in place, showing the progress, and return the last loss on the tokens that the policy writes.

    `demonstrate` returns the messages of one example, played with the given habits.
    """
    torch.set_num_threads(settings.threads)
    rng = random.Random(f"warm start {settings.seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    written_loss = float("nan")
    words = torch.zeros(len(tokenizer), dtype=torch.bool)
    words[tokenizer.convert_tokens_to_ids([*ITEMS, *CODES, *NAMES, *LABELS, *ActionName])] = True
    # In a file each refresh of the bar is a line's worth of text.
    interval_s = 3 if sys.stderr.isatty() else 20
    progress = tqdm(range(settings.flawless_steps + settings.sloppy_steps), desc="warm start", mininterval=interval_s)
    for step in progress:
        _set_learning_rate(optimizer, step, settings)
        habits = settings.habits if step >= settings.flawless_steps else FLAWLESS
        episodes = [encode_episode(demonstrate(habits, rng), tokenizer, schema) for _ in range(settings.batch_size)]
        loss, written_loss = _loss(model, episodes, words, tokenizer.pad_token_id, settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.set_postfix(loss=f"{written_loss:.3f}", refresh=False)
    model.eval()
    return written_loss


def _set_learning_rate(optimizer: torch.optim.Optimizer, step: int, settings: WarmStartSettings) -> None:
    if step < settings.flawless_steps:
        done = step / settings.flawless_steps
        rate = settings.learning_rate * min(1.0, (step + 1) / 30) * min(1.0, max(0.1, (1 - done) / 0.4))
    else:
        # Down to zero, so that the habits are averaged over many episodes rather than those of the last ones.
        done = (step - settings.flawless_steps) / settings.sloppy_steps
        rate = settings.sloppy_learning_rate * (1 - done)
    for group in optimizer.param_groups:
        group["lr"] = rate


def _loss(
    model: Qwen3ForCausalLM,
    episodes: list[tuple[list[int], list[bool]]],
    words: torch.Tensor,
    padding: int,
    settings: WarmStartSettings,
) -> tuple[torch.Tensor, float]:
    """Return the weighted loss, and the plain one on the tokens that the policy writes; `words` is (vocabulary,)."""
    length = max(len(ids) for ids, _ in episodes)
    ids = torch.full((len(episodes), length), padding)
    present = torch.zeros(len(episodes), length, dtype=torch.bool)
    written = torch.zeros(len(episodes), length, dtype=torch.bool)
    for row, (tokens, by_policy) in enumerate(episodes):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        present[row, : len(tokens)] = True
        written[row, : len(tokens)] = torch.tensor(by_policy)
    logits = model(input_ids=ids, attention_mask=present.long()).logits[:, :-1]
    targets, written = ids[:, 1:], written[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    weights = torch.where(written, 1.0, settings.context_weight) * present[:, 1:]
    weights = torch.where(written & words[targets], settings.word_weight, weights)
    return (losses * weights).sum() / weights.sum(), losses[written].mean().item()
