"""Layers of a pipeline's stages by modelled time: embedding, head, dense layers and mixtures of experts take different
times, so that the fullest of stages with as many layers keeps all others waiting.
"""

from __future__ import annotations

from typing import Any, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_fx.planning.search.layouts import Layout

MODELLED = "ascend910b2"
"""The device whose times are taken where the one at hand is not known: shares of layers are much alike."""


def balanced_layers(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, layout: Layout, mesh: DeviceMesh | None = None
) -> list[int]:
    """How many layers each stage of ``layout`` has, so that the fullest stage takes the least time, if they fit.

    Args:
        model, args, kwargs: a training step and its whole batch; nothing runs.
        layout: of stages and microbatches alone; what divides a stage further is taken to divide all of it.
        mesh: says how many ranks share a stage's memory; None: one.

    Raises:
        ShardingError: see :func:`mindspeed_fx.plan`.
    """
    from mindspeed_fx.cost.hardware import detect, hardware
    from mindspeed_fx.planning.search.costs import Prices
    from mindspeed_fx.planning.search.model_graph import trace_model
    from mindspeed_fx.planning.search.solve import Program
    from mindspeed_fx.planning.search.stage_loads import balanced_sizes, even_sizes, whole_sizes
    from mindspeed_fx.planning.search.stage_step import part_loads

    kind = next((p.device.type for p in model.parameters() if p.device.type not in ("meta", "cpu")), "cpu")
    hw = hardware(detect("npu" if kind == "privateuseone" else kind)[0] or MODELLED)
    problem = trace_model(model, args, kwargs or {}, layout.pp * layout.virtual)
    program = Program(Prices(problem, hw), layout, 0.9 * float(hw.memory) * (mesh.size() // layout.pp if mesh else 1))
    program.priced()
    loads, _, _ = part_loads(program, dict.fromkeys(program.nodes, 0))
    sizes = balanced_sizes(layout, program.order, loads, program.limit)
    return whole_sizes(problem, sizes or even_sizes(len(program.order), layout.pp * layout.virtual))
