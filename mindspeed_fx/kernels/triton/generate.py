"""A region of pointwise operators and reductions over rows -> one Triton kernel: rows stay in registers, or in an NPU's
buffer.

Every value is float32 between its read and its write; a cast to 16 bits in the region rounds there. Regions are those
of mindspeed_fx/partition/regions.py, which this file knows only by their attributes. Triton reads a kernel's source
from a file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import pathlib
from typing import Any, Callable

import torch
import torch.fx as fx
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs, warps
from mindspeed_fx.private_files import process_folder

TILE = 4096
"""Elements that a tile of rows aims at."""

aten = torch.ops.aten
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_CALLS = {
    "neg": "-{0}",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "(1.0 / tl.sqrt({0}))",
    "reciprocal": "(1.0 / {0})",
    "abs": "tl.abs({0})",
    "sigmoid": "tl.sigmoid({0})",
    "silu": "({0} * tl.sigmoid({0}))",
    "relu": "tl.where({0} <= 0.0, 0.0, {0})",
    "erf": "tl.erf({0})",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "where": "tl.where({0}, {1}, {2})",
    "sum": "tl.sum(tl.where(mask, {0}, 0.0), axis=1)[:, None]",
    "mean": "(tl.sum(tl.where(mask, {0}, 0.0), axis=1)[:, None] / N)",
    "amax": "tl.where({nan}, float('nan'), tl.max(tl.where(mask, {0}, float('-inf')), axis=1)[:, None])".replace(
        "{nan}", "tl.max(tl.where(mask & ({0} != {0}), 1.0, 0.0), axis=1)[:, None] > 0.0"
    ),
}
"""NaN goes on, as in ATen: Triton's own maxima and minima pass it over."""
_NARROW = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
_HEAD = """import triton
import triton.language as tl


@triton.jit
def {name}({pointers}, count, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    lines = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        base = tl.cast(first, tl.int64)
        there = lines < count - first
        mask = there & (cols < N)
"""


def source(region: Any, name: str = "region") -> str:
    """The text of a file with one kernel, ``name``: pointers of the inputs, of the outputs, the number of rows; N,
    ROWS, BLOCK.

    Raises:
        NotImplementedError: the power is not 2, or an operator has no translation.
    """
    place = {
        "full": ("base * N + lines * N + cols", "mask"),
        "row": ("base + lines", "there"),
        "vector": ("cols", "cols < N"),
        "one": ("", ""),
    }
    known = {n: f"v{i}" for i, n in enumerate((*region.inputs, *region.nodes))}
    pointers = [f"in{i}_ptr" for i in range(len(region.inputs))] + [f"out{i}_ptr" for i in range(len(region.outputs))]
    lines = []
    for n, pointer in zip(region.inputs, pointers):
        at, mask = place[region.kind(n)]
        read = f"tl.load({pointer} + {at}, mask={mask}, other=0)" if at else f"tl.load({pointer})"
        lines.append(f"{known[n]} = {read}" + (" != 0" if n.meta["val"].dtype == torch.bool else ".to(tl.float32)"))
    for n in region.nodes:
        lines.append(f"{known[n]} = {_expression(n, known)}")
    for n, pointer in zip(region.outputs, pointers[len(region.inputs) :]):
        at, mask = place[region.kind(n)]
        lines.append(f"tl.store({pointer} + {at}, {known[n]}.to({pointer}.dtype.element_ty), mask={mask})")
    return _HEAD.format(name=name, pointers=", ".join(pointers)) + "".join(f"        {line}\n" for line in lines)


def _expression(node: fx.Node, known: dict[fx.Node, str]) -> str:
    operator = node.target._schema.name.split("::")[1]
    arguments = [
        known[a] if isinstance(a, fx.Node) else repr(float(a)) if isinstance(a, (int, float)) else "" for a in node.args
    ]
    if operator == "_to_copy":
        narrow = _NARROW.get(node.meta["val"].dtype)
        widened = f"{arguments[0]}.to(tl.float32)"
        return f"{widened}.to({narrow}).to(tl.float32)" if narrow else widened
    if operator == "pow":
        if node.args[1] != 2:
            raise NotImplementedError(f"a power of {node.args[1]}")
        return f"{arguments[0]} * {arguments[0]}"
    if operator in ("add", "sub") and node.kwargs.get("alpha", 1) != 1:
        return f"{arguments[0]} {_INFIX[operator]} {float(node.kwargs['alpha'])!r} * {arguments[1]}"
    if operator in _INFIX:
        return f"{arguments[0]} {_INFIX[operator]} {arguments[1]}"
    if operator not in _CALLS:
        raise NotImplementedError(f"aten.{operator}")
    return _CALLS[operator].format(*arguments)


@functools.cache
def load(text: str) -> Any:
    """The kernel of a text of :func:`source`, which is kept in a file for the process."""
    path = pathlib.Path(process_folder(), f"region_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return next(v for k, v in vars(module).items() if k not in ("triton", "tl") and hasattr(v, "arg_names"))


def run(text: str, shape: tuple[int, ...], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Start the kernel of ``text`` on rows of ``shape`` [..., width]; fills ``outputs``."""
    width = shape[-1]
    count = 1
    for n in shape[:-1]:
        count *= n
    block = power_of_two(width)
    tile = {"ROWS": max(1, TILE // block), "BLOCK": block}
    num_warps = warps(tile["ROWS"] * block)
    like = (*inputs, *outputs)[0]
    launch(
        load(text),
        programs(like, -(-count // tile["ROWS"]), num_warps, 64),
        *inputs,
        *outputs,
        count,
        num_warps=num_warps,
        N=width,
        **tile,
    )


def compiled(region: Any) -> Callable[..., tuple[Tensor, ...]]:
    """A function of the region's inputs that gives its outputs by one kernel."""
    text = source(region)
    metas = [n.meta["val"] for n in region.outputs]

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = [torch.empty(m.shape, dtype=m.dtype, device=inputs[0].device) for m in metas]
        run(text, region.shape, list(inputs), outputs)
        return tuple(outputs)

    return call
