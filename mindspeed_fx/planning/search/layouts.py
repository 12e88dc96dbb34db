"""How the world is factored: a layout says how many ranks each mesh dimension has, and what holds for the whole
model.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Iterator

NORMS_AND_ACTIVATIONS = "norm+activation_function"
RECOMPUTE = ("none", NORMS_AND_ACTIVATIONS, "full")
"""Words of the option ``recompute``."""
ZERO = ("never", "zero2", "zero3")


@dataclass(frozen=True, order=True)
class Layout:
    """Mesh dimensions, outermost first; neighbours in ``tp`` are neighbours in the machine."""

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Parts of the batch."""
    cp: int = 1
    """Parts of the sequence."""
    ep: int = 1
    """Parts of the batch whose experts are divided instead of copied."""
    tp: int = 1
    """Ranks whose operators choose placements one by one: tensor and sequence parallelism, or anything else."""
    microbatches: int = 1
    zero: str = "never"
    recompute: str = "none"
    schedule: str = "1F1B"
    """Of a pipeline: torch's name."""
    virtual: int = 1
    """Stages on a rank."""

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.cp * self.ep * self.tp

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.pp, self.dp, self.cp, self.ep, self.tp

    def ranks_per_node(self, dim: str, node: int) -> tuple[int, int]:
        """Size of the group along ``dim``, and how many of it are in one machine. "data" are all ranks that hold a copy
        of a parameter (dp, cp, ep), "expert" those that hold a copy of an expert (dp, cp)."""
        return _ranks_per_node(self.mesh, dim, node)

    def __str__(self) -> str:
        sizes = (
            " ".join(f"{n}={getattr(self, n)}" for n in ("pp", "dp", "cp", "ep", "tp") if getattr(self, n) > 1)
            or "one device"
        )
        more = (
            [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
            + [self.zero] * (self.zero != "never")
            + [f"{self.recompute} recompute"] * (self.recompute != "none")
            + [f"{self.schedule}:{self.virtual}"] * (self.virtual > 1)
        )
        return ", ".join([sizes, *more])


@functools.lru_cache(maxsize=8192)
def _ranks_per_node(mesh: tuple[int, ...], dim: str, node: int) -> tuple[int, int]:
    pp, dp, cp, ep, tp = mesh
    inside, size = {
        "tp": (1, tp),
        "ep": (tp, ep),
        "cp": (tp * ep, cp),
        "dp": (tp * ep * cp, dp),
        "pp": (dp * cp * ep * tp, pp),
        "data": (tp, dp * cp * ep),
        "expert": (tp * ep, dp * cp),
    }[dim]
    near = max(1, min(size, node // inside))
    while size % near:
        near -= 1
    return size, near


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


PADDING = 1 / 50
"""So much may padding add to a dimension of which ranks have parts of one size; heads, which are few, stay exact."""


def shares(size: int, ranks: int, most: float = PADDING) -> bool:
    """Whether ``ranks`` can have parts of one size of ``size`` elements, with little padding."""
    return -(-size // ranks) * ranks - size <= most * size


def meshes(
    devices: int,
    batch: int,
    sequence: int,
    layers: int,
    experts: int,
    fixed: dict[str, int],
    pipeline: bool = True,
    node: int = 0,
) -> Iterator[tuple[int, ...]]:
    """(pp, dp, cp, ep, tp) with these many devices: parts of batch and sequence are even, or padded where that adds
    little (to a batch up to a half), stages have layers, and expert groups divide the experts. ``fixed`` names
    dimensions with their sizes; tp else stays inside a machine of ``node`` ranks."""

    def choices(name: str, remaining: int) -> list[int]:
        return (
            [fixed[name]]
            if name in fixed and remaining % fixed[name] == 0
            else []
            if name in fixed
            else divisors(remaining)
        )

    for tp in choices("tp", devices):
        if node and tp > node and "tp" not in fixed:
            continue
        for cp in choices("cp", devices // tp):
            if not shares(sequence, cp):
                continue
            for pp in choices("pp", devices // tp // cp):
                if pp > max(1, layers) or (pp > 1 and not pipeline and "pp" not in fixed):
                    continue
                data = devices // tp // cp // pp
                for ep in choices("ep", data):
                    dp = data // ep
                    if (
                        (ep > 1 and (not experts or experts % ep))
                        or not shares(batch, dp * ep, 1 / 2)
                        or fixed.get("dp", dp) != dp
                    ):
                        continue
                    yield pp, dp, cp, ep, tp


MOST = 16
"""How many numbers of microbatches are considered for one mesh."""


def microbatches(pp: int, batch: int) -> list[int]:
    """Numbers of microbatches to consider for ``batch`` rows of one rank: all that divide it evenly, or ``MOST`` of
    them; for a pipeline the smallest that fills it with two from twice the one before on, the first that is a multiple
    of its ranks, and the largest.
    """
    fit = divisors(batch)
    if pp == 1:
        for apart in (1.25, 1.5, 2, 4):
            if len(fit) <= MOST:
                break
            fit = _apart(divisors(batch), apart)
        return fit
    enough = _apart([m for m in fit if m >= pp] or fit[-1:], 2)
    rounds = [m for m in fit if m % pp == 0]
    return sorted({*enough[:3], *enough[3:][-1:], *rounds[:1]})


def _apart(numbers: list[int], times: float) -> list[int]:
    """The first and the last of rising ``numbers``, and of the others those that are at least so many times the one
    before.
    """
    result = numbers[:1]
    for n in numbers[1:]:
        if n >= times * result[-1]:
            result.append(n)
    return result if result[-1] == numbers[-1] else [*result, numbers[-1]]
