"""Private and moving APIs of ``torch.distributed.tensor``, one name each: part of :mod:`mindspeed_fx.compat`.

Importing this module imports DTensor (about half a second); only sharding does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
from typing import Any, Callable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mindspeed_fx.compat import tracing
from mindspeed_fx.compat.fake import hint, is_fake
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED, Even, first_plain_argument, is_even


def placement(way: Any) -> Placement:
    """A placement of :mod:`mindspeed_fx.kernels.sharding` as DTensor's."""
    return {REPLICATED: Replicate(), PARTIAL: Partial()}[way] if isinstance(way, str) else Shard(int(way))


def shard(dim: int, pieces: int = 1) -> Placement:
    """A part of dimension ``dim``, or of each of so many ``pieces`` of it."""
    return Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)


def is_strided(way: Placement) -> bool:
    """True for a part that is several pieces of its dimension: what a divided dimension becomes where it is flattened
    behind another.
    """
    return isinstance(way, _StridedShard)


def is_divided(way: Placement, dim: int | None = None) -> bool:
    """True for a part, of dimension ``dim`` if given, in one piece or several; ``Placement.is_shard`` knows only those
    in one.
    """
    return (way.is_shard() or is_strided(way)) and dim in (None, way.dim)


def along_dimension(way: Placement, dim: int) -> Placement:
    """The divided placement ``way`` with another dimension, in as many pieces."""
    return _StridedShard(dim, split_factor=way.split_factor) if is_strided(way) else Shard(dim)


@contextlib.contextmanager
def plain_tensors_as_replicated() -> Iterator[None]:
    """Within, a plain tensor beside DTensors is a replicated one, for every operator, forward and backward. Autograd's
    own formulas make such tensors (zeros for a part of a split that has no gradient), of the whole size. As
    ``implicit_replication`` of torch, which cannot be nested."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def local_tensor_mode() -> Any:
    """The mode in which this process is every rank; None outside of it."""
    from torch.distributed._local_tensor import local_tensor_mode

    return local_tensor_mode()


def register_strategies(
    overload: torch._ops.OpOverload, rule: Callable[[Sequence[Any], dict], list[tuple[list, list]]]
) -> None:
    """Register a sharding rule with DTensor.

    ``torch.distributed.tensor.experimental.register_sharding`` does this too, but caches a rule by tensors and integers
    alone, so that a call with other flags would get the first call's answer, and cannot ask for even parts. A sum over
    ranks that is not yet made is scattered evenly or made whole: nobody knows the padding of uneven parts of it.

    Args:
        rule: called with the operator's arguments, tensors as DTensor specs; returns (results, tensor arguments) rows.
    """
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy as expand

    named = inspect.signature(expand).parameters
    only = "is_valid_strategy_cb" if "is_valid_strategy_cb" in named else "full_mesh_strategy_filter"  # from torch 2.14

    def spec(value: Any) -> Any:
        return value.strategies[0].output_spec if isinstance(value, OpStrategy) else value

    def strategy(schema: OpSchema) -> OpStrategy:
        rows = rule([spec(a) for a in schema.args_schema], {k: spec(v) for k, v in schema.kwargs_schema.items()})
        even = {(i, int(p)): p for _, inputs in rows for i, p in enumerate(inputs) if isinstance(p, Even)}

        tensors = schema.args_strategy + schema.kwargs_strategy

        def allowed(inputs: list, _outputs: Any) -> bool:
            return all(
                _even(x, even.get((i, p.dim), Even(p.dim) if own.is_partial() else None))
                for i, (x, arg) in enumerate(zip(inputs, tensors))
                for p, own in zip(x.placements, arg.strategies[0].output_spec.placements)
                if isinstance(p, Shard)
            )

        placements, results = _dtensor_placements(rows, schema), len(overload._schema.returns)
        return expand(schema.get_mesh_from_args(), schema, placements, input_index=results, **{only: allowed})

    info = RuntimeSchemaInfo(first_plain_argument(overload), needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(overload, strategy, info)


def _dtensor_placements(rows: list[tuple[list, list]], schema: Any) -> list[list[Placement]]:
    """Ways as DTensor placements, those by strided shards first: a batch and its divided sequence, flattened, leave
    each rank some of the rows, and a way by rows does not ask which. DTensor thinks that gathering strided shards is
    free (2.13), and takes the first of what is free."""
    strided = []
    for results, inputs in rows:
        for arg, p in zip(schema.args_strategy + schema.kwargs_strategy, inputs):
            for own in arg.strategies[0].output_spec.placements:
                if is_strided(own) and p == own.dim and not any(isinstance(q, Even) for q in results + inputs):
                    strided.append(
                        [
                            placement(q) if isinstance(q, str) else _StridedShard(int(q), split_factor=own.split_factor)
                            for q in results + inputs
                        ]
                    )
    return strided + [[placement(p) for p in results + inputs] for results, inputs in rows]


def _even(spec: Any, placement: Even | None) -> bool:
    if placement is None:
        return True
    parts = 1
    for size, p in zip(spec.mesh.shape, spec.placements):
        parts *= size if isinstance(p, Shard) and p.dim == int(placement) else 1
    return is_even(spec.shape, placement, parts)


def local_part(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself that ``x`` holds of this rank; ``to_local()`` of a parameter is another since torch 2.13."""
    return x._local_tensor if isinstance(x, DTensor) else x


