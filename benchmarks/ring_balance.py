"""How even the work of a ring is with masks: largest over mean work per rank, beside that of zig-zag chunks.

    python -m benchmarks.ring_balance

Computed, not measured. "pairs" counts pairs of blocks that are not empty, which are computed whole; "scores" counts the
scores that the mask leaves, the measure of a kernel that skips inside of blocks. zig-zag gives rank r of n the chunks r
and 2n-1-r of 2n; "zig-zag pairs" counts its pairs in blocks as large as ours, if it left out empty ones. "moved" is the
share of blocks of keys, of all that a ring would pass on, that travel. Documents have lengths from an exponential
distribution and are causal; the worst of several draws is shown.
"""

from __future__ import annotations

import argparse
import random
from typing import Iterator

from mindspeed_fx.sharding.spmd import block_schedule


def documents(length: int, mean: int, seed: int) -> list[int]:
    """By row: the first key that it sees."""
    draw, starts = random.Random(seed), []
    while len(starts) < length:
        starts += [len(starts)] * max(1, int(draw.expovariate(1 / mean)))
    return starts[:length]


def masks(length: int, draws: int) -> Iterator[tuple[str, list[tuple[list[int], list[int]]]]]:
    """Name, and for each draw the first key of every row and one past the last."""
    rows = range(length)
    causal = [i + 1 for i in rows]
    yield "causal", [([0] * length, causal)]
    yield f"window of {length // 8}", [([max(0, i - length // 8 + 1) for i in rows], causal)]
    yield f"prefix of {length // 4}", [([0] * length, [max(i + 1, length // 4) for i in rows])]
    for mean in (length // 32, length // 8, length // 2):
        yield f"documents of about {mean}", [(documents(length, mean, seed), causal) for seed in range(draws)]


def imbalance(work: list[int]) -> float:
    return max(work) * len(work) / sum(work)


def figures(first: list[int], end: list[int], ranks: int) -> tuple[float, ...]:
    length = len(first)
    rows = length // (ranks * block_schedule.PER_RANK[-1])
    starts, ends = ([f(x[i : i + rows]) for i in range(0, length, rows)] for f, x in ((min, first), (max, end)))
    fine = tuple(
        tuple(starts[i] < (j + 1) * rows and j * rows < ends[i] for j in range(len(starts))) for i in range(len(starts))
    )
    result = block_schedule.best(fine, ranks, rows)
    need = block_schedule.coarse(fine, block_schedule.PER_RANK[-1] // result.per_rank)
    size, half = length // (ranks * result.per_rank), length // (2 * ranks)
    scores = [sum(e - f for f, e in zip(first[i : i + size], end[i : i + size])) for i in range(0, length, size)]
    zigzag = [
        [*range(r * half, (r + 1) * half), *range(length - (r + 1) * half, length - r * half)] for r in range(ranks)
    ]
    pairs = (
        [
            sum(
                sum(need[i]) * len([x for x in own[::size] if x // size == i]) for i in {x // size for x in own[::size]}
            )
            for own in zigzag
        ]
        if result.per_rank > 1
        else [1]
    )
    travels = sum(s.received for s in result.stages) * ranks / ((ranks - 1) * ranks * result.per_rank)
    return (
        result.imbalance,
        imbalance([sum(scores[i] for i in own) for own in result.queries]),
        imbalance(pairs),
        imbalance([sum(end[i] - first[i] for i in own) for own in zigzag]),
        result.per_rank,
        travels,
        result.pairs * ranks / sum(result.work),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="+", default=[32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--draws", type=int, default=8)
    args = parser.parse_args()
    print(
        f"{'length':>7s} {'ranks':>5s}  {'mask':26s} {'pairs':>6s} {'scores':>7s} {'zig-zag pairs':>14s} "
        f"{'zig-zag scores':>15s} {'blocks/rank':>12s} {'moved':>6s} {'fillers':>8s}"
    )
    for length in args.length:
        for ranks in args.ranks:
            for name, draws in masks(length, args.draws):
                results = [figures(first, end, ranks) for first, end in draws]
                pairs, scores, zigzag, zigzag_scores, _, moved, fillers = (max(x) for x in zip(*results))
                print(
                    f"{length:7d} {ranks:5d}  {name:26s} {pairs:6.3f} {scores:7.3f} {zigzag:14.3f} "
                    f"{zigzag_scores:15.3f} {results[0][4]:12.0f} {moved:6.2f} {fillers - 1:8.1%}"
                )


if __name__ == "__main__":
    main()
