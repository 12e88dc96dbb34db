"""One architecture: its sites, what of them is fused in one training step, and whether it still agrees."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_fx.backend import mindspeed
from mindspeed_fx.compat import dynamo
from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder
from tests.zoo.sites import CountSites

PASSES = (
    "fusion.attention",
    "fusion.rms_norm",
    "fusion.layer_norm",
    "fusion.rope",
    "fusion.swiglu",
    "fusion.glu",
    "fusion.cross_entropy",
)
ALSO = {"fusion.swiglu": ("fusion.clipped_swiglu", "fusion.selective_scan")}
"""Passes that fuse sites of another kind with something more, as a scan its gate (``weighted_swiglu`` takes what
``swiglu`` fused and counted).
"""
OPTIONS = {"codegen": "eager"}


@dataclass
class Row:
    """One architecture."""

    name: str
    graphs: int = 0
    fused: dict[str, int] = field(default_factory=dict)
    """Sites fused in the graphs that ran, counted as often as each ran: layers may share a graph."""
    sites: dict[str, int] = field(default_factory=dict)
    error: float = 0.0
    """Largest difference of a parameter's gradient, relative to its largest element or, where that is larger, to 1e-4
    of the largest element of all gradients: what is left when everything cancels is rounding."""
    narrow: float | str = ""
    """Error of the gradients in bfloat16 as a multiple of the unfused model's own, or why there is none."""
    reasons: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return all(self.fused.get(p, 0) >= self.sites.get(p, 0) for p in PASSES)


def check(name: str, model: torch.nn.Module, inputs: dict[str, Any], narrow: bool = False) -> Row:
    """Run ``name`` eager and compiled.

    Args:
        model: returns an object with a ``loss``; random weights.
        inputs: its arguments.
        narrow: also in bfloat16.
    """
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with CountSites() as counted:
        loss = model(**inputs).loss
    loss.backward()
    expected = _take_gradients(model)
    runs: list[int] = []

    def backend(gm, given):
        compiled, index = mindspeed(gm, given, options=OPTIONS), len(runs)
        runs.append(0)

        def run(*values):
            runs[index] += 1
            return compiled(*values)

        return run

    torch.manual_seed(1)  # some routers add noise
    with recorder.collecting() as graphs, dynamo.collecting_graph_breaks() as breaks:
        compiled = torch.compile(model, backend=backend)(**inputs).loss
        compiled.backward()
        graphs = list(graphs)
    report = Report(graphs, list(breaks))
    have = _take_gradients(model)
    # A result of a graph that no loss reads has a gradient of zeros in compiled code, and so has what made it.
    have = {n: g for n, g in have.items() if n in expected or g.any()}
    if have.keys() != expected.keys():
        raise AssertionError(f"gradients of {sorted(have.keys() ^ expected.keys())} appeared or disappeared")
    floor = 1e-4 * max(g.abs().max().item() for g in expected.values())
    error = max(((have[n] - g).abs().max() / g.abs().max().clamp_min(floor)).item() for n, g in expected.items())
    error = max(error, abs(compiled.item() - loss.item()) / abs(loss.item()))
    reasons = Counter(f"{p.removeprefix('fusion.')}: {s.reason}" for p in PASSES for s in report.skipped(p))
    counts = {
        p: sum(times * g.counts.get(q, 0) for g, times in zip(graphs, runs, strict=True) for q in (p, *ALSO.get(p, ())))
        for p in PASSES
    }
    texts = [f"{text} ({n} times)" if n > 1 else text for text, n in sorted(reasons.items())]
    texts += sorted({f"graph break: {str(b).split('Explanation:')[0].strip()}" for b in report.break_reasons})
    for p in PASSES:
        lost = counted.counts[p] - counts[p] - len(report.skipped(p))
        if lost > 0 and breaks:
            texts.append(
                f"{p.removeprefix('fusion.')}: {lost} in no graph (around a break Dynamo leaves code to Python)"
            )
    return Row(
        name,
        report.graph_count,
        counts,
        {p: counted.counts[p] for p in PASSES},
        error,
        in_bfloat16(model, inputs) if narrow else "",
        texts,
    )


def in_bfloat16(model: torch.nn.Module, inputs: dict[str, Any]) -> float | str:
    """Error of the fused model's gradients as a multiple of the unfused model's, both in bfloat16, against the model's
    own type with the same, rounded, parameters; a text where the unfused model does not run in bfloat16. Where it is
    more than 2 the median of three sets of parameters: one token that a router sends elsewhere decides a single one.
    ``model`` is left in bfloat16."""
    wide = next(model.parameters()).dtype
    found = [_one_in_bfloat16(model, inputs)]
    while isinstance(found[-1], float) and found[0] > 2 and len(found) < 3:
        model.to(wide)
        generator = torch.Generator().manual_seed(len(found))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * p.abs().mean() / 10)
        found.append(_one_in_bfloat16(model, inputs))
    return sorted(found)[len(found) // 2] if isinstance(found[-1], float) else found[-1]


def _one_in_bfloat16(model: torch.nn.Module, inputs: dict[str, Any]) -> float | str:
    def gradients(backend: str | None) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        torch._dynamo.reset()
        torch.manual_seed(1)
        own = next(model.parameters()).dtype
        cast = {k: v.to(own) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
        loss = (model if backend is None else torch.compile(model, backend=backend, options=OPTIONS))(**cast).loss
        loss.backward()
        # none and zeros are the same here (see `check`, which tells which may be)
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        return torch.cat([grad.double().flatten() for grad in grads])

    wide = next(model.parameters()).dtype
    model.bfloat16().to(wide)
    exact = gradients(None)
    model.bfloat16()
    try:
        unfused = (gradients(None) - exact).norm()
    except Exception as failure:  # noqa: BLE001  the model is not ours
        return f"unfused: {type(failure).__name__}"
    if not math.isfinite(unfused) or not unfused:
        return "unfused: not finite" if unfused else "unfused: no error"
    return ((gradients("mindspeed") - exact).norm() / unfused).item()


def _take_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
