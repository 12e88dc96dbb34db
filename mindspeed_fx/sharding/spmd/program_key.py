"""What compile caches know a rank's program by, before it is traced: all that decides what is traced.

AOTAutograd hashes the graph that it gets, which is one call of
:class:`~mindspeed_fx.sharding.spmd.program.Program`; its pickle is this key. Two programs with one key are one program:
the captured graph with the plan's edges in it, the plan, the mesh with this rank's place, and how each input is
divided. A graph that holds something whose text says nothing of it (an object's address) has no key, and is compiled
anew.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Iterator

import torch
import torch.fx as fx

from mindspeed_fx.compat import tracing
from mindspeed_fx.compat.partitioner import checkpoint_policy
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.sharding.plan import Plan

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


def program_key(graph: fx.GraphModule, plan: Plan, place: str, values: list[Any]) -> str:
    """A text that is equal for equal programs alone, in every process.

    Args:
        graph: as it was captured, with the plan's edges.
        place: the mesh, its ranks and this one.
        values: how each input becomes a DTensor.

    Raises:
        TypeError: something of the graph cannot be told from others by its text.
    """
    if not place:
        raise TypeError("a program without a place in a mesh is in no cache")
    digest = hashlib.sha256()
    for line in (repr(plan), place, *map(repr, values), *_lines(graph)):
        if _ADDRESS.search(line):
            raise TypeError(f"no compile cache can know this program: {line[:200]}")
        digest.update(line.encode() + b"\0")
    return digest.hexdigest()


def _lines(gm: fx.GraphModule, path: str = "") -> Iterator[str]:
    """Every node, constant and inner graph of ``gm`` as text."""
    for n in gm.graph.nodes:
        yield f"{path}{n.name} {n.op} {_target(n.target)} {n.args!r} {n.kwargs!r} {module_path(n)} {_marks(n)}"
        yield " ".join(_shown(v) for v in torch.utils._pytree.tree_leaves(n.meta.get("val")))
        if n.op != "get_attr":
            continue
        value: Any = gm
        for part in str(n.target).split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):
            yield f"{path}{n.target}: {checkpoint_policy(value)!r}"
            yield from _lines(value, f"{path}{n.target}/")
        elif isinstance(value, torch.Tensor):
            yield f"{_shown(value)} {_digest(value)}"
        else:
            yield repr(value)


def _target(target: Any) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return f"{getattr(target, '__module__', '')}.{name}" if name else repr(target)


def _marks(n: fx.Node) -> str:
    """What passes and planners read of a node beside its value."""
    return repr([n.meta.get(key) for key in ("custom", "recompute", "grad_enabled", "mutated", "requires_grad")])


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    strides = tuple(value.stride()) if value.layout is torch.strided else value.layout
    return f"{value.dtype} {tuple(value.shape)} {strides} {value.device} {value.requires_grad} {value.is_conj()}"


def _digest(value: torch.Tensor) -> str:
    """Of a constant's elements.

    Raises:
        TypeError: it has none that could be read.
    """
    if tracing.is_fake(value) or value.is_meta or tracing.wraps_tensors(value):
        raise TypeError(f"a constant of shape {tuple(value.shape)} has no elements to read")
    whole = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()
