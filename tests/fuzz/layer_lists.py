"""Models of layers in a list, as people write them: classes with configurations, hooks, buffers and flags.

Dynamo reads one of layers that are alike (mindspeed_fx/compat/alike_layers.py), so whatever a layer's forward depends
on may be lost: here each program is made of such dependences, its layers differ in some of them, and others change
between two steps. A program is a set of features; one that fails is made smaller by leaving features out.
"""

from __future__ import annotations

import dataclasses
import random
import textwrap
from dataclasses import dataclass

from .layer_features import FEATURES, Feature

PRELUDE = """\
import contextlib
import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

D, SCALE = 4, 0.9


@dataclasses.dataclass
class Config:
    scale: float = 0.5
    gated: bool = False
    act: type = nn.SiLU


class Pair(NamedTuple):
    hidden: torch.Tensor
    other: torch.Tensor


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, factor):
        ctx.factor = factor
        return y * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def helper(layer, y):
    return y * layer.helped
"""


LOOPS = {
    "enumerate": "for i, layer in enumerate(self.layers):",
    "range": "for i in range(len(self.layers)):\n    layer = self.layers[i]",
    "backwards": "for i, layer in enumerate(reversed(self.layers)):",
    "slice": "for i, layer in enumerate(self.layers[1:]):",
    "zip": "for i, layer in zip(range(20), self.layers):",
    "children": "for i, layer in enumerate(self.layers.children()):",
    "kept": "for i, layer in self.kept:",
}
RESULTS = {
    "tensor": ("x + 0.5 * y", "x = {}"),
    "tuple": ("x + 0.5 * y, y", "x, y = {}\nlast = last + y.mean()"),
    "list": ("[x + 0.5 * y]", "x = {}[0]"),
    "dict": ('{{"x": x + 0.5 * y, "y": y}}', 'x = {}["x"]'),
    "none": ("x + 0.5 * y, None", "x, none = {}\nlast = last if none is None else last + 1"),
    "number": ("x + 0.5 * y, 2.0", "x, number = {}\nx = x / number"),
    "named tuple": ("Pair(x + 0.5 * y, y)", "out = {}\nx, last = out.hidden, last + out.other.sum()"),
    "view": ("(x + 0.5 * y).transpose(0, 1)", "x = {}.transpose(0, 1)"),
    "part": ("(x + 0.5 * y)[..., :]", "x = {}"),
    "input": ("(x, x + 0.5 * y)", "x0, x = {}\nlast = last + x0.mean()"),
    "written": ("x + 0.5 * y", "x = {}\nx.mul_(0.9)\nx[:, 0] += 1"),
}
FRAMES = {
    "no gradient": "with torch.no_grad() if i < 3 else contextlib.nullcontext():",
    "enabled": "with torch.set_grad_enabled(i % 3 != 1):",
    "autocast": 'with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):',
    "if": "if i != 4:",
    "twice": "for _ in range(1 + (i == 2)):",
}
BEFORE = {
    "nothing": "",
    "tanh": "if i == 5:\n    x = x.tanh()",
    "contiguous": "if i == 5:\n    x = x.transpose(0, 1).contiguous().transpose(0, 1)",
    "detached": "if i == 3:\n    x = x.detach()",
    "collected": "outs.append(x)",
    "grown": "if i == 4:\n    x = torch.cat([x, x], 1)",
}


