"""Words of sharding rules, without importing DTensor: whole, a sum over ranks, a dimension in equal parts."""

from __future__ import annotations

from typing import Any, Sequence

import torch

REPLICATED = "replicated"


PARTIAL = "partial"


class Even(int):
    """A divided dimension whose every part has the same size, a multiple of ``of``.

    For results that pair pieces of two inputs: four query heads to a key head stay together only if neither is cut
    unevenly.
    """

    of: int

    def __new__(cls, dim: int, of: int = 1) -> "Even":
        result = super().__new__(cls, dim)
        result.of = of
        return result


def _is_tensor(kind: Any) -> bool:
    return "Tensor" in str(kind)


def is_even(shape: Sequence[int], placement: Even, parts: int) -> bool:
    """Whether ``parts`` ranks have equal parts of this shape, each a multiple of ``placement.of``."""
    return shape[int(placement)] % (parts * placement.of) == 0


def first_plain_argument(overload: torch._ops.OpOverload) -> int:
    """Position of the first argument that is no tensor; the rule may depend on it and on all after it."""
    return next(
        (i for i, a in enumerate(overload._schema.arguments) if not _is_tensor(a.type)), len(overload._schema.arguments)
    )
