"""What was measured, kept in a file, and the tables of it."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from . import models
from .measure import KERNELS, OURS


class Book:
    """What was done, line by line in a file."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.done = {(row["phase"], row["name"]): row["result"] for row in map(json.loads, lines)}

    def add(self, phase: str, name: str, result: Any) -> None:
        self.done[phase, name] = result
        with self.path.open("a") as file:
            file.write(json.dumps({"phase": phase, "name": name, "result": result}) + "\n")


def print_kernels(book: Book) -> None:
    copy, product = book.done["ceilings", "copy"], book.done["ceilings", "product"]
    print(f"\ncopy {copy / 1e9:.0f} GB/s, product {product / 1e12:.0f} TFLOP/s; error: of the worst result or gradient")
    print(
        f"{'problem':<26}{'rival':<10}{'error':>9}{'fwd ms':>9}{'%':>5}{'bwd ms':>9}{'%':>5}{'both ms':>9}{'MiB':>8}"
        f"{'ours/rival':>11}"
    )
    ratios: dict[str, list[float]] = {}
    for name in KERNELS:
        errors, measured = book.done.get(("values", name), {}), book.done.get(("times", name), {})
        moved, flop = book.done.get(("work", name)) or ((0, 0), (0, 0))
        for rival, error in errors.items():
            if isinstance(error, str):
                print(f"{name:<26}{rival:<10} {error}")
            elif rival in measured:
                forward, backward, peak = (measured[rival][part] for part in ("forward", "backward", "MiB"))
                busy = (measured[rival][f"{part} busy"] for part in ("forward", "backward"))
                shares = [100 * max(m / copy, f / product) / s * 1e3 for m, f, s in zip(moved, flop, busy)]
                ratio = (
                    (measured[OURS]["forward"] + measured[OURS]["backward"]) / (forward + backward)
                    if OURS in measured
                    else math.nan
                )
                ratios.setdefault(rival, []).append(ratio)
                print(
                    f"{name:<26}{rival:<10}{error:>9.1e}{forward:>9.3f}{shares[0]:>5.0f}{backward:>9.3f}"
                    f"{shares[1]:>5.0f}{forward + backward:>9.3f}{peak:>8.0f}{ratio:>11.3f}"
                )
    print("geometric means of ours/rival:", _means(ratios))


def print_models(book: Book) -> None:
    print(f"\n{'model':<26}{'rival':<10}{'error':>9}{'ms':>9}{'busy':>9}{'MiB':>9}{'time, peak: ours/rival':>26}")
    ratios: dict[str, list[float]] = {}
    for name in models.MODELS:
        errors, measured = book.done.get(("values", name), {}), book.done.get(("times", name), {})
        own = measured.get(OURS)
        for rival, error in errors.items():
            if isinstance(error, str):
                print(f"{name:<26}{rival:<10} {error}")
            elif rival in measured:
                row = measured[rival]
                pair = (own["step"] / row["step"], own["MiB"] / row["MiB"]) if own else (math.nan, math.nan)
                ratios.setdefault(rival, []).append(pair[0])
                print(
                    f"{name:<26}{rival:<10}{error:>9.1e}{row['step']:>9.2f}{row['busy']:>9.2f}{row['MiB']:>9.0f}"
                    f"{pair[0]:>18.3f}, {pair[1]:.3f}"
                )
    print("geometric means of the time, ours/rival:", _means(ratios))


def _means(ratios: dict[str, list[float]]) -> str:
    return ", ".join(
        f"{rival} {math.exp(statistics.fmean(map(math.log, values))):.3f} ({len(values)})"
        for rival, values in ratios.items()
        if rival != OURS
    )
