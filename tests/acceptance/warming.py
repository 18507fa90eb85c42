"""A small model that knows how conversations with a tool look, made in seconds in place of a warm-up's minutes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lookup.demonstrations import demonstrations
from lookup.words import words
from reverse_text import demonstrations as reversals

from tasks.inference.trace_rows.demonstrations import renderer
from tasks.learner.tiny import tiny_qwen3

WORDS = ("Reverse inside ", "<rev>", "</rev>", ": ")
IGNORED = -100
"""The label of a token that is not learnt, as transformers has it."""


def warmed(directory: Path, settings: dict[str, Any], *, num_updates: int = 60, batch: int = 16) -> Path:
    """Write a model that calls the tool or answers in tags, each where it belongs, and reads hardly a name right."""
    tiny_qwen3(directory, hidden=96, layers=2, heads=3, kv_heads=3, words=(*words(), *WORDS))
    count = num_updates * batch // 2
    lookups = demonstrations(count, seed=1, right=0.6, reminded=0.3)
    texts = reversals.demonstrations(count, seed=1, right=0.3, untagged=0.1, max_length=5)
    rows = [
        each
        for row, text in zip(lookups, texts, strict=True)
        for each in ((row["messages"], row["tools"]), (_asked_and_said(**text),))
    ]
    return taught(directory, settings, rows, batch=batch)


def taught(
    directory: Path, settings: dict[str, Any], conversations: Iterable[Sequence[Any]], *, batch: int = 16
) -> Path:
    """Train the model in `directory` once on each conversation, of messages and where there are any tools."""
    import torch
    from transformers import AutoModelForCausalLM

    render = renderer(directory, "qwen3", settings)
    samples = [_sample(render(*conversation)) for conversation in conversations]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for first in range(0, len(samples), batch):
        tokens, labels = _padded(samples[first : first + batch])
        model(input_ids=torch.tensor(tokens), labels=torch.tensor(labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def _asked_and_said(prompt: str, completion: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _sample(nodes: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """The tokens of a demonstration, and what of them is learnt."""
    tokens = [token for node in nodes for token in node["token_ids"]]
    mask = [sampled for node in nodes for sampled in node["mask"]]
    return tokens, [token if sampled else IGNORED for token, sampled in zip(tokens, mask, strict=True)]


def _padded(samples: Sequence[tuple[list[int], list[int]]]) -> tuple[list[list[int]], list[list[int]]]:
    """A batch of one length; attention looks back alone, so that padding at the end changes nothing."""
    longest = max(len(tokens) for tokens, _ in samples)
    rest = [longest - len(tokens) for tokens, _ in samples]
    tokens = [each + [0] * count for (each, _), count in zip(samples, rest, strict=True)]
    return tokens, [each + [IGNORED] * count for (_, each), count in zip(samples, rest, strict=True)]