@dataclass(frozen=True)
class Program:
    """A model by what it is made of.

    Attributes:
        features: by number, in the order of the forward.
        changes: of features, each a statement, the layer that it changes, and when: before the first step (0), between
            steps (1, 2), or within the loop (-1).
        ways: loop, results, frame, before: how layers are called.
        settings: "marked", "dynamic", "half" (a batch of other sizes), "eval" and "no_grad" in the last step.
    """

    seed: int
    features: tuple[Feature, ...]
    changes: tuple[tuple[str, int, int], ...]
    loop: str = "enumerate"
    results: str = "tensor"
    frame: str | None = None
    before: str = "nothing"
    layers: int = 9
    settings: frozenset[str] = frozenset()

    def text(self) -> str:
        init, body, methods, setup = ([t for f in self.features if (t := getattr(f, k))] for k in PARTS)
        arguments = [f.argument for f in self.features if f.argument]
        arguments.sort(key=lambda pair: "=" in pair[0])
        returned, called = RESULTS[self.results]
        given = ", ".join(["x", *(self._given(*pair) for pair in arguments)])
        call = called.format(f"layer({given})")
        call = call if self.frame is None else f"{FRAMES[self.frame]}\n{_in(call)}"
        within = [f"if i == {at}:\n{_in(text)}" for text, at, when in self.changes if when < 0]
        loop, *own = LOOPS[self.loop].split("\n    ")
        mark = "@torch.compiler.nested_compile_region\n" if "marked" in self.settings else ""
        layer = "\n".join(["super().__init__()", "self.a = nn.Linear(D, D)", *init])
        forward = "\n".join(["y = self.a(x * 1.0)", *body, f"return {returned.format()}"])
        model = "\n".join([
            "super().__init__()", *setup, f"self.layers = nn.ModuleList(Layer(i, self) for i in range({self.layers}))",
            "self.kept = list(enumerate(self.layers))",
        ])  # fmt: skip
        run = "\n".join([
            "model, x, first, last, seen, outs, cache = self, x * 1.0, x, 0.0, [], [], {}",
            loop, _in("\n".join([*own, *within, *filter(None, [BEFORE[self.before]]), call])),
            "return x.square().mean() + last + sum(o.mean() for o in outs[2:4]),",
        ])  # fmt: skip
        return "\n".join([
            PRELUDE, "", "class Layer(nn.Module):", _in(f"def __init__(self, i, model):\n{_in(layer)}\n"),
            *(_in(text) for text in methods),
            _in(f"{mark}def forward({', '.join(['self', 'x', *(a for a, _ in arguments)])}):\n{_in(forward)}"), "", "",
            "class Model(nn.Module):", _in(f"def __init__(self):\n{_in(model)}\n"),
            _in(f"def forward(self, x, mask, bias):\n{_in(run)}"), "",
        ])  # fmt: skip

    def without(self, *settings: str) -> Program:
        return dataclasses.replace(self, settings=self.settings - set(settings))

    @staticmethod
    def _given(name: str, value: str) -> str:
        return f"{name.partition('=')[0]}={value}" if "=" in name else value


PARTS = ("init", "body", "methods", "setup")


def _in(text: str) -> str:
    return textwrap.indent(text, "    ")


def generate(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    features = tuple(r.sample(FEATURES, r.choice([1, 2, 3, 4, 6])))
    layers = r.choice([9, 9, 9, 10, 12])
    changes = [
        (r.choice(feature.changes), r.randrange(layers), r.choice(feature.times))
        for feature in features
        if feature.changes and r.random() < 0.6
    ]
    settings = {name for name in ("dynamic", "other sizes", "no_grad", "frozen") if r.random() < 0.12}
    return Program(
        seed,
        features,
        tuple(changes),
        loop=r.choice([*LOOPS, "enumerate", "enumerate", "enumerate"]),
        results=r.choice([*RESULTS, "tensor", "tensor", "tensor", "tensor"]),
        frame=r.choice([*FRAMES, None, None, None, None, None, None, None, None]),
        before=r.choice([*BEFORE, "nothing", "nothing", "nothing", "nothing"]),
        layers=layers,
        settings=frozenset(settings | ({"marked"} if r.random() < 0.15 else set())),
    )


def smaller(program: Program) -> list[Program]:
    """Programs with one thing less each."""
    without: list[Program] = []
    for i in range(len(program.changes)):
        without.append(dataclasses.replace(program, changes=program.changes[:i] + program.changes[i + 1 :]))
    for i, feature in enumerate(program.features):
        changes = tuple(c for c in program.changes if c[0] not in feature.changes)
        rest = program.features[:i] + program.features[i + 1 :]
        without.append(dataclasses.replace(program, features=rest, changes=changes))
    plain = dict(loop="enumerate", results="tensor", frame=None, before="nothing", layers=9)
    for name, value in plain.items():
        if getattr(program, name) != value:
            without.append(dataclasses.replace(program, **{name: value}))
    for name in sorted(program.settings):
        without.append(program.without(name))
    return without
