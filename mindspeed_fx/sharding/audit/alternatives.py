"""What other plans over the same ranks would cost a layer of a model that is parallel by hand, under the cost model.

From the forward graph of one rank: the activation that its tensor parallelism sends, the weights of a layer, the
queries, keys and values of its attention, and the operators between the pairs of linear layers, which "tp" computes
whole. A training step is counted: the backward's collectives mirror the forward's, operators between take twice their
forward in it. What stays the same under every plan (products, attention) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch
import torch.fx as fx

from mindspeed_fx.cost.collectives import collective_seconds
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.graph import estimate
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.graph.storage import dense_bytes

STATES = {4: 4, 2: 8}
"""Bytes of a parameter -> how many times them it takes with its gradient and Adam's states, of 16 bits also a float32
copy.
"""
MATRIX = frozenset(("mm", "addmm", "bmm", "baddbmm", "linear", "gemm", "_mkl_linear", "linear_pointwise"))


@dataclass(frozen=True)
class Layer:
    """Bytes and seconds of the average layer, whole: of all ranks together."""

    tokens: int
    """Bytes of the activation between layers."""
    weights: int
    states: int
    """Bytes of the weights with gradients and the optimizer's states."""
    queries: int
    keys: int
    """Bytes of keys and values together."""
    between: float
    """Seconds of the forward of operators on whole activations, were they on one rank."""
    kept: int
    """Bytes of results of those operators, were they all kept."""


@dataclass(frozen=True)
class Rival:
    """A plan under the model, per layer and training step."""

    name: str
    collectives: str
    seconds: float
    """Of collectives."""
    between: float
    """Of operators between pairs of linear layers."""
    memory: float
    """Bytes of weights with their states and of activations between."""

    @property
    def total(self) -> float:
        return self.seconds + self.between


def layer_of(gm: fx.GraphModule, layers: set[str], ranks: int, divided: bool, hardware: Hardware) -> Layer | None:
    """The average of ``layers`` in a forward graph; None where it has no weights or attention that tensor parallelism
    divides.

    Args:
        ranks: of the group.
        divided: between pairs of linear layers a rank has a part of the activations (sequence parallelism).
    """
    seconds = {n.name: n.seconds for n in estimate(gm, hardware).nodes}
    inside = [n for n in gm.graph.nodes if n.op == "call_function" and _is_inside(module_path(n), layers)]
    sent = [
        n
        for n in inside
        if isinstance(n.target, torch._ops.OpOverload)
        and n.target.namespace == "_c10d_functional"
        and "wait" not in n.target._schema.name
    ]
    sizes = [_bytes(a) * (ranks if "gather" in str(n.target) else 1) for n in sent for a in n.all_input_nodes]
    attention = [
        n
        for n in inside
        if _word(n)
        in (
            "attention",
            "attention_dropout",
            "scaled_dot_product_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "varlen_attention",
        )
    ]
    weights = {a for n in inside if _word(n) in MATRIX for a in _sources(n)}
    if not sizes or not weights or not attention or not layers:
        return None
    tokens = max(set(sizes), key=sizes.count)
    q, k, v = attention[0].args[:3]  # one tensor may be two of them
    here = tokens // ranks if divided else tokens
    own = [
        n
        for n in inside
        if _bytes(n) == here and _word(n) not in MATRIX and n not in sent and n not in attention and seconds.get(n.name)
    ]
    count, whole = len(layers), ranks if divided else 1
    stored = [(_bytes(w), STATES.get(w.meta["val"].dtype.itemsize, 4)) for w in weights]
    return Layer(
        tokens,
        ranks * sum(n for n, _ in stored) // count,
        ranks * sum(n * times for n, times in stored) // count,
        ranks * _bytes(q),
        ranks * (_bytes(k) + _bytes(v)),
        whole * sum(seconds[n.name] for n in own) / count,
        whole * sum(map(_bytes, own)) // count,
    )


