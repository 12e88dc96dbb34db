"""Variants of an operator's spelling, and the property that each of them must have: fused or skipped with a reason,
nothing else changed.

A spelling is a function ``f(hand, *inputs)``: it adds and multiplies with ``hand.add`` and ``hand.mul``, which exchange
the operands where the variant says so, and passes its other intermediate values through ``hand(value)``, so that any of
them can be read, returned, overwritten or cut off from the gradient.
"""

from __future__ import annotations

import contextlib
import math
import operator
from dataclasses import dataclass
from typing import Any, Callable

import torch
from hypothesis import strategies as st

from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "strided", "padded", "turned", "sliced", "every other", "expanded")
"""How an input lies in memory: as it comes; with its dimensions in reverse; as a part of longer rows; or made in the
graph: turned back from two exchanged dimensions, cut from longer rows, every other element, one row for all."""


@dataclass(frozen=True)
class Variant:
    dtype: torch.dtype = torch.float64
    eps: float = 1e-5
    swaps: int = 0
    """Bit i: the operands of the i-th sum or product are exchanged."""
    layouts: tuple[str, ...] = ("plain",)
    """One for each input, repeated where there are more inputs."""
    frozen: int = 0
    """Bit i: the i-th floating-point input needs no gradient."""
    sites: int = 1
    """2: the same weights are used twice."""
    extra: tuple[str, int] | None = None
    """("read" | "returned" | "overwritten", which of the intermediate values); overwriting only without gradients."""
    stopped: int = -1
    """Which of the intermediate values is detached; -1 for none."""
    train: bool = True
    """False: under torch.no_grad()."""
    dynamic: bool = False
    """The first dimension of what is no weight has a symbolic size."""

    @property
    def plain(self) -> bool:
        """Nobody but the site reads or cuts its values: it has to be fused."""
        return self.extra is None and self.stopped < 0


def variants(case: Case, turn: int = 0) -> st.SearchStrategy[Variant]:
    """Variants of a case; ``turn`` says which values of each dimension are the simplest, the first that are tried."""

    def one_of(*values: Any) -> st.SearchStrategy:
        return st.sampled_from([values[(i + turn) % len(values)] for i in range(len(values))])

    swaps = st.integers(0, 255).map(lambda bits: bits ^ (turn * 89 % 256))
    frozen = st.integers(0, 7).map(lambda bits: bits ^ (turn % 7))
    layouts = st.tuples(*(one_of(*case.layouts[i:], *case.layouts[:i]) for i, _ in enumerate(case.inputs)))
    kinds, places = (
        one_of(None, "read", None, "returned", None, None, "overwritten"),
        st.integers(0, 9).map(lambda i: (i + turn) % 10),
    )
    extra = st.tuples(kinds, places).map(lambda drawn: None if drawn[0] is None else drawn)
    return st.builds(
        Variant,
        one_of(*case.dtypes),
        one_of(1e-5, 1e-2, 1e-8),
        swaps,
        layouts,
        frozen,
        one_of(1, 2),
        extra,
        one_of(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3),
        one_of(True, True, True, True, False),
        one_of(False, True) if case.dynamic else st.just(False),
    )


class Hand:
    """What a spelling computes with."""

    def __init__(self, variant: Variant):
        self.variant, self.eps, self.values, self.done = variant, variant.eps, [], 0

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.values.append(value)
        return value.detach() if len(self.values) - 1 == self.variant.stopped else value

    def add(self, a: Any, b: Any) -> torch.Tensor:
        return self._both(operator.add, a, b)

    def mul(self, a: Any, b: Any) -> torch.Tensor:
        return self._both(operator.mul, a, b)

    def _both(self, f: Callable, a: Any, b: Any) -> torch.Tensor:
        self.done += 1
        return self(f(b, a) if self.variant.swaps >> (self.done - 1) & 1 else f(a, b))

    @staticmethod
    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.float() if x.dtype.itemsize == 2 else x


@dataclass(frozen=True)
class Weight:
    """A floating-point input that both sites read."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Table(Weight):
    """One that never needs a gradient."""


@dataclass(frozen=True)
class Case:
    """One spelling of one operator."""

    name: str
    """The pass."""
    spelling: Callable[..., torch.Tensor]
    inputs: tuple[Any, ...]
    """A shape, :class:`Weight`, :class:`Table`, or a function that makes a tensor of integers."""
    count: int = 1
    """Rewrites for each site."""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    layouts: tuple[str, ...] = LAYOUTS
    dynamic: bool = True
    draws: bool = False
    """It draws random numbers: results are compared with the unfused model's in its own type."""
    options: tuple[tuple[str, Any], ...] = ()
    patches: tuple[Callable[[], contextlib.AbstractContextManager], ...] = ()
    slack: float = 1.0
    """2 for masks that are no band: there ATen's flash attention makes up to three times the error of a softmax and two
    products.
    """
    reasons: tuple[str, ...] = ()
    """Reasons that may keep a plain variant unfused."""


