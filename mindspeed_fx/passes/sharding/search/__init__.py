"""The search for the fastest plan under the cost model. One idea per file:

* ``repeat.py``: layers that repeat, so that two of each kind are traced; ``trace.py``: from model to captured graph
* ``axes.py``: which dimensions of which tensors are the same thing; ``ways.py``: how an operator is computed in parts
* ``graph.py``: the problem: one of each kind of layer, operators, values and the edges between them
* ``layouts.py``: how the world is factored; ``price.py``: seconds and bytes of each choice
* ``flows.py``: which combinations there are, shared by layouts; ``highs.py``: linear programs; ``solve.py``: the integer program of one layout; ``search.py``: over all layouts, with the bound
* ``emit.py``: a solution as a plan; ``rivals.py``: a plan as a restriction; ``found.py``: the plan with its numbers and reasons
"""

from __future__ import annotations

from typing import Any, Sequence

from torch import nn

from mindspeed_fx.options import nearest
from mindspeed_fx.passes.deferred import uncollected
from mindspeed_fx.passes.sharding.plan import ShardingError

DIMENSIONS = ("pp", "dp", "cp", "ep", "tp")


def plan(model: nn.Module, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, *, devices: int | None = None, mesh: Any = None, hardware: str | None = None, memory: Any = None, keep: int = 5, optimizer: str = "adam", pipeline: bool = True) -> Any:
    """The plan with the least modelled step time that fits in memory, over placements of every operator and over meshes.

    Nothing runs: parameters and arguments may be on the meta device, and no process group is needed. The space, and what is
    assumed: docs/sharding.md.

    Args:
        model: a training step: returns the loss, or something whose sum is differentiated.
        args, kwargs: of the model, with the whole batch of a step.
        devices: how many; or
        mesh: their mesh, a ``DeviceMesh`` or dimension -> ranks, with names among "pp", "dp", "cp", "ep", "tp": its sizes are kept.
        hardware: name of a device of the cost model; default: the one at hand.
        memory: of one device, "60GiB" or bytes; default: nine tenths of what it has.
        keep: how many meshes are reported.
        optimizer: "adam", "momentum" or "sgd": what it stores for each parameter.
        pipeline: whether pipeline stages are considered (:func:`mindspeed_fx.pipeline_stage` runs them).

    Returns:
        :class:`~mindspeed_fx.passes.sharding.search.found.SearchedPlan`: a :class:`~mindspeed_fx.Plan` with ``seconds``, ``memory``, ``gap``,
        ``alternatives``, ``explain(...)``, ``diff(...)``; printed, a table.

    Raises:
        ShardingError, OptionError: nothing fits; a wrong name or size; scipy is missing.
    """
    from mindspeed_fx.cost.hardware import detect
    from mindspeed_fx.cost.hardware import hardware as device
    from mindspeed_fx.passes.sharding.search.found import Searched, SearchedPlan
    from mindspeed_fx.passes.sharding.search.price import OPTIMIZERS, Prices
    from mindspeed_fx.passes.sharding.search.search import memory_of, search
    from mindspeed_fx.passes.sharding.search.highs import milp
    from mindspeed_fx.passes.sharding.search.trace import trace

    milp()
    if optimizer not in OPTIMIZERS:
        raise ShardingError(f'optimizer is {optimizer!r}; valid: {", ".join(OPTIMIZERS)}{nearest(str(optimizer), OPTIMIZERS)}')
    fixed, devices = _fixed(mesh, devices)
    if hardware is None:
        target = next((p.device.type for p in model.parameters() if p.device.type not in ("meta", "cpu")), "cpu")
        hardware, why = detect("npu" if target == "privateuseone" else target)
        if hardware is None:
            raise ShardingError(f"hardware: {why}")
    hw = device(hardware)
    limit = memory_of(memory, hw)
    settings = {"optimizer": optimizer, "pipeline": pipeline, "fixed": fixed}
    with uncollected(True):  # each collection walks over all objects of torch, a quarter of a second, and a search makes little garbage
        problem = trace(model, args, kwargs or {})
        outcome = search(problem, hw, devices, limit, keep=keep, **settings)
    return SearchedPlan.of(Searched(problem, Prices(problem, hw, optimizer), devices, limit, outcome, settings), outcome.solutions[0])


def _fixed(mesh: Any, devices: int | None) -> tuple[dict[str, int], int]:
    """Sizes that are given, and the number of devices."""
    if mesh is None:
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise ShardingError(f"devices is {devices!r}; a whole number from 1 on, or a mesh, is expected")
        return {}, devices
    sizes = dict(mesh) if isinstance(mesh, dict) else dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    for name in sizes:
        if name not in DIMENSIONS:
            raise ShardingError(f'mesh dimension "{name}"{nearest(str(name), DIMENSIONS)}; valid: {", ".join(DIMENSIONS)}')
    if not sizes:
        raise ShardingError(f"the mesh has no names: give init_device_mesh mesh_dim_names, of {', '.join(DIMENSIONS)}")
    count = 1
    for n in sizes.values():
        count *= n
    if devices not in (None, count):
        raise ShardingError(f"devices is {devices}, and the mesh has {count}")
    return {**dict.fromkeys(DIMENSIONS, 1), **sizes}, count
