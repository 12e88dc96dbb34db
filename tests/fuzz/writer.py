"""Writes a program line by line and runs each line at once, so that shapes are known and no program is broken."""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any, Iterator

import torch
from torch import nn

from .program import PRELUDE, Program, Region, Statement

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 16, 4, 2, 4, 24, 19
"""Sizes of models; none is a batch or a sequence of ``program.SIZES``."""


NEAR_MISSES = (
    ("-1", "-2"), ("mean", "sum"), (" + ", " - "), (" * ", " / "), ("0.5", "0.25"), ("True", "False"), (">=", ">"),
    ("==", "!="), (".tril()", ".tril(-1)"), ("cos", "sin"), ("eps", "0.01"), ("transpose(1, 2)", "transpose(1, -1)"),
    ("[1]", "[0]"), ("1:", ":-1"), ("pow(2)", "pow(4)"), ("silu", "gelu"), ("softmax", "log_softmax"),
    ("mT", "mT.flip(-1)"), ("1.0", "2.0"), ("sum", "amax"), ("amax", "amin"), ("sqrt", "square"), ("~", ""),
    ("< ", "> "), ("rsqrt", "sqrt"), ("F.", "torch."), ("zeros", "ones"), ("arange(s)", "arange(s - 1, -1, -1)"),
    ("-(", "+("), ("[..., :", "[..., -"), ("dim=1", "dim=2"),
)  # fmt: skip
"""Text -> text: what makes a known pattern another program that looks like it."""


class Writer:
    """``emit("torch.exp({})", x)`` adds a statement and returns the name of its value."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self.random = random.Random(seed)
        self.dtype, self.program = dtype, Program()
        self.module = nn.Module()
        self.space: dict[str, Any] = {"self": self.module}
        exec(PRELUDE, self.space)
        self.space["b"], self.space["s"] = self.b, self.s = self.program.sizes[0]
        self.mutation = self.random.choice([0.0, 0.0, 0.04, 0.12])
        """How often a line becomes one of its near misses."""
        self.number, self.body = 0, self.program.body
        self.visible: list[str] = []
        self.finest = torch.finfo(dtype).eps
        """Relative rounding error of the coarsest type that a value of the program has."""
        torch.manual_seed(seed)

    def name(self, letter: str = "t") -> str:
        self.number += 1
        return f"{letter}{self.number}"

    def value(self, name: str) -> torch.Tensor:
        return self.space[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.value(name).shape)

    def input(self, text: str) -> str:
        name = self.name("x")
        self.program.inputs[name] = text
        value = eval(text, self.space)
        self.space[name] = value.to(self.dtype).requires_grad_() if value.is_floating_point() else value
        return name

    def member(self, text: str) -> str:
        """A parameter, buffer or module of the model by its expression; returns how statements name it."""
        name = self.name("m")
        self.program.members[name] = text
        member = eval(text, self.space)
        self.module.register_module(name, member.to(self.dtype)) if isinstance(member, nn.Module) else (
            self.module.register_parameter(name, nn.Parameter(member.data.to(self.dtype), member.requires_grad))
        )
        return f"self.{name}"

    def weight(self, *shape: int) -> str:
        scale = shape[-1] ** -0.5
        return self._shared(f"nn.Parameter(torch.randn({', '.join(map(str, shape))}) * {scale:.3f})")

    def gain(self, size: int = HIDDEN) -> str:
        return self._shared(f"nn.Parameter(torch.rand({size}) + 0.5)")

    def _shared(self, text: str) -> str:
        """A parameter of its own, or now and then one of the same shape that the model has already."""
        alike = [name for name, other in self.program.members.items() if other == text]
        if alike and self.random.random() < 0.1:
            return f"self.{self.random.choice(alike)}"
        return self.member(text)

    def linear(self, x: str, size: int, bias: bool | None = None) -> str:
        """``x`` through a linear layer, in one of its spellings."""
        bias = self.random.random() < 0.3 if bias is None else bias
        width = self.shape(x)[-1]
        spelling = self.random.choice(["module", "module", "functional", "matmul", "einsum"])
        if spelling == "module":
            return self.emit("{}({})", self.member(f"nn.Linear({width}, {size}, bias={bias})"), x)
        if spelling == "functional":
            return self.emit("F.linear({}, {})", x, self.weight(size, width))
        if spelling == "matmul":
            return self.emit("{} @ {}", x, self.weight(width, size))
        return self.emit('torch.einsum("...i,oi->...o", {}, {})', x, self.weight(size, width))

    def emit(self, text: str, *operands: Any) -> str:
        name, line = self.name(), text.format(*operands)
        if self.random.random() < self.mutation:
            for near in self._near_misses(line):
                with contextlib.suppress(Exception):
                    self.run(f"{name} = {near}", name)
                    return name
        self.run(f"{name} = {line}", name)
        return name

    def _near_misses(self, line: str) -> list[str]:
        """At most two lines like it, each with one place changed."""
        places = [(m.start(), old, new) for old, new in NEAR_MISSES for m in re.finditer(re.escape(old), line)]
        self.random.shuffle(places)
        return [line[:at] + new + line[at + len(old) :] for at, old, new in places[:2]]

    def run(self, line: str, name: str | None = None) -> None:
        """Runs the line and then keeps it; raises what the line raises."""
        exec(line, self.space)
        self.body.append(Statement(line, name))
        if name is None:
            return
        value = self.space[name]
        if isinstance(value, torch.Tensor):
            self.visible.append(name)
            if value.is_floating_point() or value.is_complex():
                self.finest = max(self.finest, torch.finfo(value.dtype).eps)

    def size(self, number: int) -> str:
        """A size as text: batch and sequence by name, so that the program runs with others."""
        return {self.b: "b", self.s: "s"}.get(number, str(number))

    def sizes(self, shape) -> str:
        return ", ".join(map(self.size, shape))

    def attempt(self, block, *operands) -> Any:
        """What the block returns, or None where a line of it could not run: then none of its lines is kept."""
        kept, visible, finest = len(self.body), len(self.visible), self.finest
        try:
            return block(self, *operands)
        except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError):  # also what is not implemented
            del self.body[kept:], self.visible[visible:]
            self.finest = finest
            return None

    @contextlib.contextmanager
    def region(self, kind: str) -> Iterator[Region]:
        """Statements inside go to a region of the kind; nothing of it is kept where it raises."""
        outer, self.body = self.body, []
        region = Region(kind, self.body)
        context = contextlib.nullcontext() if kind == "checkpoint" else eval(kind, self.space)
        try:
            with context:
                yield region
            if region.body:
                outer.append(region)
        finally:
            self.body = outer

    def finite(self, name: str) -> bool:
        return self.largest(name) < 1e4

    def largest(self, name: str) -> float:
        """The largest absolute value; infinite where something is not finite."""
        value = self.value(name).detach()
        return float("inf") if not value.isfinite().all() else float(value.abs().max()) if value.numel() else 0.0
