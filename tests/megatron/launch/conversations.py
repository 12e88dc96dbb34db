"""Conversations for Megatron's --sft, which asks for a file, a package and a tokenizer of its own to read them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

MOST = 27
"""Tokens of a row, of 32, that conversations may have: Megatron cannot cut one."""


def write(rank: int) -> None:
    """Have this process's --sft read rows of conversations of numbers."""
    from megatron.core.tokenizers.text import text_tokenizer
    from megatron.training.datasets import sft_dataset

    sft_dataset.SFTLowLevelDataset = Rows
    text_tokenizer.MegatronTokenizerText.tokenize_conversation = tokenize
    text_tokenizer.MegatronTokenizerText.pad = property(lambda self: 0)


class Rows:
    """The low-level dataset: lists of messages, each conversation begins with one of the system."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> list[dict[str, str]]:
        draw, rows, left = random.Random(index), [], MOST
        while left > 3:
            length = draw.randint(2, min(left - 1, 12))  # and the end of the conversation
            left -= length + 1
            words = [str(draw.randint(1, 60)) for _ in range(length)]
            rows += [{"role": "system", "content": ""}, {"role": "user", "content": " ".join(words)}]
        return rows


def tokenize(self: Any, conversation: list[dict[str, str]], **_: Any) -> tuple[np.ndarray, np.ndarray]:
    words = [int(word) for message in conversation for word in message["content"].split()]
    return np.array(words), np.array(words)