def alternative_plans(layer: Layer, ranks: int, hardware: Hardware) -> list[Rival]:
    """The named plans over a group of ``ranks``, best first."""

    def cost(*messages: tuple[str, float, int]) -> float:
        return sum(
            times * float(collective_seconds(kind, nbytes, ranks, hardware))
            for kind, nbytes, times in messages
            if times
        )

    state, part = layer.states, 1 / ranks
    data = (("all_gather", layer.weights, 1), ("reduce_scatter", layer.weights, 1))
    results = [
        Rival(
            "tp",
            "2 all_reduce each way",
            cost(("all_reduce", layer.tokens, 4)),
            3 * layer.between,
            state * part + layer.kept,
        ),
        Rival(
            "tp_sp",
            "2 all_gather and 2 reduce_scatter each way",
            cost(("all_gather", layer.tokens, 4), ("reduce_scatter", layer.tokens, 4)),
            3 * layer.between * part,
            (state + layer.kept) * part,
        ),
        Rival(
            "zero2+ulysses",
            "4 all_to_all each way, weights gathered, gradients scattered",
            cost(("all_to_all", layer.queries * part, 4), ("all_to_all", layer.keys * part / 2, 4), *data),
            3 * layer.between * part,
            state * part + layer.weights + layer.kept * part,
        ),
        Rival(
            "zero2+kv_allgather",
            "2 all_gather, back 2 reduce_scatter, weights gathered, gradients scattered",
            cost(("all_gather", layer.keys / 2, 2), ("reduce_scatter", layer.keys / 2, 2), *data),
            3 * layer.between * part,
            state * part + layer.weights + layer.kept * part,
        ),
        Rival(
            "zero2",
            "weights gathered, gradients scattered; needs a batch that divides",
            cost(*data),
            3 * layer.between * part,
            state * part + layer.weights + layer.kept * part,
        ),
    ]
    return sorted(results, key=lambda r: r.total)


def describe_best(name: str, results: Sequence[Rival], ranks: int, hardware: Hardware) -> list[str]:
    """Why the plan that the model has is the best over this group, or what is better and by how much."""
    own = next((r for r in results if r.name == name.split("+")[0]), None)
    if own is None:
        return []
    lines = [
        f'modelled on {ranks} x {hardware.name}, per layer and step: "{own.name}" has {_ms(own.seconds)} of '
        f"collectives, {_ms(own.between)} of norms and additions, {own.memory / 2**20:.1f} MiB of weights, states and "
        "activations between"
    ]
    best = results[0]
    lines.append(
        f'"{own.name}" is the fastest of {len(results)} plans over this group'
        if best is own
        else f'mindspeed_fx.plan would do better over this group: "{best.name}" saves {_ms(own.total - best.total)} of '
        f"{_ms(own.total)}"
    )
    for r in results:
        if r is not own:
            word = "wins" if r.total < own.total else "loses"
            lines.append(
                f'"{r.name}" {word} {_ms(abs(r.total - own.total))}: '
                f"collectives {_format_signed(r.seconds - own.seconds)}, "
                f"norms and additions {_format_signed(r.between - own.between)}, memory "
                f"{(r.memory - own.memory) / 2**20:+.1f} MiB ({r.collectives})"
            )
    return lines


def _is_inside(path: str, layers: set[str]) -> bool:
    """Whether the module of this path is one of ``layers`` or part of one."""
    while path:
        if path in layers:
            return True
        path = path.rpartition(".")[0]
    return False


def _word(node: fx.Node) -> str:
    return (
        str(node.target).removesuffix(".default").rpartition(".")[2]
        if isinstance(node.target, torch._ops.OpOverload)
        else ""
    )


def _sources(node: fx.Node) -> list[fx.Node]:
    """Parameters that a product reads, through views."""
    results = []
    for a in node.all_input_nodes:
        while a.op == "call_function" and len(a.all_input_nodes) == 1 and _bytes(a) == _bytes(a.all_input_nodes[0]):
            a = a.all_input_nodes[0]
        if (
            a.op == "placeholder"
            and isinstance(v := a.meta.get("val"), torch.Tensor)
            and v.ndim == 2
            and v.dtype.is_floating_point
        ):
            results.append(a)
    return results


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _format_signed(seconds: float) -> str:
    return f"{seconds * 1e3:+.4g} ms"


def _bytes(node: fx.Node) -> int:
    """Of the elements of one tensor; 0 for several, which are nodes of their own."""
    v = node.meta.get("val")
    return dense_bytes(v) if isinstance(v, torch.Tensor) else 0
