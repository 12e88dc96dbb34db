"""The text of train_hf.py: documents as tokens, and global batches that depend on the seed and their number alone, so
that the place in the data is one number.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from argparse import Namespace
from typing import Any, Iterator

import numpy as np
import torch
from hf_models import IGNORED
from library_text import find_text

VALIDATION_EVERY = 20
"""One document in this many is held out."""
MASKED = 0.15
"""The part of tokens that masked and sequence-to-sequence models have to find: of these 80 % are masked, 10 % are
other tokens, 10 % stay (Devlin et al. 2019)."""
TRAINING, VALIDATION = 0, 1


class Bytes:
    """Tokens are bytes behind four special ones."""

    pad, bos, eos, mask, first, size = 0, 1, 2, 3, 4, 264
    start = bos
    """Of a decoder."""

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32) + self.first

    def decode(self, tokens: list[int]) -> str:
        values = [t - self.first for t in tokens if self.first <= t < self.first + 256]
        return bytes(values).decode(errors="replace")


class Pretrained:
    """Tokens of the tokenizer that lies beside pretrained weights."""

    def __init__(self, folder: str):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        t = self.tokenizer
        ids = {n: getattr(t, f"{n}_token_id") for n in ("pad", "bos", "eos", "mask", "cls", "sep")}
        self.eos = next((ids[n] for n in ("eos", "sep") if ids[n] is not None), 0)
        self.bos = next((ids[n] for n in ("bos", "cls") if ids[n] is not None), self.eos)
        self.pad = self.eos if ids["pad"] is None else ids["pad"]
        self.mask = self.pad if ids["mask"] is None else ids["mask"]
        self.start, self.first, self.size = self.bos, 0, len(t)

    def encode(self, text: bytes) -> np.ndarray:
        return np.array(self.tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False), dtype=np.int32)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


class Documents:
    """Parts of the text between two empty lines, as tokens: training and validation.

    Args:
        files: text files; None: the standard library's source.
        vocabulary: of the tokens.

    Raises:
        OSError: a file is missing or cannot be read. ValueError: there are less than two documents.
    """

    def __init__(self, files: list[str] | None, vocabulary: Any):
        self.name, paths = find_text(files)
        text = b"\n\n\n".join(p.read_bytes() for p in paths)
        self.fingerprint = hashlib.sha256(text).hexdigest()[:16]
        texts = [d.strip(b"\n") + b"\n" for d in re.split(rb"\n\n\n+", text) if d.strip()]
        if len(texts) < 2:
            raise ValueError("there are less than two documents in the text (parts between two empty lines)")
        every = min(VALIDATION_EVERY, len(texts))
        self.parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for i, document in enumerate(texts, 1):
            self.parts[VALIDATION if i % every == 0 else TRAINING].append(vocabulary.encode(document))
        counts = np.bincount(np.concatenate(self.parts[TRAINING]))
        p = counts[counts > 0] / counts.sum()
        self.entropy = float(-(p * np.log(p)).sum())
        """Of single tokens in nats: the loss of a model that knows nothing but frequencies."""
        self.unit = "token"

    def describe(self) -> str:
        sizes = [sum(map(len, part)) for part in self.parts]
        return (
            f"{self.name}: {len(self.parts[TRAINING])} documents, {sizes[TRAINING] / 1e6:.2f} M tokens for training, "
            f"{sizes[VALIDATION] / 1e6:.3f} M for validation, unigram entropy {self.entropy:.3f} nats per token"
        )


class TextBatches(torch.utils.data.Dataset):
    """Item i is global batch i: tensors [rows, length], equal on every rank.

    Without buckets rows are full: documents one after another, and where they are packed ``position_ids`` begin anew
    in each and no label crosses their bounds. With buckets a row is a document, or a part of one, padded to the least
    bucket that holds it, and all rows of a batch are of one bucket.

    Args:
        args: of the run: kind, rows, ``seq_length``, ``buckets``, seed.
        documents, vocabulary: the text.
        part: TRAINING or VALIDATION.
        packed: whether documents are apart.
    """

    def __init__(self, args: Namespace, documents: Documents, vocabulary: Any, part: int, packed: bool):
        self.kind, self.rows, self.seed, self.part = args.kind, args.batch_size, args.seed, part
        self.length, self.buckets, self.packed, self.vocabulary = args.seq_length, args.buckets, packed, vocabulary
        self.documents = documents.parts[part]
        self.orders: dict[int, list[Any]] = {}
        self.pieces: list[tuple[int, int, int]] = []
        if self.buckets:
            self.pieces = [
                (d, start, min(start + max(self.buckets) - 1, len(document)))
                for d, document in enumerate(self.documents)
                for start in range(0, len(document), max(self.buckets) - 1)
            ]
        self.count = len(self.order(0))
        if not self.count:
            short = f"{self.rows} rows of {self.length}" if not self.buckets else f"{self.rows} rows of any bucket"
            raise ValueError(f"the text for {('training', 'validation')[part]} has no {short} tokens")

    def __len__(self) -> int:
        """Batches of one epoch."""
        return self.count

    def order(self, epoch: int) -> list[Any]:
        """What each batch of an epoch is made of, in an order that the seed and the epoch give: without buckets places
        in the stream, else pieces of documents."""
        if epoch not in self.orders:
            random = np.random.default_rng([self.seed, self.part, epoch])
            self.orders = {epoch: self._buckets(random) if self.buckets else self._stream(random)}
        return self.orders[epoch]

    def _buckets(self, random: np.random.Generator) -> list[Any]:
        held: dict[int, list[Any]] = {b: [] for b in self.buckets}
        for i in random.permutation(len(self.pieces)):
            _, start, end = self.pieces[i]
            held[next(b for b in self.buckets if end - start < b)].append(self.pieces[i])
        batches = [
            (b, g[i : i + self.rows]) for b, g in held.items() for i in range(0, len(g) - self.rows + 1, self.rows)
        ]
        return [batches[i] for i in random.permutation(len(batches))]

    def _stream(self, random: np.random.Generator) -> list[Any]:
        order = random.permutation(len(self.documents))
        end = np.array([self.vocabulary.eos], dtype=np.int32)
        self.tokens = np.concatenate([a for d in order for a in (self.documents[d], end)])
        sizes = np.array([len(self.documents[d]) + 1 for d in order])
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        self.places = np.arange(len(self.tokens)) - starts  # in the document
        rows = random.permutation((len(self.tokens) - 1) // self.length) * self.length
        return [rows[i : i + self.rows] for i in range(0, len(rows) - self.rows + 1, self.rows)]

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        epoch, i = divmod(number, len(self))
        content = self.order(epoch)[i]
        if self.buckets:
            tokens, places = self._padded(*content)
        else:
            at = content[:, None] + np.arange(self.length + 1)
            tokens, places = self.tokens[at], self.places[at]
        random = np.random.default_rng([self.seed, self.part, number, 1])
        batch = getattr(self, f"_{self.kind}")(tokens, places, random)
        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in batch.items()}

    def _padded(self, bucket: int, pieces: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.full((len(pieces), bucket + 1), self.vocabulary.pad, dtype=np.int32)
        for row, (d, start, end) in zip(tokens, pieces, strict=True):
            row[: end - start] = self.documents[d][start:end]
            row[end - start] = self.vocabulary.eos
        return tokens, np.broadcast_to(np.arange(bucket + 1), tokens.shape)

    def _causal(self, tokens: np.ndarray, places: np.ndarray, random: np.random.Generator) -> dict[str, np.ndarray]:
        ids, labels = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        if self.buckets:
            ended = np.cumsum(ids == self.vocabulary.eos, 1) > 0
            return {"input_ids": ids, "labels": np.where(ended, IGNORED, labels)}
        if not self.packed:
            return {"input_ids": ids, "labels": labels}
        here = places[:, :-1]
        first = np.maximum.accumulate(np.where(here == 0, np.arange(self.length), 0), 1)
        labels = np.where(places[:, 1:] == 0, IGNORED, labels)
        return {"input_ids": ids, "labels": labels, "position_ids": np.arange(self.length) - first}

    def _hidden(self, tokens: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, ...]:
        """(what the model reads, what was there, where it was changed), int64 and bool [rows, length]."""
        ids, v = tokens[:, :-1].astype(np.int64), self.vocabulary
        hidden = (random.random(ids.shape) < MASKED) & (ids >= v.first) & (ids != v.pad) & (ids != v.eos)
        how, other = random.random(ids.shape), random.integers(v.first, v.size, ids.shape)
        read = np.where(hidden & (how < 0.8), v.mask, np.where(hidden & (how > 0.9), other, ids))
        return read, ids, hidden

    def _mask(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Which tokens are no padding; rows that are full need none."""
        if not self.buckets:
            return {}
        ended = np.cumsum(ids == self.vocabulary.eos, 1) - (ids == self.vocabulary.eos) > 0
        return {"attention_mask": (~ended).astype(np.int64)}

    def _masked(self, tokens: np.ndarray, places: np.ndarray, random: np.random.Generator) -> dict[str, np.ndarray]:
        read, ids, hidden = self._hidden(tokens, random)
        return {"input_ids": read, "labels": np.where(hidden, ids, IGNORED), **self._mask(ids)}

    def _seq2seq(self, tokens: np.ndarray, places: np.ndarray, random: np.random.Generator) -> dict[str, np.ndarray]:
        """The target is the text without masks (BART's token masking)."""
        read, ids, _ = self._hidden(tokens, random)
        before = np.concatenate((np.full_like(ids[:, :1], self.vocabulary.start), ids[:, :-1]), 1)
        mask = self._mask(ids)
        labels = np.where(mask["attention_mask"] == 1, ids, IGNORED) if mask else ids
        return {"input_ids": read, "decoder_input_ids": before, "labels": labels, **mask}