def as_parts_of(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as this rank's part of a tensor that is divided as ``like`` is; itself where ``like`` is no DTensor."""
    if not isinstance(like, DTensor) or isinstance(local, DTensor):
        return local
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def local_numel(x: DTensor) -> int:
    """Elements of this rank's part, of symbolic sizes as many as it was traced with, without a guard; asked of
    ``to_local()``, a trace would have a node for it."""
    local = x._local_tensor
    one = next(iter(local._local_tensors.values())) if hasattr(local, "_local_tensors") else local
    return hint(one.numel())


def whole_of(x: DTensor) -> torch.Tensor:
    """``x.full_tensor()``; of a fake one, whose elements nobody gathers, a tensor of that shape."""
    local = x._local_tensor
    if not is_fake(local) or not x.is_contiguous() or any(not isinstance(n, int) for n in x.shape):
        return x.full_tensor()
    result = local.new_empty(x.shape).requires_grad_(x.requires_grad and torch.is_grad_enabled())
    return result.view_as(result)  # with a gradient function, as what is gathered has


def has_dtensor(types: Any) -> bool:
    """Whether a dispatch is of DTensors, and so not yet of local ones."""
    return any(t is DTensor for t in types)


def annotate(word: str) -> Any:
    """Context in which nodes that are traced bear ``word`` in ``meta["custom"]["mindspeed_fx"]``; nothing where torch
    cannot.
    """
    mark = getattr(torch.fx.traceback, "annotate", None)
    return mark({"mindspeed_fx": word}) if mark is not None else contextlib.nullcontext()


def as_graph(module: torch.nn.Module, like: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph that calls ``module``, with the number of inputs and the form of the results of ``like``."""
    graph = torch.fx.Graph()
    inputs = sum(n.op == "placeholder" for n in like.graph.nodes)
    result = graph.call_module("program", tuple(graph.placeholder(f"input_{i}") for i in range(inputs)))
    outputs = next(n for n in like.graph.nodes if n.op == "output").args[0]
    # Inductor wants to see that a tuple is returned.
    graph.output(
        tuple(graph.call_function(operator.getitem, (result, i)) for i in range(len(outputs)))
        if isinstance(outputs, (tuple, list))
        else result
    )
    return torch.fx.GraphModule({"program": module}, graph)


@contextlib.contextmanager
def all_ranks(sizes: dict[str, int]) -> Iterator[Any]:
    """A mesh of which this process is every rank: tensors made within hold one part per rank (LocalTensorMode).

    Raises:
        RuntimeError: a process group exists already.
    """
    import math

    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("all ranks in one process need a process group of their own, and one exists already")
    ranks, hook = math.prod(sizes.values()), sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with LocalTensorMode(ranks):
            yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # a group puts "[rank0]: " before the lines of every later error, and leaves it there


@contextlib.contextmanager
def one_of_fake_ranks(sizes: dict[str, int]) -> Iterator[Any]:
    """A mesh of which this process is the first rank and no other exists: collectives send nothing.

    Raises:
        RuntimeError: a process group exists already.
    """
    import math

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("fake ranks need a process group of their own, and one exists already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes.values()))
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def placed_at(mesh: Any, coordinate: Sequence[int]) -> Iterator[None]:
    """This process is the rank at ``coordinate`` of a mesh of :func:`one_of_fake_ranks`. What DTensor keeps of its
    operators holds the mesh, so that it is one mesh for all ranks."""
    names = list(mesh.mesh_dim_names)

    def get_local_rank(dim: int | str | None = None) -> int:
        return coordinate[names.index(dim) if isinstance(dim, str) else dim or 0]

    from torch.distributed.tensor import debug

    if not any(coordinate):  # a mesh of these sizes that was before may be kept there too
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    before = mesh._coordinate_on_dim
    mesh._coordinate_on_dim, mesh.get_local_rank = tuple(coordinate), get_local_rank
    try:
        yield
    finally:
        mesh._coordinate_on_dim = before
        del mesh.get_local_rank


def on_every_rank(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the tensor that every rank holds, each in memory of its own: what one writes in place no other sees."""
    from torch.distributed._local_tensor import LocalTensor, local_tensor_mode

    return LocalTensor({rank: x if x.requires_grad else x.clone() for rank in local_tensor_mode().ranks})


def by_coordinate(mesh: Any, dim: int, value: Callable[[int], int]) -> Any:
    """``value(place along mesh dimension dim)``: an integer, or under LocalTensorMode one that has a value for every
    rank.
    """
    from torch.distributed._local_tensor import LocalIntNode, local_tensor_mode

    if local_tensor_mode() is None:
        # get_local_rank asks the group by its name, which after a destroyed group of that name is the old one's
        return value(mesh.get_coordinate()[dim])
    values = {rank: value(place) for rank, place in _places(mesh, dim).items()}
    return torch.SymInt(LocalIntNode(values)) if len(set(values.values())) > 1 else next(iter(values.values()))


def entry_by_coordinate(mesh: Any, dim: int, table: Sequence[Any], device: torch.device) -> torch.Tensor:
    """``table[place along mesh dimension dim]`` as a tensor. The whole table is part of a traced graph, so that those
    of all ranks differ in one number."""
    from torch.distributed._local_tensor import LocalTensor, local_tensor_mode

    if local_tensor_mode() is None:
        return torch.tensor(table, device=device).narrow(0, mesh.get_coordinate()[dim], 1).squeeze(0)
    return LocalTensor({rank: torch.tensor(table[place], device=device) for rank, place in _places(mesh, dim).items()})


@functools.lru_cache(maxsize=32)
def _places(mesh: Any, dim: int) -> dict[int, int]:
    """Rank -> place along a mesh dimension; kept, since under LocalTensorMode each read of a mesh takes 40 ms."""
    return {
        int(rank): place for place, plane in enumerate(mesh.mesh.movedim(dim, 0)) for rank in plane.flatten().tolist()
    }


def all_to_all(x: torch.Tensor, receives: list[int], messages: list[int], mesh: Any, dim: int) -> torch.Tensor:
    """Rows of ``x`` to the ranks along mesh dimension ``dim``; to be :func:`wait_for` for."""
    return torch.ops._c10d_functional.all_to_all_single(
        x.contiguous(), receives, messages, mesh.get_group(dim).group_name
    )


def all_to_all_by_counts(
    x: torch.Tensor, messages: torch.Tensor, receives: torch.Tensor, size: int, mesh: Any, dim: int
) -> torch.Tensor:
    """Rows of ``x`` to the ranks along mesh dimension ``dim``, as many as ``messages`` and ``receives`` [ranks] say
    when the program runs; [size, ...], zeros behind what came. Under LocalTensorMode the splits are known, and every
    rank's result is filled up by itself."""
    group = mesh.get_group(dim).group_name
    if local_tensor_mode() is None:
        return torch.ops.mindspeed.expert_exchange(x.contiguous(), messages, receives, size, group)
    from torch.distributed._local_tensor import LocalTensor

    arguments, taken = ([torch.SymInt(node) for node in _entries(t)] for t in (messages, receives))
    rows = LocalTensor({rank: t[: int(messages._local_tensors[rank].sum())] for rank, t in x._local_tensors.items()})
    came = wait_for(torch.ops._c10d_functional.all_to_all_single(rows, taken, arguments, group))._local_tensors
    return LocalTensor({rank: torch.cat([t, t.new_zeros(size - t.shape[0], *t.shape[1:])]) for rank, t in came.items()})


def _entries(x: torch.Tensor) -> list[Any]:
    """The integers of a one-dimensional LocalTensor, each with a value for every rank."""
    from torch.distributed._local_tensor import LocalIntNode

    values = {rank: t.tolist() for rank, t in x._local_tensors.items()}
    return [LocalIntNode({rank: v[i] for rank, v in values.items()}) for i in range(x.shape[0])]


def all_reduce(x: torch.Tensor, mesh: Any, dims: Sequence[int], operation: str = "sum") -> torch.Tensor:
    """The sum (or "min", "max") of ``x`` over the ranks along mesh dimensions ``dims``."""
    for dim in dims:
        x = wait_for(torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, mesh.get_group(dim).group_name))
    return x


def all_gather(x: torch.Tensor, mesh: Any, dim: int) -> torch.Tensor:
    """``x`` of all ranks along mesh dimension ``dim``, one behind the other along the first dimension."""
    group = mesh.get_group(dim).group_name
    return wait_for(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), mesh.size(dim), group))


