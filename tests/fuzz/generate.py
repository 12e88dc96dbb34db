"""A seed -> a program and how it is compiled and run."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from . import losses
from .blocks import block, norm
from .collectives import alone
from .deep import stack
from .operators import some_operator
from .program import Program, names_read
from .writer import HIDDEN, VOCAB, Writer

ON_REQUEST = [
    f"fusion.{name}"
    for name in (
        "grouped_matmul scaled_masked_softmax router_topk linear_cross_entropy linear_cross_entropy_backward "
        "moe_permute qk_norm_rope add_rms_norm causal_conv1d dropout_add"
    ).split()
]
"""Passes that a processor does not ask for; a pattern of names is no request."""


@dataclass(frozen=True)
class Settings:
    """How a program is compiled and run."""

    dtype: str = "float64"
    options: dict[str, Any] = field(default_factory=dict)
    dynamic: bool | None = False
    grad: str = "train"
    """"train": gradients of everything; "frozen": of every second parameter and no input; "no_grad": none."""
    calls: int = 1
    """Calls with sizes of their own; of sizes that do not change, the second has other values."""

    def without(self, **changes: Any) -> Settings:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Case:
    seed: int
    program: Program
    settings: Settings
    finest: float
    """Relative rounding error of the coarsest type of the program's values."""
    layers: int = 0
    """Of a model whose layers are alike."""


def generate(seed: int, codegen: str = "eager", layers: int = 0) -> Case:
    """The case of a seed; a third are graphs of operators, the others models of blocks. With ``layers`` all are models,
    of so many layers that are alike.
    """
    settings = _settings(random.Random(f"settings {seed}"), codegen)
    if layers:
        settings = _for_layers(settings)
    w = Writer(seed, getattr(torch, settings.dtype))
    with alone():
        if layers or w.random.random() >= 0.35:
            _model(w, layers)
        else:
            _operators(w)
    return Case(seed, w.program, settings, w.finest, layers)


def _settings(r: random.Random, codegen: str) -> Settings:
    options: dict[str, Any] = {"level": r.choice([0, 1, 1, 2, 2, 2]), "codegen": codegen}
    if r.random() < 0.15:
        options["memory_budget"] = r.choice(["min", 0.3, 0.7])
    elif r.random() < 0.2:
        options["recompute"] = r.choice(["none", "auto"])
    if r.random() < 0.2:
        options["disable"] = [
            r.choice(["fusion.rms_norm", "fusion.attention", "fusion.rope", "canonicalize.*", "fusion.swiglu"])
        ]
    if r.random() < 0.25:
        options["enable"] = r.choice([ON_REQUEST, ON_REQUEST, ["fusion.*"], ["recompute.pointwise"]])
    elif r.random() < 0.08:
        options |= {"target": "cuda", "hardware": "h100", "enable": ["fusion.merged_linear"]}
    return Settings(
        dtype=r.choices(["float64", "float32", "bfloat16", "float16"], [6, 2, 1.5, 0.5])[0],
        options=options,
        dynamic=r.choices([False, True, None], [8, 1, 1])[0],
        grad=r.choices(["train", "frozen", "no_grad"], [7, 2, 1])[0],
        calls=r.choice([1, 2, 2, 3]),
    )


def _for_layers(settings: Settings) -> Settings:
    """What lets layers that are alike be captured once, and shared; every sixth seed keeps a level at which they are
    not.
    """
    own = {k: v for k, v in settings.options.items() if k not in ("memory_budget", "recompute")}
    level = 2 if own["level"] else 0
    return settings.without(options={**own, "level": level}, dynamic=False)


def _operators(w: Writer) -> None:
    for _ in range(w.random.choice([1, 2, 3])):
        w.input(w.random.choice(["torch.randn(b, s, 16)", "torch.randn(b, s, 8)", "torch.randn(b, s)"]))
    w.visible.extend(w.program.inputs)
    target = w.random.randint(3, 25)
    while w.program.count() < target:
        name = w.attempt(some_operator)
        if name is not None and not w.finite(name):
            w.visible.remove(name)
    _return(w, w.random.choice([1, 2, 3]))


def _model(w: Writer, layers: int) -> None:
    ids = w.input(f"torch.randint(0, {VOCAB}, (b, s))")
    labels = w.input(f"torch.randint(0, {VOCAB}, (b, s))")
    embedding = None
    if w.random.random() < 0.6:
        embedding = w.member(f"nn.Embedding({VOCAB}, {HIDDEN})")
        x = w.emit("{}({})", embedding, ids)
    else:
        x = w.input(f"torch.randn(b, s, {HIDDEN})")
        w.visible.append(x)
    if layers:
        x = stack(w, x, layers)
    for _ in range(0 if layers else w.random.choice([1, 1, 2, 3])):
        x = w.attempt(_placed, x) or x  # some spellings have no kernel for every type
        for _ in range(w.random.choice([0, 0, 0, 1, 2])):
            w.attempt(some_operator)
    if w.random.random() < 0.7:
        x = w.attempt(norm, x) or x
    ending = w.random.choice([losses.loss, losses.number, losses.head])
    last = w.attempt(losses.loss, x, labels, embedding) if ending is losses.loss else ending(w, x)
    last = last or losses.number(w, x)
    w.program.returns = [last]
    if w.random.random() < 0.4:
        _return(w, w.random.choice([1, 2]))


def _placed(w: Writer, x: str) -> str:
    """A block, plain or in a region: recomputed, under autocast, without gradients."""
    kind = w.random.choices(["plain", "checkpoint", "autocast", "no_grad"], [8, 2, 1, 0.5])[0]
    if kind == "plain":
        return block(w, x)
    context = {"autocast": 'torch.autocast("cpu", torch.bfloat16)', "no_grad": "torch.no_grad()"}.get(kind, kind)
    outside = list(w.visible)
    with w.region(context) as region:
        y = block(w, x)
        region.outs = (y,)
    w.visible = [*outside, y] if kind == "checkpoint" else w.visible
    return w.emit("{}.to({}.dtype)", y, x) if w.value(y).dtype != w.value(x).dtype else y


def _return(w: Writer, count: int) -> None:
    """Adds values to what is returned, those that nothing reads first."""
    read = {name for part in w.program.body for name in names_read(getattr(part, "text", "").partition("=")[2])}
    floats = [n for n in w.visible if w.value(n).is_floating_point() and n.startswith("t") and w.finite(n)]
    unread = [n for n in floats if n not in read] or floats
    w.program.returns += [n for n in w.random.sample(unread, min(count, len(unread))) if n not in w.program.returns]
    w.program.returns = w.program.returns or [w.emit("{} * 1.0", next(iter(w.program.inputs)))]
