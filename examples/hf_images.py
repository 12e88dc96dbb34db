"""The images of train_hf.py: digits drawn at random places and sizes, in random gray with noise."""

from __future__ import annotations

import hashlib
import math
from argparse import Namespace
from typing import Any

import numpy as np
import torch

DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111", "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip
"""Seven rows of five dots each, as character displays have them."""


class Digits:
    """What there is to draw, in place of documents."""

    name, unit, entropy = "digits drawn at random", "image", math.log(10)

    def __init__(self) -> None:
        rows = [[[int(dot) for dot in row] for row in digit.split()] for digit in DIGITS]
        self.dots = np.array(rows, dtype=np.float32)
        self.fingerprint = hashlib.sha256(self.dots.tobytes()).hexdigest()[:16]

    def describe(self) -> str:
        return f"{self.name}: ten classes, of which chance knows {self.entropy:.3f} nats per image"


class ImageBatches(torch.utils.data.Dataset):
    """Item i is global batch i: ``pixel_values`` float32 [rows, 1, size, size], ``labels`` int64 [rows]; each is drawn
    anew, so that validation is of images never seen.
    """

    def __init__(self, args: Namespace, digits: Digits, vocabulary: Any, part: int, packed: bool):
        self.rows, self.size, self.seed, self.part, self.dots = (
            args.batch_size,
            args.image_size,
            args.seed,
            part,
            digits.dots,
        )
        self.dtype = np.float64 if args.dtype == "float64" else np.float32

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        random = np.random.default_rng([self.seed, self.part, number])
        labels = random.integers(0, 10, self.rows)
        images = random.normal(0, 0.2, (self.rows, 1, self.size, self.size))
        largest = max(self.size // 7, 1)
        for image, label in zip(images, labels, strict=True):
            digit = np.kron(self.dots[label], np.ones((random.integers((largest + 1) // 2, largest + 1),) * 2))
            top, left = (random.integers(0, self.size - n + 1) for n in digit.shape)
            image[0, top : top + digit.shape[0], left : left + digit.shape[1]] += digit * random.uniform(0.5, 1.5)
        return {"pixel_values": torch.from_numpy(images.astype(self.dtype)), "labels": torch.from_numpy(labels)}
