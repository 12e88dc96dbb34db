"""The step modelled with other options or another batch, on fake tensors: passes and autograd run, no code is generated
and nothing is computed.

Parameters, buffers and inputs are replaced by fake ones of the same device, so that a batch that would not fit is
modelled too. What is no module keeps the tensors that it closes over, and runs on them; so does a parallelized model.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from mindspeed_fx import torch_compile
from mindspeed_fx.arguments import ArgumentError
from mindspeed_fx.backend import mindspeed
from mindspeed_fx.compat import dynamo, fake
from mindspeed_fx.compat.graph_inputs import device_of
from mindspeed_fx.errors import nearest
from mindspeed_fx.options import LEVELS, Options
from mindspeed_fx.report import progress, recorder
from mindspeed_fx.report.facts import step_totals
from mindspeed_fx.report.families import FAMILIES, active_families
from mindspeed_fx.report.records import GraphRecord
from mindspeed_fx.report.what_if import Variant, WhatIf

KINDS = ("level", "without", "batch")
BATCHES = (2, 4, 8)
"""Times the batch of the inputs, where no batch is named."""
QUIET = {"strict": False, "dump": None, "check": "off"}
"""Options of a form of the step that is only modelled."""


def model_step(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    step: Callable[..., Any],
    options: Mapping[str, Any] | None,
    batch: int | None = None,
) -> list[GraphRecord]:
    """The records of a step whose graphs are made and not run.

    Args:
        step: called with the compiled model, args and kwargs; runs forward and backward.
        batch: first dimension of the inputs instead of their own.
    """
    model = dynamo.uncompiled(model)
    target = device_of([t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])
    own = {"target": target, **(options or {}), **QUIET}
    backend = lambda gm, inputs: mindspeed(gm, inputs, options=own)  # noqa: E731
    shape = functools.partial(_with_batch, before=batch_of(args, kwargs), after=batch)
    mode: Any = contextlib.nullcontext()
    if is_parallelized(model):
        resized = lambda t: _repeated(t, shape(t))  # noqa: E731
    else:
        mode = fake.new_mode()
        resized = lambda t: fake.tensor_like(mode, t, shape(t))  # noqa: E731
    twin_args, twin_kwargs = pytree.tree_map_only(torch.Tensor, resized, (args, kwargs))
    is_copied = isinstance(model, torch.nn.Module) and not is_parallelized(model)
    twin = fake.copy_module(mode, model) if is_copied else model

    def call(*arguments: Any, **named: Any) -> Any:
        return twin(*arguments, **named)

    compiled = torch_compile.compile_with_backend(dynamo.fresh_callable(call), backend=backend)
    with dynamo.recompiling(), recorder.modelling() as graphs, torch.random.fork_rng(), mode:
        step(compiled, twin_args, twin_kwargs)
    return list(graphs)


def what_if(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    step: Callable[..., Any],
    options: Mapping[str, Any] | None,
    wanted: Sequence[str] = (),
    graphs: list[GraphRecord] | None = None,
) -> WhatIf:
    """The step as it is and in every form that is wanted.

    Args:
        wanted: "level 1", "without norms", "batch 8"; none: the other levels, without each family of rewrites that did
            something, and two, four and eight times the batch.
        graphs: records of the step as it is, where they are known.

    Raises:
        ArgumentError: a form that is none of these.
    """
    forms = [parse_form(text) for text in wanted]
    batch = batch_of(args, kwargs)
    if graphs is None:
        graphs = model_step(model, args, kwargs, step, options)
    result = WhatIf(_variant("base", str(batch), graphs), batch=batch)
    result.note = "the model is parallelized: every form ran one step on all ranks" if is_parallelized(model) else ""
    level = Options.parse(options).level
    if not forms:
        families = active_families(_counts(graphs))
        forms += [("level", str(n)) for n in LEVELS if n != level] + [("without", name) for name in families]
        forms += [("batch", str(n * batch)) for n in BATCHES if batch]
    with progress.task("what if", [f"{kind} {value}" for kind, value in forms]):
        for kind, value in forms:
            progress.enter(f"{kind} {value}")
            changed, other = _changes(kind, value, options or {})
            try:
                made_of = model_step(model, args, kwargs, step, changed, other)
                result.variants.append(_variant(kind, value, made_of))
            except Exception as error:  # the model may not take the batch, or not compile without a family
                first = next(iter(str(error).splitlines()), "")
                result.variants.append(Variant(kind, value, error=f"{type(error).__name__}: {first}"))
    return result


def parse_form(text: str) -> tuple[str, str]:
    """("level", "1") of "level 1".

    Raises:
        ArgumentError: it is no form of the step.
    """
    kind, _, value = str(text).partition(" ")
    valid = '"level N", "without FAMILY" and "batch N"'
    if kind not in KINDS:
        raise ArgumentError(f"explain: what_if has {text!r}{nearest(kind, KINDS)}; valid: {valid}")
    if kind == "without":
        if value not in FAMILIES:
            raise ArgumentError(
                f"explain: what_if has {text!r}{nearest(value, FAMILIES)}; valid: {', '.join(FAMILIES)}"
            )
    elif not value.isdigit() or (kind == "level" and int(value) not in LEVELS) or (kind == "batch" and int(value) < 1):
        numbers = ", ".join(map(str, LEVELS)) if kind == "level" else "a whole number from 1 on"
        raise ArgumentError(f"explain: what_if has {text!r}; valid for {kind}: {numbers}")
    return kind, value


def batch_of(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """First dimension of the first input that has one; 0 where none has."""
    tensors = (t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor))
    return next((int(t.shape[0]) for t in tensors if t.dim()), 0)


def is_parallelized(model: Any) -> bool:
    """Whether parameters are parts by a plan; such a model runs as it is, for its parts belong to its processes."""
    from torch.distributed.tensor import DTensor

    return isinstance(model, torch.nn.Module) and any(isinstance(p, DTensor) for p in model.parameters())


def _repeated(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` with its rows again and again, up to another batch."""
    if shape == tuple(tensor.shape):
        return tensor
    rows = torch.arange(shape[0], device=tensor.device) % tensor.shape[0]
    return tensor.detach()[rows].requires_grad_(tensor.requires_grad)


def _with_batch(tensor: torch.Tensor, before: int, after: int | None) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return (after, *shape[1:]) if after and shape and shape[0] == before else shape


def _changes(kind: str, value: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    if kind == "level":
        return {**options, "level": int(value)}, None
    if kind == "without":
        return {**options, "disable": (*options.get("disable", ()), *FAMILIES[value])}, None
    return dict(options), int(value)


def _variant(kind: str, value: str, graphs: Sequence[GraphRecord]) -> Variant:
    totals = step_totals(graphs)
    return Variant(kind, value, rewrites=sum(_counts(graphs).values()), **totals)


def _counts(graphs: Sequence[GraphRecord]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for graph in graphs:
        for name, count in graph.counts.items():
            totals[name] = totals.get(name, 0) + count
    return totals
