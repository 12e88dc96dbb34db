"""Text as Megatron's indexed token files, split into training and validation, and as its GPTDataset."""

from __future__ import annotations

import hashlib
import os
import pathlib

import numpy as np
import torch
from library_text import find_text
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

PARTS = ("train", "validation")
VOCABULARY = 256
"""Tokens are bytes."""
VALIDATION_EVERY = 20
"""One block of text in this many is held out."""
BLOCK = 2**16


class Corpus:
    """Tokens (bytes) of ``files`` as an indexed dataset for each part, ``FOLDER/train`` and ``FOLDER/validation``.

    Args:
        files: text files; None: the Python standard library's source.
        cache: directory for the token files, shared by runs on the same text.

    Raises:
        OSError: a file is missing or cannot be read. ValueError: there is no text.
    """

    def __init__(self, files: list[str] | None, cache: str):
        self.name, paths = find_text(files)
        stamp = "\n".join(f"{p}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in paths)
        self.folder = pathlib.Path(cache, f"indexed-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}")
        done = self.folder / "done"
        if not done.exists() or not done.read_text():
            _index(paths, self.folder)
        self.fingerprint = done.read_text()[:16]
        """The same for the same text, wherever its files lie."""
        self.tokens = {part: pathlib.Path(get_bin_path(str(self.folder / part))).stat().st_size for part in PARTS}

    def unigram_entropy(self) -> float:
        """Entropy of single bytes in nats: the loss of a model that knows nothing but frequencies."""
        tokens = np.memmap(get_bin_path(str(self.folder / "train")), dtype=np.uint8, mode="r")
        p = np.bincount(tokens, minlength=VOCABULARY) / len(tokens)
        p = p[p > 0]
        return float(-(p * np.log(p)).sum())

    def require(self, sequence: int) -> None:
        """ValueError where a part is too short for a sequence of ``sequence`` tokens and its successor."""
        for part, tokens in self.tokens.items():
            if tokens <= sequence + 1:
                raise ValueError(
                    f"{part} has {tokens} tokens, fewer than a sequence of {sequence}; give more --data or a shorter "
                    "--seq-length"
                )

    def datasets(self, sequence: int, samples: tuple[int, int], seed: int) -> tuple[GPTDataset, GPTDataset | None]:
        """Megatron's GPTDataset of both parts, shuffled by ``seed``; all ranks call it.

        Args:
            sequence: tokens in a sample.
            samples: how many of each part; 0 of the second: None.
        """
        blend = [([str(self.folder / part)], None) if size else None for part, size in zip(PARTS, samples)]
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=sequence,
            blend_per_split=[*blend, None],
            path_to_cache=str(self.folder / "samples"),
            tokenizer=NullTokenizer(VOCABULARY),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,  # causal, which the model knows
        )
        train, validation, _ = BlendedMegatronDatasetBuilder(GPTDataset, [*samples, 0], lambda: True, config).build()
        return train, validation


class Batches(torch.utils.data.Sampler):
    """Indices of this data-parallel rank's micro-batches, in order: Megatron's pretraining sampler.

    Args:
        samples: in the dataset.
        first: samples that all ranks have used before.
        size: of a micro-batch.
        rank, ranks: of the data-parallel group.
    """

    def __init__(self, samples: int, first: int, size: int, rank: int, ranks: int):
        self.starts = range(first + rank * size, samples - size + 1, ranks * size)
        self.size = size

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self):
        return (list(range(start, start + self.size)) for start in self.starts)


def _index(paths: list[pathlib.Path], folder: pathlib.Path) -> None:
    """Write the token files, each block of text a document; ``done``, with the hash of the text, comes last, so that a
    killed run leaves nothing that looks whole."""
    folder.mkdir(parents=True, exist_ok=True)
    text = b"\n".join(p.read_bytes() for p in paths)
    blocks = [text[i : i + BLOCK] for i in range(0, len(text), BLOCK)]
    documents = {
        "train": [b for i, b in enumerate(blocks, 1) if i % VALIDATION_EVERY],
        "validation": blocks[VALIDATION_EVERY - 1 :: VALIDATION_EVERY],
    }
    if not documents["validation"]:
        end = len(text) * 95 // 100
        documents = {"train": [text[:end]], "validation": [text[end:]]}
    for part, blocks in documents.items():
        if not any(blocks):
            raise ValueError("there is no text in the given files")
        prefix, partial = str(folder / part), str(folder / f"{part}.{os.getpid()}")
        builder = IndexedDatasetBuilder(get_bin_path(partial), dtype=np.uint8)
        for block in blocks:
            builder.add_document(np.frombuffer(block, dtype=np.uint8), [len(block)])
        builder.finalize(get_idx_path(partial))
        os.replace(get_bin_path(partial), get_bin_path(prefix))
        os.replace(get_idx_path(partial), get_idx_path(prefix))
    partial = folder / f"done.{os.getpid()}"
    partial.write_text(hashlib.sha256(text).hexdigest())
    partial.rename(folder / "done")
