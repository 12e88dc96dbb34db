"""The captured graph run on DTensors: what AOTAutograd traces here is the local program of one rank.

Parameters enter as the shards that stand for the whole, inputs as this rank's part, and every operator runs on
DTensors, which insert the collectives, forward and backward; ``constrain`` calls redistribute where the plan says. The
results are whole.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import torch
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import autocast, dtensor, dynamo, even_shards, packed_shards, strided_shards, symbols, tracing
from mindspeed_fx.compat.checkpointed import planned_graph, run_checkpointed
from mindspeed_fx.compat.local_parts import leave_missing_gradients
from mindspeed_fx.errors import OptionError
from mindspeed_fx.graph.annotate import bodies
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.kernels.sharding import register_sharding_rules
from mindspeed_fx.report.source import source_line
from mindspeed_fx.sharding.between_stages import placements_between
from mindspeed_fx.sharding.constraint import constrain
from mindspeed_fx.sharding.patterns import matching
from mindspeed_fx.sharding.plan import Plan, ShardingError
from mindspeed_fx.sharding.spmd import (
    aten_rules,
    draws,
    losses,
    operators,
    packed,
    padded,
    padded_products,
    padded_rules,
    padded_views,
    results_alone,
    token_dispatch,
    vocabulary,
)
from mindspeed_fx.sharding.spmd import experts as experts_spmd
from mindspeed_fx.sharding.spmd.checkpointed_body import CheckpointedBody
from mindspeed_fx.sharding.spmd.expected_collectives import ExpectedCollectives
from mindspeed_fx.sharding.spmd.kept_whole import KeptWhole
from mindspeed_fx.sharding.spmd.parts import run_whole
from mindspeed_fx.sharding.spmd.program_inputs import Value, is_number, kept_parameter, with_numbers
from mindspeed_fx.sharding.spmd.program_key import program_key
from mindspeed_fx.sharding.spmd.redistribute import flatten, reshape, reshape_as, unflatten
from mindspeed_fx.sharding.spmd.rows_by_expert import rows_by_expert
from mindspeed_fx.sharding.spmd.static_masks import ATTENTION, known_masks

aten = torch.ops.aten


class Program(torch.nn.Module):
    """``forward(*local tensors)`` -> whole results; traced by AOTAutograd, or run as it is.

    Args:
        hands_on: results go to the next stage of a pipeline, in parts.
    """

    def __init__(
        self, graph: fx.GraphModule, plan: Plan, mesh: DeviceMesh, values: list[Value | None], hands_on: bool = False
    ):
        super().__init__()
        self.hands_on = hands_on
        register_sharding_rules()
        strided_shards.correct()
        leave_missing_gradients()
        symbols.multiply_two_at_a_time()
        symbols.price_sizes_as_traced()
        even_shards.part_even_shards_alike()
        object.__setattr__(self, "graph", graph)
        self.plan, self.mesh, self.values = plan, mesh, with_numbers(graph, values)
        self.place = ""
        """The mesh and this rank in it, as text; "" where no cache asks."""
        object.__setattr__(self, "known", known_masks(graph))
        object.__setattr__(self, "traffic", ExpectedCollectives(mesh))
        object.__setattr__(self, "kept", KeptWhole(plan.keep_whole))
        object.__setattr__(self, "results", None if hands_on else results_alone.results_of(graph))
        written = next((n for n in map(padded_rules.writes_elsewhere, (graph, *bodies(graph))) if n is not None), None)
        self.kept.pads = written is None
        for value in self.values:
            if value is not None and (reason := value.kept or kept_parameter(value, plan, mesh)):
                self.kept.note(reason)
        if written is not None and any(v is not None and self._is_uneven(v) for v in self.values):
            self.kept.note(f"{_where(written)}: {written.target} writes in place, so that nothing is padded")
        self.stages = {mesh.mesh_dim_names.index(name): stage for name, stage in plan.gather.items()}
        self.data = [dim for dim, stage in self.stages.items() if stage != "never"]

    def __reduce__(self) -> tuple:
        """Compile caches hash the pickle."""
        return str, (program_key(self.graph, self.plan, self.place, self.values),)

    def __deepcopy__(self, memo: dict) -> "Program":
        return self

    def forward(self, *local: Any) -> Any:
        if self.results is not None and tracing.collects_metadata():
            return results_alone.stand_in(self.results, local)
        traffic = ExpectedCollectives(self.mesh)
        object.__setattr__(self, "traffic", traffic)  # of the last trace
        rest = [self._at_rest(x, v) if v is not None and v.parameter else x for x, v in zip(local, self.values)]
        with self.kept.listening():
            arguments = [self._enter(x, at, v) for x, at, v in zip(local, rest, self.values, strict=True)]
        with fx.traceback.preserve_node_meta(), traffic.listening():
            results = _Planned(self.graph, self.plan, self.mesh, self.known, self.data, traffic, self.kept).run(
                *arguments
            )
        placeholders = [n for n in self.graph.graph.nodes if n.op == "placeholder"]
        traffic.read(
            self.graph,
            {
                n: (v.name, at, self.stages)
                for n, at, v in zip(placeholders, rest, self.values)
                if v is not None and v.parameter
            },
        )
        results = pytree.tree_map_only(DTensor, self._leave, pytree.tree_map(padded.whole, results))
        traffic.traced()
        return tuple(results) if isinstance(results, (tuple, list)) else results

    def _enter(self, x: Any, at_rest: Any, value: Value | None) -> Any:
        if value is None:
            return x
        if value.part:
            part = self._at_rest(x.contiguous(), value)
            return part if value.read is None else part.redistribute(placements=value.read)
        if not value.parameter:
            whole = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
            self.kept.where = f'input "{value.name}"'
            return padded.input_at(whole, value.placements, self.plan)
        result = self._parameter(x, value) if self._is_uneven(value) else at_rest
        experts = bool(matching(self.plan.experts.get("parameters", ()), value.name))
        for dim in sorted(self.data, reverse=True):  # of several that divide one dimension the inner ones first
            stage, name = self.stages[dim], self.mesh.mesh_dim_names[dim]
            own = padded.stored_of(result).placements[dim]
            if own.is_shard() and not (experts and own.is_shard(0)):
                with dtensor.annotate(stage):
                    result = padded.constrain(result, [(name, "R")])
                if stage == "zero1":
                    result = padded.constrain(result, [(name, "R")])
        return self._as_packed(result, value)

    def _parameter(self, x: torch.Tensor, value: Value) -> Any:
        """Of unequal parts, which are padded."""
        result = padded.parameter(x, self.mesh, value.placements, value.shape, f'parameter "{value.name}"')
        return result if self.kept.pads else padded.whole(result)

    def _is_uneven(self, value: Value) -> bool:
        return padded.is_uneven(value.shape, value.placements, self.mesh)

    def _at_rest(self, x: torch.Tensor, value: Value) -> DTensor:
        """Packed parts are those of a whole in the order of the ranks (:mod:`packed`)."""
        placements = [Shard(p.dim) if dtensor.is_strided(p) else p for p in value.placements]
        return DTensor.from_local(x, self.mesh, placements, run_check=False, shape=value.shape, stride=value.stride)

    def _as_packed(self, x: DTensor, value: Value) -> DTensor | packed.Packed:
        for i, p in enumerate(value.placements):
            if dtensor.is_strided(p):
                return packed.Packed(x, p.dim, packed_shards.pieces_of(p, value.shape[p.dim]), i)
        return x

    def _leave(self, x: DTensor) -> torch.Tensor:
        parts = placements_between(self.plan, self.mesh, x.shape) if self.hands_on else None
        return x.redistribute(placements=parts or [Replicate()] * self.mesh.ndim).to_local()


class _Planned(fx.Interpreter):
    """Runs a captured graph on DTensors; names the user's module and line where an operator cannot be divided."""

    def __init__(
        self,
        graph: fx.GraphModule,
        plan: Plan,
        mesh: DeviceMesh,
        known: dict[fx.Node, torch.Tensor],
        data: list[int],
        traffic: ExpectedCollectives,
        kept: KeptWhole,
    ):
        super().__init__(graph, garbage_collect_values=False)
        self.extra_traceback, self.plan, self.mesh, self.known, self.data, self.traffic = (
            False,
            plan,
            mesh,
            known,
            data,
            traffic,
        )
        self.kept = kept
        self.inner = {mesh.mesh_dim_names.index(name): ranks for name, ranks in plan.rings.items()}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self.kept.listening():
            return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self.node, self.traffic.node, self.kept.where = n, n, _where(n)
        if is_number(n):
            return super().run_node(n)
        try:
            value = pytree.tree_map_only(torch.Tensor, self._whole, super().run_node(n))
            shown = self.traffic.values[n] = pytree.tree_map(_joined, value)
            check_dtype(n, shown)
            for x in pytree.tree_leaves(shown):
                if isinstance(x, DTensor) and x.grad_fn is not None:
                    x.grad_fn.register_prehook(functools.partial(self._differentiates, n))
            return value
        except ShardingError as e:
            if "module " in str(e):
                raise
            raise ShardingError(f"{self._at(n)}: {e}") from None
        except Exception as e:
            arg = ", ".join(f"{a.name} {_shown_value(self.env.get(a))}" for a in n.all_input_nodes)
            raise ShardingError(
                f"{self._at(n)}: {n.target} cannot be computed in parts from {arg} ({_line(e)}); {REMEDY}"
            ) from e

    def _at(self, n: fx.Node) -> str:
        return f'plan "{self.plan.name}", {_where(n)}'

    def _differentiates(self, n: fx.Node, _gradients: Any) -> None:
        """The backward of ``n`` begins."""
        self.traffic.backward = f"{self._at(n)}: the gradient of {n.target}"

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor made inside the graph, such as positions or a mask, is whole on every rank."""
        return (
            x
            if isinstance(x, DTensor)
            else DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        )

    def get_attr(self, target: str, args: tuple, kwargs: dict) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, torch.Tensor):
            return value
        # a constant of the graph, as of torch.tensor(...), is real; tracing takes it as torch.tensor would make it
        return self._whole(value if isinstance(value, DTensor) else torch.ops.aten.lift_fresh_copy.default(value))

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if tracing.is_checkpoint(target):
            return self._checkpointed(args, kwargs)
        if tracing.is_autograd_function(target):
            return target(*(planned_graph(self._planned, body) for body in args[:2]), *args[2:], **kwargs)
        if target is constrain:
            return self._constrained(*args)
        if target in padded_views.VIEWS and isinstance(args[0], (DTensor, padded.Padded)):
            if (heads := padded_views.view_as_heads(self.node, args[0])) is not NotImplemented:
                return heads
        if target in padded_products.LINEAR:
            args = padded_products.with_whole_heads(self.node, target, args)
        return self._dispatched(target, args, kwargs)

    def _dispatched(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is token_dispatch.unpermute_tokens:
            return padded_products.unpermute_tokens(*args)
        if target is rows_by_expert:
            return rows_by_expert(args[0], *map(_joined, args[1:]))
        if padded.is_padded(args, kwargs):
            return padded_rules.run(self._dispatched, self.node, target, args, kwargs)
        if packed.is_packed(args, kwargs):
            return packed.run(self._dispatched, self.node, target, args, kwargs)
        if target is torch.ops.mindspeed.grouped_matmul.default and token_dispatch.uses_all_to_all(args[0]):
            return token_dispatch.grouped_matmul(*args[:2], self.plan.experts.get("capacity"))
        if target is torch.ops.mindspeed.grouped_matmul.default:
            return experts_spmd.grouped_matmul(*args, **kwargs, data=self.data)
        if self.node in self.known:
            kwargs = {**kwargs, "known": self.known[self.node]}
        if self.inner and target in ATTENTION:
            kwargs = {**kwargs, "inner": self.inner}
        return experts_spmd.with_own_rows(self._called, target, args, kwargs)

    def _planned(self, body: fx.GraphModule) -> "_Planned":
        return _Planned(body, self.plan, self.mesh, self.known, self.data, self.traffic, self.kept)

    def _checkpointed(self, args: tuple, kwargs: dict) -> Any:
        """A region that is run again in the backward: packed and padded values go in and out as DTensors."""
        again = [padded.same_padding(a) if isinstance(a, padded.Padded) else packed.same_pieces(a) for a in args[1:]]
        dims: list[Callable[[Any], Any]] = []
        planned = lambda body: CheckpointedBody(self._planned(body), again, dims)
        results = run_checkpointed(planned, tuple(_joined(a) for a in args), kwargs)
        leaves, spec = pytree.tree_flatten(results)
        return pytree.tree_unflatten([pad(x) for pad, x in zip(dims, leaves, strict=True)], spec)

    def _constrained(self, x: Any, placed: tuple[tuple[str, str], ...]) -> Any:
        if packed.is_packed(x):
            return packed.run(self._dispatched, self.node, constrain, (x, placed), {})
        users = list(self.node.users)
        keys = bool(users) and all(u.target in ATTENTION and self.node in u.args[1:3] for u in users)
        return padded.constrain(experts_spmd.whole(x), placed, keys, padded_views.parted_later(self.node))

    def _called(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if isinstance(target, torch._ops.OpOverload) and aten_rules.is_sized_by_data(args, kwargs):
            return run_whole(target, args, kwargs)
        handler = HANDLERS.get(target)
        if handler is None:
            return aten_rules.run(target, args, kwargs)
        with autocast.casts_resolved(target, self.node.meta.get("val"), args, kwargs) as (args, kwargs):
            return handler(*args, **kwargs)

    def output(self, target: str, args: tuple, kwargs: dict) -> Any:
        return pytree.tree_map(experts_spmd.whole, pytree.tree_map(packed.whole, super().output(target, args, kwargs)))


def _joined(x: Any) -> Any:
    return x.joined if isinstance(x, packed.Packed) else padded.stored_of(x)


HANDLERS: dict[Any, Callable] = {
    **losses.HANDLERS,
    aten.linear.default: operators.linear,
    **dict.fromkeys([aten.view.default, aten.reshape.default], reshape),
    **dict.fromkeys([aten.view_as.default, aten.reshape_as.default], reshape_as),
    **dict.fromkeys([aten.flatten.using_ints, aten.ravel.default], flatten),
    aten.unflatten.int: unflatten,
    torch.ops.mindspeed.rms_norm.default: operators.rms_norm,
    torch.ops.mindspeed.add_rms_norm.default: operators.add_rms_norm,
    aten.matmul.default: operators.matmul,
    **dict.fromkeys([aten.repeat.default, aten.tile.default], operators.repeat),
    aten.dropout.default: draws.dropout,
    **dict.fromkeys([aten.mean.default, aten.mean.dim], operators.mean),
    aten.topk.default: operators.locally(aten.topk.default),
    aten.embedding.default: vocabulary.embedding,
    torch.ops.mindspeed.cross_entropy.default: vocabulary.cross_entropy,
    torch.ops.mindspeed.linear_cross_entropy.default: vocabulary.linear_cross_entropy,
    torch.ops.mindspeed.attention.default: operators.attention,
    torch.ops.mindspeed.varlen_attention.default: operators.varlen_attention,
    aten.scaled_dot_product_attention.default: operators.scaled_dot_product_attention,
}
"""Operators that DTensor alone would compute wrongly divided, or only after gathering their inputs."""


REMEDY = 'keep what the module reads whole ({input: {dimension: R}} in the plan\'s "modules"), or take another plan'


@contextlib.contextmanager
def differentiating(program: Callable[[], Program | None]) -> Iterator[None]:
    """The backward of a program is traced or run within.

    Raises:
        ShardingError: an operator whose gradient cannot be computed in parts, with module and line.
    """
    try:
        yield
    except OptionError:
        raise
    except Exception as e:
        result = program()
        if result is None or not result.traffic.backward or dynamo.starts_over(e):
            raise
        raise ShardingError(f"{result.traffic.backward} cannot be computed in parts ({_line(e)}); {REMEDY}") from e


def check_dtype(node: fx.Node, value: Any) -> None:
    """Under autocast, refuse a result whose dtype is not the one that a single device computes: a cast was lost.

    Raises:
        ShardingError: with both dtypes.
    """
    expected = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return
    if value.dtype != expected.dtype and autocast.is_autocast_active(value.device.type):
        dtypes = f"{value.dtype} in parts, and {expected.dtype} on one device"
        raise ShardingError(f"{_where(node)}: {node.target} gives {dtypes}")


def _where(node: fx.Node) -> str:
    module, line = module_path(node), source_line(node)
    return f'module "{module}"' + (f", {line}" if line else "")


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _shown_value(value: Any) -> str:
    value = _joined(value)
    return f"{tuple(value.shape)} {value.placements}" if isinstance(value, DTensor) else type(value).__name__
