"""A sharding rule against the truth: every placement of an operator's tensors, tried with parts in plain torch.

No DTensor here, and no process group: the parts of every rank are cut, the operator's reference runs on each rank's
parts, and each result is compared with what every placement of it would have to be.
"""

from __future__ import annotations

import itertools
from typing import Any, Sequence

import torch

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED, Even, is_even
from mindspeed_fx.kernels.sharding import strategies


def parts(x: torch.Tensor, placement: Any, ranks: int) -> list[torch.Tensor] | None:
    """What each rank holds, cut as DTensor cuts; None where a rank would hold nothing."""
    if placement == REPLICATED:
        return [x] * ranks
    if placement == PARTIAL:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=x.dtype)
        return [noise] * (ranks - 1) + [x - noise * (ranks - 1)] if x.is_floating_point() else None
    pieces = x.chunk(ranks, int(placement))
    return [p.contiguous() for p in pieces] if len(pieces) == ranks and 0 not in pieces[-1].shape else None


def holds(whole: torch.Tensor, locals_: Sequence[torch.Tensor], placement: Any) -> bool:
    """Whether the ranks' results are ``whole`` under this placement."""
    if placement == PARTIAL:
        return whole.is_floating_point() and all(t.shape == whole.shape for t in locals_) and close(sum(locals_), whole)
    wanted = parts(whole, placement, len(locals_))
    return wanted is not None and all(a.shape == b.shape and close(a, b) for a, b in zip(locals_, wanted))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    tolerance = 1e-10 if a.dtype == torch.float64 else 1e-5
    return (
        torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        if a.is_floating_point()
        else torch.equal(a, b)
    )


def run(operator: Any, args: Sequence[Any], inputs: Sequence[Any], ranks: int) -> list[list[torch.Tensor]] | None:
    """Every rank's results for these placements of the tensor arguments; None where a rank cannot compute."""
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    cut = [parts(args[i], p, ranks) for i, p in zip(tensors, inputs, strict=True)]
    if any(c is None for c in cut):
        return None
    found = []
    for rank in range(ranks):
        local = list(args)
        for i, c in zip(tensors, cut):
            local[i] = c[rank]
        try:
            results = operator.overload(*local)
        except Exception:
            return None
        found.append(list(results) if isinstance(results, (tuple, list)) else [results])
    return found


UNREAD = {("mindspeed.rope_backward", 0): (1,), ("mindspeed.moe_unpermute_backward", 1): (1,)}
"""(operator, number of arguments that are None) -> tensors whose values do not matter there: x without gradients of the
angles, out, permuted without probabilities. Any placement of theirs is valid; the rules keep them beside their kin."""


def choices(x: torch.Tensor) -> list[Any]:
    return [REPLICATED, *range(x.dim())]


def wrong_ways(operator: Any, args: Sequence[Any], ranks: int) -> tuple[int, list[str]]:
    """How many of the rule's ways could be tried on these arguments, and those that give something else."""
    whole = run(operator, args, [REPLICATED] * sum(isinstance(a, torch.Tensor) for a in args), 1)[0]
    shapes = [a.shape for a in args if isinstance(a, torch.Tensor)]
    tried, wrong = 0, []
    for results, inputs in strategies(operator, args):
        if any(isinstance(p, Even) and not is_even(s, p, ranks) for s, p in zip(shapes, inputs)):
            continue
        if any(parts(a, p, ranks) is None for a, p in zip([a for a in args if isinstance(a, torch.Tensor)], inputs)):
            continue
        locals_ = run(operator, args, inputs, ranks)
        tried += 1
        if locals_ is None or not all(
            holds(w, [rank[i] for rank in locals_], p) for i, (w, p) in enumerate(zip(whole, results, strict=True))
        ):
            wrong.append(
                f"{operator.name} on {ranks} ranks, shapes {[tuple(s) for s in shapes]}: {inputs} -> {results}"
            )
    return tried, wrong


def missing_ways(operator: Any, args: Sequence[Any], ranks: int) -> set[tuple]:
    """Placements of the tensor arguments (whole or divided) that give a valid answer for some placement of the results
    and that no way of the rule takes."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    whole = run(operator, args, [REPLICATED] * len(tensors), 1)[0]
    unread = UNREAD.get((operator.name, sum(a is None for a in args)), ())
    known = {tuple(p for n, p in enumerate(i) if n not in unread) for _, i in strategies(operator, args)}
    found = set()
    for inputs in itertools.product(*([REPLICATED] if n in unread else choices(t) for n, t in enumerate(tensors))):
        if tuple(p for n, p in enumerate(inputs) if n not in unread) in known:
            continue
        locals_ = run(operator, args, inputs, ranks)
        if locals_ is None:
            continue
        if all(
            any(holds(w, [rank[i] for rank in locals_], p) for p in (*choices(w), PARTIAL)) for i, w in enumerate(whole)
        ):
            found.add(inputs)
    return found