def reduce_scatter(x: torch.Tensor, mesh: Any, dim: int) -> torch.Tensor:
    """This rank's part, along the first dimension, of the sum of ``x`` over the ranks along mesh dimension ``dim``."""
    group = mesh.get_group(dim).group_name
    return wait_for(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", mesh.size(dim), group))


def on_each_rank(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``function(*tensors)``; under LocalTensorMode for every rank that this process is."""
    from torch.distributed._local_tensor import LocalTensor, local_tensor_mode

    mode = local_tensor_mode()
    if mode is None:
        return function(*tensors)
    with tracing.outside_tracing():

        def own(rank: int) -> list[torch.Tensor]:
            return [t._local_tensors[rank] if isinstance(t, LocalTensor) else t for t in tensors]

        return LocalTensor({rank: function(*own(rank)) for rank in mode.ranks})


def random_state(device: str) -> torch.Tensor:
    """The state of the generator that draws on ``device`` ("cpu", "cuda"), as bytes."""
    with tracing.outside_tracing():
        return torch.get_rng_state() if device == "cpu" else torch.get_device_module(device).get_rng_state()


def reconcile(x: torch.Tensor) -> torch.Tensor:
    """``x``; under LocalTensorMode the tensor that all ranks hold alike, which may hold what is no number.

    Raises:
        AssertionError: they do not.
    """
    if not hasattr(x, "reconcile"):
        return x
    values = list(x._local_tensors.values())
    if values[0].is_floating_point() and all(v.isnan().any() and v.shape == values[0].shape for v in values):
        if all(torch.allclose(values[0], v, rtol=0, atol=0, equal_nan=True) for v in values):
            return values[0].detach().clone()
    return x.reconcile()


def wait_for(x: torch.Tensor) -> torch.Tensor:
    """The result of a collective, when it is there."""
    return torch.ops._c10d_functional.wait_tensor(x)
