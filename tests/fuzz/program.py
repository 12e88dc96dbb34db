"""A program as text: what it reads, its statements and what it returns."""

from __future__ import annotations

import copy
import linecache
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PRELUDE = """\
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * torch.sigmoid(y)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        s = torch.sigmoid(y)
        return grad * s, grad * x * s * (1 - s)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x.round() + y

    @staticmethod
    def backward(ctx, grad):
        return grad, grad * 0.5
"""

SETUP = """\
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
GROUP = dist.group.WORLD
"""
"""What a program with collectives needs besides."""

SIZES = ((3, 11), (5, 13), (3, 17))
"""(batch, sequence) of calls: sizes that nothing else in a program has, so that text may name them ``b`` and ``s``."""


@dataclass(frozen=True)
class Statement:
    """One line of a forward; ``name`` is what it assigns, None where it writes in place."""

    text: str
    name: str | None = None


@dataclass
class Region:
    """Statements under a context or in a function of their own; ``outs``: what later ones read of the function."""

    kind: str
    body: list[Statement | Region]
    outs: tuple[str, ...] = ()

    def lines(self, index: list[int]) -> list[str]:
        inner = [line for part in self.body for line in lines_of(part, index)] or ["pass"]
        if self.kind != "checkpoint":
            return [f"with {self.kind}:", *("    " + line for line in inner)]
        index[0] += 1
        name, outs = f"part{index[0]}", ", ".join(self.outs)
        return [
            f"def {name}():",
            *("    " + line for line in inner),
            f"    return {outs}",
            f"{outs} = checkpoint({name}, use_reentrant=False)",
        ]


def lines_of(part: Statement | Region, index: list[int]) -> list[str]:
    return [part.text] if isinstance(part, Statement) else part.lines(index)


@dataclass
class Program:
    """A module by its text. Inputs and members are expressions by name, evaluated after ``torch.manual_seed``."""

    inputs: dict[str, str] = field(default_factory=dict)
    members: dict[str, str] = field(default_factory=dict)
    body: list[Statement | Region] = field(default_factory=list)
    returns: list[str] = field(default_factory=list)
    sizes: tuple[tuple[int, int], ...] = SIZES

    def copy(self) -> Program:
        return copy.deepcopy(self)

    def text(self) -> str:
        """The source of the class ``Model`` and of ``make_inputs(b, s)``."""
        body = self.lines()
        used = "\n".join(body)
        members = [f"self.{name} = {text}" for name, text in self.members.items() if f"self.{name}" in used]
        first = next(iter(self.inputs))
        read = names_read(used + " " + " ".join(self.returns))
        inputs = {name: text for name, text in self.inputs.items() if name in read or name == first}
        source = [
            PRELUDE,
            *([SETUP] if "GROUP" in used else []),
            "",
            "class Model(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in members),
            "",
            f"    def forward({', '.join(['self', *inputs])}):",
            f"        b, s = {first}.shape[:2]",
            *(f"        {line}" for line in body),
            f"        return {', '.join(self.returns)},",
            "",
            "",
            "def make_inputs(b, s):",
            f"    return ({''.join(f'{text}, ' for text in inputs.values())})",
            "",
        ]
        return "\n".join(source)

    def lines(self) -> list[str]:
        """Of the forward."""
        index = [0]
        return [line for part in self.body for line in lines_of(part, index)]

    def live(self) -> Program:
        """The same without what nothing reads; what writes in place stays, and what it writes."""
        smaller = self.copy()
        while True:
            read = names_read(" ".join([*smaller.returns, *_reads(smaller.body)]))
            if not _prune(smaller.body, read):
                return smaller

    def count(self) -> int:
        """Statements, those inside of regions included."""
        return sum(1 if isinstance(part, Statement) else _count(part) for part in self.body)


def names_read(text: str) -> set[str]:
    return set(re.findall(r"\b[tx]\d+\b", text))


def _reads(body: list[Statement | Region]) -> list[str]:
    """What statements read, as text."""
    reads: list[str] = []
    for part in body:
        if isinstance(part, Region):
            reads += _reads(part.body)
        else:
            reads.append(part.text.partition(" = ")[2] if part.name else part.text)
    return reads


def _is_read(part: Statement | Region, read: set[str]) -> bool:
    """Whether something reads it, or it writes in place."""
    if isinstance(part, Statement):
        return part.name is None or part.name in read
    return bool(part.body) and (part.kind != "checkpoint" or bool(read.intersection(part.outs)))


def _prune(body: list[Statement | Region], read: set[str]) -> bool:
    """Whether something that nothing reads was taken away."""
    kept = [part for part in body if _is_read(part, read)]
    pruned = len(kept) < len(body)
    body[:] = kept
    for part in body:
        if isinstance(part, Region):
            pruned |= _prune(part.body, read.union(part.outs if part.kind == "checkpoint" else ()))
    return pruned


def _count(region: Region) -> int:
    return sum(1 if isinstance(part, Statement) else _count(part) for part in region.body)


def load(program: Any, name: str = "fuzzed", space: dict | None = None) -> dict:
    """The namespace of the program's text, ``space`` where that is a module's; its lines are known to tracebacks and to
    reports."""
    text, file = program.text(), f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    space = {"__name__": name} if space is None else space
    exec(compile(text, file, "exec"), space)
    return space


def build(space: dict, seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    return space["Model"]().to(dtype)


def inputs_of(space: dict, seed: int, sizes: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    tensors = space["make_inputs"](*sizes)
    return tuple(t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in tensors)


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")
