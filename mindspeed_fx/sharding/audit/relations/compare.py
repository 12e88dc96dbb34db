"""What programs are given, and their results against those of the whole program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Sequence

from mindspeed_fx.sharding.audit.relations import collectives
from mindspeed_fx.sharding.audit.relations.numbers import Numeric
from mindspeed_fx.sharding.audit.relations.parts import Part, Terms, Unproved, describe, profile


@dataclass
class Result:
    name: str
    state: str
    """"proved", "wrong" or "unknown"."""
    reason: str = ""


@dataclass(frozen=True)
class Failed:
    """No relation was shown."""

    error: Unproved


def whole_inputs(terms: Terms, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Part]:
    return [terms.fresh(("input", name), shape, [()] * len(shape), ()) for name, shape in zip(names, shapes)]


def divided(x: Part, placed: Sequence[tuple[str, int]], ranks: dict[str, int]) -> Part:
    """``x`` with dimensions shared: (mesh dimension, tensor dimension), the outer mesh dimension first."""
    dims = list(x.dims)
    for mesh, dim in placed:
        behind = max((i + 1 for i, d in enumerate(dims[dim]) if d.mesh), default=0)
        outer, rest = collectives.leading(dims[dim][behind:], ranks[mesh])
        dims[dim] = (*dims[dim][:behind], outer._replace(mesh=mesh), *rest)
    return replace(x, dims=tuple(dims))


def compare_part(name: str, part: Any, whole: Any, expected: Part | None) -> Result:
    """``part`` against what it is to be: the term of ``whole``, divided as ``expected``."""
    for x in (part, whole):
        if isinstance(x, Failed):
            return Result(name, "wrong" if x.error.wrong else "unknown", str(x.error))
    if whole is None:
        return Result(name, "proved" if part is None else "wrong", "" if part is None else "has a gradient")
    if part is None:
        return Result(name, "wrong", "has no gradient")
    if isinstance(part, Numeric) or isinstance(whole, Numeric):
        return Result(name, "unknown", "follows from integers of which no relation is known")
    if not isinstance(part, Part) or not isinstance(whole, Part):
        return Result(name, "unknown", "is rows in an order that is data")
    if part.partial:
        return Result(name, "wrong", f"is returned as {describe(part)}")
    if part.arranged != whole.arranged:
        return Result(name, "unknown", "the terms are not the same")
    wanted = whole if expected is None else expected
    if [profile(d) for d in part.dims] != [profile(d) for d in wanted.dims]:
        return Result(name, "wrong", f"is returned {describe(part)}, and is to be {describe(wanted)}")
    return Result(name, "proved")
