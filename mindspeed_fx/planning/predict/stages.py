"""Which layers a pipeline stage has, and how many microbatches of each of its chunks wait for their backward.

A rank has v chunks (virtual stages), chunk c of rank i the c p + i-th of the p v parts of the model (Narayanan et al.
2021). Under interleaved 1F1B a rank runs 2 (p - i - 1) + (v - 1) p forwards before its first backward, then one of each
in turn: p microbatches of chunk 0, p of chunk 1 and so on, the backwards from the last chunk on.

    p = 2, v = 2, 4 microbatches, rank 0: chunks   forward 0 0 1 1 0 0 1 1, backward 1 1 0 0 1 1 0 0
    before the first backward 2 (2 - 0 - 1) + (2 - 1) 2 = 4 forwards, and the fifth beside it: 3 of chunk 0, 2 of 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

from mindspeed_fx.planning.predict.architecture import Architecture
from mindspeed_fx.planning.predict.settings import Settings

PERIODS = 4
"""Groups of p microbatches after which a schedule repeats itself."""


@dataclass(frozen=True)
class Chunk:
    """Layers of one virtual stage."""

    dense: int
    moe: int
    again: int
    """How many of them are recomputed, the first ones."""

    @property
    def layers(self) -> int:
        return self.dense + self.moe


@dataclass(frozen=True)
class Stage:
    """What a rank has."""

    chunks: tuple[Chunk, ...]
    mtp: int = 0
    """Layers that predict further tokens, behind the last chunk."""

    @property
    def layers(self) -> int:
        return sum(c.layers for c in self.chunks)

    @property
    def dense(self) -> int:
        return sum(c.dense for c in self.chunks)

    @property
    def moe(self) -> int:
        return sum(c.moe for c in self.chunks)


def layout(model: Architecture, run: Settings) -> tuple[Stage, ...]:
    """The layers of every stage. Layers that the stages do not divide are one more everywhere, so that the fullest one
    is never taken for less; layers of further tokens are layers of the layout where only with them it divides.
    """
    parts = run.pp * run.vpp
    slots, mtp = model.layers + len(run.empty_layers), model.mtp_layers
    if run.pp > 1 and slots % parts and not (slots + mtp) % parts:
        slots, mtp = slots + mtp, 0
    each = -(-slots // parts)
    real, kinds = 0, []
    for slot in range(each * parts):
        kinds.append("" if slot in run.empty_layers else "dense" if real < model.dense_layers else "moe")
        real += slot not in run.empty_layers
    stages = []
    for rank in range(run.pp):
        places = [(c * run.pp + rank) * each for c in range(run.vpp)]
        chunks = _recomputed(run, [kinds[i : i + each] for i in places], bool(model.experts))
        stages.append(Stage(tuple(chunks), mtp if rank == run.pp - 1 else 0))
    return tuple(stages)


def _recomputed(run: Settings, chunks: list[list[str]], experts: bool) -> Iterator[Chunk]:
    """Chunks with their recomputed layers: the first ones of each chunk, or of the rank."""
    left = run.recompute_layers
    for kinds in chunks:
        layers = [k for k in kinds if k]
        again = 0
        if run.recompute == "full":
            again = min(len(layers), left if run.recompute_layers else len(layers))
            left -= again if run.recompute_per_rank else 0
        moe = sum(k == "moe" for k in layers) if experts else 0
        yield Chunk(len(layers) - moe, moe, again)


def is_all_warmup(run: Settings) -> bool:
    """Whether every forward runs before the first backward: Megatron-core's interleaved schedule of as many
    microbatches as stages, before version 0.9."""
    return run.forwards_first and run.vpp > 1 and run.microbatches == run.pp


def most_alive(run: Settings, rank: int, weights: list[float]) -> float:
    """The largest sum of ``weights`` over the (microbatch, chunk) pairs that wait for their backward on a rank.

    Args:
        weights: of a microbatch in each chunk.
    """
    m, p, v = run.microbatches, run.pp, run.vpp
    if v == 1:
        return min(p - rank, m) * weights[0]
    if is_all_warmup(run):
        return m * sum(weights)
    m = min(m, PERIODS * p)
    total = m * v
    # A group that is not full runs its microbatches through all chunks too.
    order = [c for first in range(0, m, p) for c in range(v) for _ in range(min(p, m - first))]
    before = min(2 * (p - rank - 1) + (v - 1) * p, total)
    alive = sum(weights[c] for c in order[:before])
    most = alive
    for forward in range(before, total):
        alive += weights[order[forward]]
        most = max(most, alive)
        alive -= weights[v - 1 - order[forward - before]]
    return most
