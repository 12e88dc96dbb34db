"""The schedule of a joint graph: sizes from fake values, views resolved to whose memory they are, times from the cost
model.

With generated code, pointwise results that only fused code reads are never in memory. What an operator of ours fills
and frees within its call is found by running it on fake values; workspaces of other libraries' calls and the
allocator's rounding are not counted, save what oneDNN's weight gradients pack.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import auto_functionalized, fake, partitioner
from mindspeed_fx.compat.memory_meter import workspace
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.graph import Estimate, estimate
from mindspeed_fx.graph import op_sets
from mindspeed_fx.graph.storage import aliased_input, is_view, read_from_memory, storage_bytes, total_bytes
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.partition.offload import dense
from mindspeed_fx.passes.lowering import onednn
from mindspeed_fx.passes.recompute.problem.dataflow import Dataflow
from mindspeed_fx.passes.recompute.problem.pointwise_costs import prices
from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem
from mindspeed_fx.training import gradient_ready


class JointGraph:
    """One training step of a joint graph.

    Args:
        info: torch's classification of the nodes.
        fused: code is generated for what is not a kernel.
        hardware: whose times count; None: operations take none.
        target: "cpu", "cuda" or "npu".

    Attributes:
        nodes: the graph's; the schedule counts them.
        schedule: the step as numbers.
        seconds: modelled time of the step when nothing is recomputed.
        unplanned: what running a node again costs where no budget presses: infinite for products with generated code.
        inputs: bytes that the forward is given.
        movable: values that can be moved to host memory, where copying takes longer than starting the copy.
    """

    def __init__(
        self, gm: fx.GraphModule, info: Any, tape: Dataflow, hardware: Hardware | None, fused: bool, target: str
    ):
        self.nodes = [n for n in gm.graph.nodes if n.op != "output"]
        number = self.number = {n: i for i, n in enumerate(self.nodes)}
        closure = partitioner.backward_nodes(info)
        output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        owners: dict[fx.Node, fx.Node] = {}
        for n in self.nodes:
            source = aliased_input(n) or _written_buffer(n)
            owners[n] = n if source is None else owners[source]
        full = [
            _size(n) if owners[n] is n and n.op == "call_function" or n.op == "placeholder" and n in closure else 0
            for n in self.nodes
        ]
        written = [
            not fused or not partitioner.is_fusible(n) or read_from_memory(n) if size else False
            for n, size in zip(self.nodes, full)
        ]
        cost = estimate(gm, hardware) if hardware else None
        again = self._again(cost)
        self.unplanned, keep = again, [0.0] * len(self.nodes)
        if fused and hardware:
            cheap, kept, _ = prices(tape)
            self.unplanned = list(again)
            for o in tape.operations:
                price = cheap(o) / hardware.memory_rate
                if price < math.inf:
                    again[number[o.node]] = price
                # What a checkpoint makes again is dear, and no choice: a cut with no finite way has no meaning.
                self.unplanned[number[o.node]] = again[number[o.node]] if partitioner.must_recompute(o.node) else price
            if target == "cpu":
                for v in tape.values:
                    keep[number[v.node]] = kept(v) / hardware.memory_rate
        traced: dict[Any, int] = {}
        self.schedule = RematProblem(
            sources=[tuple(number[a] for a in n.all_input_nodes) for n in self.nodes],
            root=[number[owners[n]] for n in self.nodes],
            size=[size if is_written else 0 for size, is_written in zip(full, written)],
            saved_bytes=full,
            seconds=again,
            savable=[self._savable(n, owners) for n in self.nodes],
            must_recompute=[partitioner.must_recompute(n) for n in self.nodes],
            is_input=[partitioner.is_input(n) for n in self.nodes],
            backward=[i for i, n in enumerate(self.nodes) if n in closure],
            needed=sorted(number[n] for n in partitioner.needed_by_backward(info)),
            returned=sorted(number[n] for n in output.all_input_nodes if n not in closure),
            gradients=sorted(number[n] for n in output.all_input_nodes),
            maker={
                i: number[n.args[0]]
                for i, n in enumerate(self.nodes)
                if n.target is operator.getitem and owners[n] is n and isinstance(n.args[0], fx.Node)
            },
            workspace=[_workspace(n, target, fused, traced) for n in self.nodes],
            save_seconds=keep,
            run_seconds=[t if a == math.inf else a for t, a in zip(self.run_seconds, again)],
        )
        runs = self.schedule.computing(self.schedule.returned)
        self.schedule.prepares = [not r for r in runs]
        self.seconds = (
            0.0 if cost is None else (Estimate(cost.calls, hardware, True, cost.sizes) if fused else cost).seconds
        )
        self.movable = [
            i
            for i, n in enumerate(self.nodes)
            if hardware
            and self.schedule.savable[i]
            and full[i] >= hardware.launch * hardware.host_bandwidth
            and dense(n.meta.get("val"))
        ]
        self.inputs = total_bytes(n.meta["val"] for n in self.nodes if partitioner.is_input(n))

    def _again(self, cost: Estimate | None) -> list[float]:
        """Modelled seconds of running each node again; infinite where it must not be."""
        spent: dict[str, float] = {}
        for row in cost.nodes if cost else ():
            name = row.name.partition("/")[0]  # a nested graph's calls count for the node that holds it
            spent[name] = spent.get(name, 0.0) + row.seconds
        self.run_seconds, results = [spent.get(n.name, 0.0) for n in self.nodes], []
        for n in self.nodes:
            runs = n.op == "call_function" and not is_view(n)
            fixed = (
                runs and not partitioner.must_recompute(n) and (partitioner.must_save(n) or not partitioner.is_pure(n))
            )
            results.append(math.inf if fixed else spent.get(n.name, 0.0))
        return results

    def _savable(self, node: fx.Node, owners: dict[fx.Node, fx.Node]) -> bool:
        value = node.meta.get("val")
        return (
            owners[node] is node
            and node.op == "call_function"
            and isinstance(value, (torch.Tensor, torch.SymInt, int, torch.SymBool, bool))
        )


def _written_buffer(node: fx.Node) -> fx.Node | None:
    """The buffer that ``node`` is what becomes of: ``lowering.main_grad``, or Inductor, writes it where it lies."""
    if node.target in op_sets.OVERWRITES:
        return node.args[0]
    if node.target is not operator.getitem or node.args[1] == 0:
        return None
    call = node.args[0]
    if str(auto_functionalized.mutable_operator(call)) not in gradient_ready.ARGUMENTS:
        return None
    bases = auto_functionalized.bases_of(call)
    return bases[node.args[1] - 1] if bases else None


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)) and not is_view(node):
        return 0  # its results are nodes of their own
    return total_bytes([value])


def _workspace(node: fx.Node, target: str, fused: bool, traced: dict[Any, int]) -> int:
    """Bytes that the kernel of ``node`` has alive at most beside its operands and results; 0 when it does not run on
    fake values.
    """
    if node.target is torch.ops.aten.mm.default and target == "cpu":
        a, b = (x.meta["val"] for x in node.args)
        return storage_bytes(b) if onednn.packs(a, b) else 0
    if node.target not in REGISTRY:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    lowering, _ = REGISTRY[node.target].choose(target, args, kwargs, codegen=fused)
    run = lowering.build if lowering else REGISTRY[node.target].reference
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    key = (
        run,
        repr([x for x in leaves if not isinstance(x, torch.Tensor)]),
        tuple(fake.layout_key(x) for x in tensors),
    )
    if key not in traced:

        def call(*args: torch.Tensor) -> Any:
            remaining = iter(args)
            a, k = pytree.tree_unflatten([next(remaining) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
            return run(*a, **k)

        try:
            traced[key] = workspace(call, tensors)
        except Exception:  # kernels that look at values choose their own buffers
            traced[key] = 0
    return traced[key]
