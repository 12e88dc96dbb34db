"""Named policies and per-module wishes: which values are recomputed, whatever a planner would say.

A policy names values that are not kept; all others are, if the backward reads them. Draws of random numbers,
collectives and whatever a ``torch.utils.checkpoint`` policy keeps are never recomputed, and regions under
``torch.utils.checkpoint`` always are.

| policy | recomputed |
|---|---|
| none | nothing |
| full | inside every numbered layer, all but what other layers read: Megatron's full, method uniform, one layer |
| block:N | the same in the first N layers: Megatron's method block |
| selective | the core of attention, from queries times keys to its output (Korthikanti et al. 2022, arXiv 2205.05198) |
| activation_function | what activations make, and pointwise work on it (MindSpeed's recompute-activation-function) |
| norm | what normalizations make, sums of residuals aside (MindSpeed's recompute-norm) |
| norm+activation_function | both; any of the last three rows may be joined |
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

import torch.fx as fx

from mindspeed_fx.compat import partitioner
from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.graph.op_sets import IDENTITIES, is_cast, is_residual_sum
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.graph.storage import is_view
from mindspeed_fx.kernels.base import TAGGED
from mindspeed_fx.passes.base import PassReport, skip
from mindspeed_fx.passes.recompute.problem.dataflow import Dataflow, Operation, Value
from mindspeed_fx.passes.recompute.problem.module_inputs import entering

ATEN_ACTIVATIONS = frozenset(
    "silu gelu relu leaky_relu sigmoid tanh elu celu selu mish hardswish hardsigmoid softplus log_sigmoid glu erf "
    "relu6".split()
)
ATEN_NORMS = frozenset("native_layer_norm native_group_norm _fused_rms_norm".split())
"""Of torch's own operators; the package's say it of themselves (``TAGS`` of :mod:`mindspeed_fx.kernels.base`)."""


@dataclass
class Fixed:
    """Decisions that no planner may change."""

    recompute: set[Value] = field(default_factory=set)
    """Not to be kept."""
    save: set[Value] = field(default_factory=set)
    """Not to be recomputed."""
    away: set[Value] = field(default_factory=set)
    """Of those, the ones to be moved to host memory."""
    why: dict[Value, str] = field(default_factory=dict)
    """Value -> the policy or glob that decided."""


def fix_by_policy(tape: Dataflow, asked: Any, strict: bool, report: PassReport) -> Fixed:
    """What option ``recompute`` says about the values of a graph; what matched, and what did not and why, goes to
    ``report``.

    Args:
        asked: the option, as :class:`mindspeed_fx.options.Options` has it.
        strict: a glob or policy that finds nothing is an error.

    Raises:
        OptionError: nothing was found, under ``strict``.
    """
    result, wishes = Fixed(), dict(asked) if not isinstance(asked, str) else {"policy": asked}
    policy = wishes.pop("policy", "auto")
    if policy not in ("auto", "none"):
        values = [v for v in _policy(tape, policy) if not v.returned]
        _note(report, f'policy "{policy}"', values, "recompute", tape, strict, _missing(policy))
        for v in values:
            result.recompute.add(v)
            result.why[v] = f"policy {policy}"
    paths = {v: module_path(v.made_by.node) for v in tape.values}
    for glob, wish in wishes.items():
        if wish == "offload_input":
            values = _inputs_of(tape, glob, report)
        else:
            matches = matcher(glob)
            values = [v for v, path in paths.items() if matches(path) and not v.returned]
        _note(
            report,
            f'"{glob}"',
            values,
            wish,
            tape,
            strict,
            f"matches no module with values of its own{nearest(glob, _generic(paths.values()))}",
        )
        for v in values:
            (result.recompute if wish == "recompute" else result.save).add(v)
            (result.save if wish == "recompute" else result.recompute).discard(v)
            (result.away.add if wish.startswith("offload") else result.away.discard)(v)
            result.why[v] = f"{glob}: {wish}"
    refused = _keep_siblings(result)
    for values, find_reason, fate in (
        (result.recompute, _recompute_refusal, "are kept"),
        (result.save, _save_refusal, "are recomputed"),
    ):
        for v in [v for v in tape.values if v in values]:
            if reason := find_reason(v):
                values.discard(v)
                result.away.discard(v)
                refused[(reason, fate, result.why.pop(v))] += 1
    for (reason, fate, who), count in refused.items():
        report.skipped.append(skip("", tape.values[0].node, f"{who}: {count} values {fate}: {reason}"))
    return result


def _keep_siblings(fixed: Fixed) -> Counter:
    """Keeps what one call makes together with something that is moved: running it again would make both.

    Returns:
        (reason, fate, who asked for the opposite) -> how many values.
    """
    refused: Counter = Counter()
    for v in [v for moved in fixed.away for v in moved.made_by.outputs if v in fixed.recompute]:
        fixed.recompute.discard(v)
        fixed.save.add(v)
        refused[("the call that makes them makes what is moved, too", "are kept", fixed.why.pop(v))] += 1
    return refused


def _inputs_of(tape: Dataflow, glob: str, report: PassReport) -> list[Value]:
    """The values to move for a glob whose wish is "offload_input"."""
    entered = entering(tape, module_of(glob))
    for path in entered.without:
        node = next(o.node for o in tape.operations if module_of(glob)(module_path(o.node)) == path)
        reason = "what enters it is an input of the graph, and whoever calls the graph holds it"
        report.skipped.append(skip("", node, f"{glob}: offload_input: {path}: {reason}"))
    for v in entered.values:
        if v.returned:
            report.skipped.append(skip("", v.node, f"{glob}: offload_input: stays: the caller gets it too"))
    return [v for v in entered.values if not v.returned]


def matcher(glob: str) -> Callable[[str], bool]:
    """Says whether a module path is, or lies within, a module that ``glob`` names; * is any part of a path between
    dots, ** any number of them. The glob may start at any module: "mlp.act" is found in "model.layers.0.mlp.act"."""
    find = module_of(glob)
    return lambda path: find(path) is not None


def module_of(glob: str) -> Callable[[str], str | None]:
    """Path -> the part of it that a glob names, see :func:`matcher`; None: none of it."""
    words = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    pattern = re.compile(
        r"(?:^|\.)"
        + "".join(words.get(part, re.escape(part)) for part in re.findall(r"\*\*|\*|\?|[^*?]+", glob))
        + r"(?:\.|$)"
    )

    def find(path: str) -> str | None:
        match = pattern.search(path)
        return None if match is None else path[: match.end()].removesuffix(".")

    return find


def _note(
    report: PassReport, who: str, values: list[Value], wish: str, tape: Dataflow, strict: bool, missing: str
) -> None:
    if values:
        report.notes.append(
            f"{who}: {wish} {len(values)} values of {sum(v.bytes for v in values) / 2**20:.2f} MiB in "
            f"{len({module_path(v.node) for v in values})} modules"
        )
        return
    if strict:
        raise OptionError(f'option "recompute": {who} {missing}')
    first = next((o.node for o in tape.operations), None)
    if first is not None:
        report.skipped.append(skip("", first, f"{who} {missing}"))


def _missing(policy: str) -> str:
    return {
        "full": "finds no numbered layers",
        "selective": "finds no product of two activations",
        "norm": "finds no normalization",
        "activation_function": "finds no activation function",
    }.get(policy, "finds no numbered layers" if "+" not in policy else "finds none of these")


def _generic(paths: Iterable[str]) -> list[str]:
    """Module paths with numbers as *."""
    return sorted({re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", p) for p in paths if p})


def _recompute_refusal(v: Value) -> str:
    node = v.made_by.node
    if partitioner.must_recompute(node):
        return ""
    if partitioner.must_save(node):
        return "a checkpoint policy, a side effect or a collective keeps them"
    if partitioner.is_random(node):
        return "random numbers are not drawn again"
    return "" if partitioner.is_pure(node) else "they are not the same when recomputed"


def _save_refusal(v: Value) -> str:
    if any(partitioner.must_recompute(n) for n in (v.node, v.made_by.node)):
        return "a checkpointed region makes them again"
    return "" if v.savable else "no backward can be handed such values"


def _policy(tape: Dataflow, policy: str) -> list[Value]:
    if policy == "full":
        return _layers(tape, None)
    if policy.startswith("block:"):
        return _layers(tape, int(policy.partition(":")[2]))
    if "+" in policy:
        named = {v for word in policy.split("+") for v in _policy(tape, word)}
        return [v for v in tape.values if v in named]
    return {"selective": _attention, "activation_function": _activations, "norm": _norms}[policy](tape)


def _layers(tape: Dataflow, first: int | None) -> list[Value]:
    """Values inside numbered layers that no operation outside their layer reads."""
    layer: dict[Operation, tuple[str, int] | None] = {}
    for o in tape.operations:
        match = re.match(r"(.*?)(?:^|\.)(\d+)(?:\.|$)", module_path(o.node))
        layer[o] = (match[1], int(match[2])) if match else None
    results = []
    for v in tape.values:
        own = layer[v.made_by]
        if own is None or first is not None and own[1] >= first:
            continue
        if all(layer[o] == own for view in v.views for o in tape.readers.get(view, ())):
            results.append(v)
    return results


def _attention(tape: Dataflow) -> list[Value]:
    """What products of two activations make, and what lies on a way from one to another without a product with a
    weight.
    """
    product = {
        o: _name(o.node).startswith("attention") or "attention" in _name(o.node) or partitioner.flops(o.node) > 0
        for o in tape.operations
    }
    core = {
        o
        for o in tape.operations
        if product[o]
        and ("attention" in _name(o.node) or len(o.inputs) > 1 and not any(_weight(a) for a in o.node.all_input_nodes))
    }
    after: set[Value] = set()
    for o in tape.operations:
        if o in core or not product[o] and any(v in after for v in o.inputs):
            after.update(o.outputs)
    before: set[Value] = set()
    for o in reversed(tape.operations):
        if o in core or not product[o] and any(v in before for v in o.outputs):
            before.update(o.inputs)
    return [v for v in tape.values if v.made_by in core or v in after and v in before]


def _weight(node: fx.Node) -> bool:
    """Views and casts of what the graph is given."""
    while (
        node.op == "call_function"
        and len(node.all_input_nodes) == 1
        and (is_view(node) or is_cast(node.target) or node.target in IDENTITIES)
    ):
        node = node.all_input_nodes[0]
    return partitioner.is_input(node)


def _activations(tape: Dataflow) -> list[Value]:
    results: set[Value] = set()
    for o in tape.operations:
        own = o.node.target in TAGGED["activation"] or _name(o.node) in ATEN_ACTIVATIONS
        more = (
            o.fusible
            and any(v in results for v in o.inputs)
            and (_name(o.node) == "mul" or all(v in results for v in o.inputs))
        )
        if own or more:
            results.update(o.outputs)
    return [v for v in tape.values if v in results]


def _norms(tape: Dataflow) -> list[Value]:
    results = []
    for v in tape.values:
        node, name = v.made_by.node, _name(v.made_by.node)
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        kind = stack[-1][1] if stack else ""
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        normalizes = node.target in TAGGED["norm"] or name in ATEN_NORMS
        if normalizes or "norm" in kind.rpartition(".")[2].lower():
            if not is_residual_sum(v.node):
                results.append(v)
    return results


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]
