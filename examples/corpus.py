"""Byte-level text as a memory-mapped token cache, split into training and validation."""

from __future__ import annotations

import hashlib
import math
import os
import pathlib
import sysconfig

import numpy as np
import torch

VALIDATION_EVERY = 20
"""One block of text in this many is held out."""
BLOCK = 2**16


def standard_library() -> list[pathlib.Path]:
    """Source files of the Python that runs this, in a fixed order; tests, caches and installed packages left out."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    return sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))


class Corpus:
    """Tokens (bytes) of ``files``, kept as two memory-mapped arrays under ``cache``.

    Args:
        files: text files; None: the Python standard library's source.
        cache: directory for the token cache, shared by runs on the same text.

    Raises:
        OSError: a file is missing or cannot be read. ValueError: there is no text.
    """

    vocabulary = 256

    def __init__(self, files: list[str] | None, cache: str):
        paths = [pathlib.Path(f) for f in files] if files else standard_library()
        if absent := [str(p) for p in paths if not p.is_file()]:
            raise FileNotFoundError(f"there is no file {', '.join(absent)}")
        self.name = (
            ", ".join(files)
            if files
            else f"source text of the Python {sysconfig.get_python_version()} standard library"
        )
        stamp = "\n".join(f"{p}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in paths)
        folder = pathlib.Path(cache, hashlib.sha256(stamp.encode()).hexdigest()[:16])
        done = folder / "done"
        if not done.exists() or not done.read_text():
            _tokenize(paths, folder)
        self.fingerprint = done.read_text()[:16]
        """The same for the same text, wherever its files lie."""
        self.train, self.validation = (
            np.memmap(folder / f"{part}.bin", dtype=np.uint8, mode="r") for part in ("train", "validation")
        )

    def unigram_entropy(self) -> float:
        """Entropy of single bytes in nats: the loss of a model that knows nothing but frequencies."""
        counts = np.bincount(self.train, minlength=256).astype(float)
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())

    def require(self, sequence: int) -> None:
        """ValueError where a part is too short for windows of ``sequence`` tokens."""
        for part, tokens in (("train", self.train), ("validation", self.validation)):
            if len(tokens) <= sequence + 1:
                raise ValueError(
                    f"{part} has {len(tokens)} tokens, fewer than a sequence of {sequence}; give more --data or a "
                    "shorter --seq"
                )

    def batch(self, part: str, size: int, sequence: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``size`` windows of ``sequence`` tokens and their successors, each int64 [size, sequence]; the same for the
        same seed.
        """
        tokens = self.train if part == "train" else self.validation
        starts = np.random.default_rng(seed).integers(0, len(tokens) - sequence - 1, size)
        windows = torch.from_numpy(np.stack([tokens[s : s + sequence + 1] for s in starts]).astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _tokenize(paths: list[pathlib.Path], folder: pathlib.Path) -> None:
    """Write the cache; ``done``, with the hash of the text, comes last, so that a killed run leaves nothing that looks
    whole. Ranks may race: each writes the same bytes under its own name and renames."""
    folder.mkdir(parents=True, exist_ok=True)
    text = b"\n".join(p.read_bytes() for p in paths)
    blocks = [text[i : i + BLOCK] for i in range(0, len(text), BLOCK)]
    held_out = blocks[VALIDATION_EVERY - 1 :: VALIDATION_EVERY] or [text[math.floor(len(text) * 0.95) :]]
    kept = (
        [b for i, b in enumerate(blocks) if (i + 1) % VALIDATION_EVERY]
        if len(blocks) >= VALIDATION_EVERY
        else [text[: math.floor(len(text) * 0.95)]]
    )
    for part, chunks in (("train", kept), ("validation", held_out)):
        data = np.frombuffer(b"".join(chunks), dtype=np.uint8)
        if not len(data):
            raise ValueError("there is no text in the given files")
        temporary = folder / f"{part}.{os.getpid()}"
        data.tofile(temporary)
        temporary.rename(folder / f"{part}.bin")
    temporary = folder / f"done.{os.getpid()}"
    temporary.write_text(hashlib.sha256(text).hexdigest())
    temporary.rename(folder / "done")