def check(case: Case, variant: Variant) -> Report:
    """Outputs, gradients and which of them exist are those of the unfused function; the site is fused, or the report
    says why not.
    """
    torch._dynamo.reset()
    own = _run(case, variant, variant.dtype)
    exact = own if case.draws or variant.dtype == torch.float64 else _run(case, variant, torch.float64)
    options = {"codegen": "eager", **dict(case.options)}
    with contextlib.ExitStack() as stack:
        for patch in case.patches:
            stack.enter_context(patch())
        graphs = stack.enter_context(recorder.collecting())
        have = _run(
            case,
            variant,
            variant.dtype,
            lambda f: torch.compile(f, backend="mindspeed", fullgraph=True, options=options),
        )
    for i, (h, o, e) in enumerate(zip(have, own, exact, strict=True)):
        assert (h is None) == (o is None), f"a gradient appeared or disappeared: result {i}"
        if h is not None:
            assert h.dtype == o.dtype and h.shape == o.shape, (
                f"result {i} is {h.dtype} {tuple(h.shape)}, was {o.dtype} {tuple(o.shape)}"
            )
            error, allowed = _error(h, e), _allowed(case, variant, o, e)
            assert error <= allowed, f"result {i} is off by {error}, allowed {allowed}"
    report = Report(list(graphs), [])
    count, skipped = report.counts.get(case.name, 0), [s.reason for s in report.skipped(case.name)]
    if variant.plain and not any(r in s for r in case.reasons for s in skipped):
        assert count == case.count * variant.sites, f"{count} rewrites; skipped: {skipped}"
    elif variant.stopped < 0:
        assert count >= case.count or skipped, f"{count} rewrites and no reason"
    return report


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return (
        torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(math.inf).max().item()
        if a.numel()
        else 0.0
    )


def _allowed(case: Case, variant: Variant, own: torch.Tensor, exact: torch.Tensor) -> float:
    scale = max(
        (x.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() for x in (exact, own) if x.numel()), default=0.0
    )
    if variant.dtype == torch.float64:
        return 1e-10 * max(scale, 1.0) if exact.dtype == torch.float64 else 1e-5 * scale
    ulp = torch.finfo(variant.dtype).eps * max(scale, 1e-6)
    return (
        16 * ulp
        if case.draws
        else case.slack * (2 * _error(own, exact) + (2 if variant.dtype.itemsize == 2 else 8) * ulp)
    )


def _run(
    case: Case, variant: Variant, dtype: torch.dtype, compiled: Callable = lambda f: f
) -> list[torch.Tensor | None]:
    """Outputs and gradients."""
    generator = torch.Generator().manual_seed(7)
    given = [
        _input(spec, variant.layouts[i % len(variant.layouts)], generator, variant.dtype)
        for i, spec in enumerate(case.inputs)
    ]
    leaves, views = [_as(leaf, dtype) for leaf, _ in given], [view for _, view in given]
    floats = [x for x, spec in zip(leaves, case.inputs) if x.is_floating_point() and not isinstance(spec, Table)]
    for i, x in enumerate(floats):
        x.requires_grad_(not variant.frozen >> i & 1)
    if variant.dynamic:
        for spec, x in zip(case.inputs, leaves):
            if not isinstance(spec, Weight) and x.dim() and x.shape[0] > 1:
                torch._dynamo.maybe_mark_dynamic(x, 0)
    weight = [isinstance(spec, Weight) for spec in case.inputs]

    def f(*leaves):
        inputs = [view(x) for view, x in zip(views, leaves)]
        hand = Hand(variant)
        outs = [case.spelling(hand, *inputs)]
        if variant.sites == 2:
            outs.append(
                case.spelling(
                    Hand(variant), *(x if w or not x.is_floating_point() else x * 2.0 for x, w in zip(inputs, weight))
                )
            )
        if variant.extra is not None and hand.values:
            kind, which = variant.extra
            value = hand.values[which % len(hand.values)]
            outs.append(
                value
                if kind == "returned"
                else _overwrite(value)
                if kind == "overwritten" and not torch.is_grad_enabled()
                else value.cos()
            )
        return tuple(outs)

    torch.manual_seed(5)
    with torch.set_grad_enabled(variant.train):
        outs = compiled(f)(*leaves)
        wanted, asked = [o for o in outs if o.requires_grad], [x for x in floats if x.requires_grad]
        ups = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(variant.dtype).to(o.dtype) for o in wanted
        ]
        grads = torch.autograd.grad(wanted, asked, ups, allow_unused=True) if wanted and asked else ()
    return [*(o.detach().clone() for o in outs), *grads]


def _overwrite(value: torch.Tensor) -> torch.Tensor:
    return value.logical_not_() if value.dtype == torch.bool else value.mul_(2)


def _as(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return leaf.detach() if not leaf.is_floating_point() or leaf.dtype == dtype else leaf.detach().to(dtype)


def _input(spec: Any, layout: str, generator: torch.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, Callable]:
    """(what the function is given, how it gets the input from it)."""
    if callable(spec):
        return spec(generator), lambda x: x
    shape = list(spec.shape if isinstance(spec, Weight) else spec)
    make = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    *rows, width = shape
    if layout == "strided":
        return make(*shape[::-1]).permute(*range(len(shape))[::-1]), lambda x: x
    if layout == "padded":
        return make(*rows, width + 3)[..., 1 : width + 1], lambda x: x
    if layout == "turned" and rows:
        return make(*shape[:-2], width, shape[-2]), lambda x: x.transpose(-1, -2)
    if layout == "sliced":
        return make(*rows, 2 * width), lambda x: x[..., width:]
    if layout == "every other":
        return make(*rows, 2 * width), lambda x: x[..., ::2]
    if layout == "expanded" and rows and rows[-1] > 1:
        return make(*rows[:-1], 1, width), lambda x: x.expand(*x.shape[:-2], shape[-2], width)
    return make(*shape), lambda x: x
