"""The part of :mod:`mindspeed_fx.compat` about torch.distributed and what Inductor does with collectives."""

from __future__ import annotations

import inspect
from typing import Any, Mapping, Sequence
from unittest import mock

import torch.fx as fx


def default_store() -> Any:
    """The store of the default process group; None when there is no group, one rank, or a fake group."""
    import torch.distributed as dist

    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def ranks_of(group: str) -> list[int]:
    """Global ranks of a process group by name."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    return dist.get_process_group_ranks(_resolve_process_group(group))


def writes_again_at_each_wait(group: str, collective: str) -> bool:
    """Whether the results of a joined ``collective`` must all be waited for before one of them is used.

    gloo writes all results of ``reduce_scatter_tensor_coalesced`` when one of them is waited for, and again with each
    further one (torch 2.11 to 2.14): what a program has meanwhile put into that memory is lost.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    return collective.startswith("reduce_scatter") and "gloo" in str(dist.get_backend(_resolve_process_group(group)))


def ordered_group(ranks: Sequence[int]) -> Any:
    """A new process group whose ranks are numbered in this order; every process makes it. Before torch 2.13 a group
    sorts its ranks, by Python's own function, which stands aside meanwhile."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return dist.new_group(list(ranks), sort_ranks=False)
    with mock.patch.object(distributed_c10d, "sorted", list, create=True):
        return dist.new_group(list(ranks))


def has_symmetric_memory(group: str) -> bool:
    """Whether ``enable_symm_mem_for_group`` was called for a group; registers torch's operators of it."""
    try:
        from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
    except ImportError:
        return False
    return bool(is_symm_mem_enabled_for_group(group))


def world_is_parallel() -> bool:
    """True when this process is one of several."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def insert_order(graph: fx.Graph, after: Mapping[fx.Node, list[fx.Node]]) -> bool:
    """Make each key wait for its list of nodes in the code that Inductor generates; False where this torch cannot.

    The nodes are wrapped in Inductor's ``control_deps`` operator, as its own overlap scheduler does.
    """
    try:
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
        from torch.utils._ordered_set import OrderedSet
    except ImportError:
        return False
    preserve_node_ordering(graph, {node: OrderedSet(deps) for node, deps in after.items()})
    return True


def rank() -> int:
    """This process's rank in the default group; 0 without one."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Ranks of the default group; 1 without one."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def group_ranks(name: str) -> list[int] | None:
    """The global ranks of a process group by the name that functional collectives carry; None where there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return dist.get_process_group_ranks(_resolve_process_group(name))
    except (RuntimeError, ValueError, KeyError):
        return None


def sum_later(x: Any, group: Any) -> Any:
    """The sum of ``x`` over a group, begun and not waited for: the tensor that is returned waits where it is first
    read."""
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(x, "sum", group)


def mesh_text(mesh: Any) -> str:
    """The ranks of a mesh and their order, the same text on every rank and in every start; not to be asked for while
    tracing."""
    import torch.distributed as dist

    backends = [str(dist.get_backend(mesh.get_group(i))) for i in range(mesh.ndim)]
    return f"{mesh.device_type} {mesh.mesh.tolist()} {mesh.mesh_dim_names} {backends} of {world_size()}"


def name_groups(mesh: Any) -> dict[str, str]:
    """Give the process group of each mesh dimension a second name, and return own name -> second one.

    A group's own name is a count of the groups that a process has made: ranks in other groups of one dimension have
    other names for it, and in the next start a name may be another group's. The second name says the mesh and the
    dimension: the same on every rank and in every start, and every rank finds its own group by it. Groups of symmetric
    memory, which is known by their own name, get none.
    """
    import hashlib

    from torch.distributed import distributed_c10d

    digest = hashlib.sha256(mesh_text(mesh).encode()).hexdigest()[:16]
    names = {}
    for i in range(mesh.ndim):
        group = mesh.get_group(i)
        if has_symmetric_memory(group.group_name):
            continue
        name = f"mindspeed_fx.{(mesh.mesh_dim_names or range(mesh.ndim))[i]}.{digest}"
        try:
            known = distributed_c10d._resolve_process_group(name)
        except (RuntimeError, ValueError, KeyError):
            known = None
        if known is not None and known != group:
            distributed_c10d._unregister_process_group(name)
        if known is None or known != group:
            distributed_c10d._register_process_group(name, group)
        names[group.group_name] = name
    return names