class From(torch.utils.data.Sampler):
    """Numbers of batches from ``first`` on, without an end or up to ``end``."""

    def __init__(self, first: int, end: int | None = None):
        self.first, self.end = first, end

    def __iter__(self) -> Iterator[int]:
        return iter(itertools.count(self.first) if self.end is None else range(self.first, self.end))


class Loader:
    """A DataLoader that knows its place, as torchdata's StatefulDataLoader: ``state_dict`` counts the batches that were
    taken, not those that a worker has made ahead.
    """

    def __init__(self, batches: torch.utils.data.Dataset, workers: int):
        self.batches, self.workers, self.taken = batches, workers, 0
        self.iterator: Iterator[dict[str, torch.Tensor]] | None = None

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.iterator is None:
            self.iterator = iter(self.load(From(self.taken)))
        self.taken += 1
        return next(self.iterator)

    def load(self, numbers: From) -> torch.utils.data.DataLoader:
        """The batches of these numbers; nothing is drawn from torch's own generator, which dropout uses."""
        return torch.utils.data.DataLoader(
            self.batches, batch_size=None, sampler=numbers, num_workers=self.workers, generator=torch.Generator()
        )

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken, self.iterator = state["batches"], None


def perplexity(loss: float) -> str:
    return f"{math.exp(loss):.2f}" if loss < 50 else "beyond e^50"
