"""Graphs as code that a person can read: one call a line, with type and shape, under the module and the line of the
model that it comes from.
"""

from __future__ import annotations

import operator
from typing import Any, Callable

import torch
import torch.fx as fx

from mindspeed_fx.graph.provenance import origin_path
from mindspeed_fx.report.source import source_line

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
}


def readable(gm: fx.GraphModule, name: str = "graph") -> str:
    """Text of a graph and of the graphs nested in it; node names are the graph's own, so that two texts can be
    compared.
    """
    lines = [f"def {name}({', '.join(n.name for n in gm.graph.nodes if n.op == 'placeholder')}):"]
    nested, origin = [], ""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"    # {node.name}: {_type(node)}")
            continue
        if node.op == "get_attr":
            value = getattr(gm, str(node.target), None)
            if isinstance(value, fx.GraphModule):
                nested.append((node.name, value))
                continue
        here = f"[{origin_path(node)}] {source_line(node)}"
        if here not in ("[] ", origin):
            lines += ["", f"    # {here}"]
            origin = here
        lines.append("    " + _line(node))
    return "\n\n\n".join(["\n".join(lines) + "\n", *(readable(g, n) for n, g in nested)])


def remembering() -> Callable[[fx.GraphModule], str]:
    """:func:`readable` for graphs that are asked for again and again: one that nobody touched since is not written
    anew."""
    last: list[Any] = [None, [], ""]

    def text_of(gm: fx.GraphModule) -> str:
        parts = _parts(gm)
        known = last[1]
        if last[0] is not gm or len(known) != len(parts) or any(a is not b for a, b in zip(known, parts)):
            last[:] = [gm, parts, readable(gm)]
        return last[2]

    return text_of


def _parts(gm: fx.GraphModule) -> list[Any]:
    """What the text is written from, of nested graphs too: the very same objects as long as nobody touches them."""
    parts: list[Any] = []
    for node in gm.graph.nodes:
        parts += (node, node.name, node.target, node.args, node.kwargs, node.meta.get("val"))
        if node.op == "get_attr" and isinstance(nested := getattr(gm, str(node.target), None), fx.GraphModule):
            parts += (nested, *_parts(nested))
    return parts


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if node.op == "get_attr":
        return f"{node.name}: {_type(node)} = self.{node.target}"
    if node.target is operator.getitem:
        return f"{node.name}: {_type(node)} = {_text(node.args[0])}[{_text(node.args[1])}]"
    arguments = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{node.name}: {_type(node)} = {arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    return f"{node.name}: {_type(node)} = {_target(node.target)}({', '.join(arguments)})"


def _target(target: Any) -> str:
    text = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    return text.removesuffix(".default")


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def _type(node: fx.Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        return f'"{_SHORT.get(value.dtype, str(value.dtype))}[{", ".join(map(str, value.shape))}]"'
    if isinstance(value, (list, tuple)):
        return f'"{len(value)} values"'
    return f'"{type(value).__name__}"'
