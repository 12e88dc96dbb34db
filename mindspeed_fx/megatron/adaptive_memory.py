"""``--moe-adaptive-recompute-activation``: a layer of experts keeps nothing for the backward where one expert has many
times its share of the tokens, and all that it makes where tokens are spread evenly.

With T tokens of the ranks that exchange them, each with k of E experts, an expert has T k / E rows when the load is
even. A layer in which one has more than ``scale`` times as many is of level 1 of :mod:`zero_memory`: rows are
exchanged, and its products are made, again. All ranks of the exchange see the same counts, and so decide alike, which
the second exchange needs.

Eager layers decide by the counts of the very call. A graph holds either way, not both, so that two are made, one for
each way. The counts of a compiled chunk's call before say which one is called, as in MindSpeed (whose layers are all
eager). Where they were wrong because this call is the first with so many tokens, the graph that keeps all stops at the
counts of the first such layer, before its rows are exchanged, and the other is called with the same random numbers.
That needs all ranks with which the graph exchanges anything to see the same counts; where some do not (see
:func:`others_wait`), such a call keeps what it makes.
Semantics: MindSpeed's moe_adaptive_forward.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Callable

import torch
from torch import Tensor

from mindspeed_fx.megatron import zero_memory
from mindspeed_fx.megatron.flags import recomputed
from mindspeed_fx.megatron.flags.flag import get

FLAG = "--moe-adaptive-recompute-activation"


def prepare(model: Any, args: Namespace) -> None:
    """Gives every layer of experts of a GPTModel, or of a pipeline stage of one, its scale.

    Raises:
        OptionError: its experts are of a kind whose parts are not ours to make again.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    config = model.config
    stops = not others_wait(config, args)
    for index, layer in enumerate(model.decoder.layers):
        if not isinstance(layer.mlp, MoELayer) or recomputed.is_recomputed(config, index):
            continue  # recomputed whole, it keeps nothing anyhow
        zero_memory.check_parts(layer.mlp, FLAG)
        layer.mlp.adaptive_scale = float(args.moe_adaptive_recompute_activation_scale)
        layer.mlp.stops_when_overloaded = stops
        layer.mlp.expert_load = torch.zeros((), device=next(layer.mlp.parameters()).device)
        _set_level(layer.mlp, None)


def is_asked(layer: Any) -> bool:
    """Whether the flag is about this layer."""
    return hasattr(layer, "adaptive_scale")


def others_wait(config: Any, args: Namespace) -> bool:
    """Whether forward graphs exchange with ranks that see counts of other tokens, and would wait for a graph that has
    stopped.
    """
    kinds = config.moe_router_load_balancing_type
    of_all = "global_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds)
    flags = ("overlap_param_gather", "use_torch_fsdp2", "use_megatron_fsdp", "moe_fb_overlap")
    return of_all or config.context_parallel_size > 1 or any(get(args, flag) for flag in flags)


class Overloaded(RuntimeError):
    """A graph that keeps what its layers make has met one with too many tokens for an expert."""


@torch.library.custom_op("mindspeed::stop_if_overloaded", mutates_args=())
def stop_if_overloaded(rows: Tensor, scale: float) -> Tensor:
    """A copy of ``rows`` [n, experts], int or bool.

    Raises:
        Overloaded: the sum of an expert's is more than ``scale`` times the mean of all.
    """
    load = _load(rows).item()
    if load > scale:
        raise Overloaded(f"{load:.2f} times its share of tokens, more than {scale}")
    return rows.clone()


@stop_if_overloaded.register_fake
def _(rows: Tensor, scale: float) -> Tensor:
    return torch.empty_like(rows)


def _load(rows: Tensor) -> Tensor:
    counts = rows.sum(0)
    return counts.max() / counts.float().mean().clamp(min=1.0)


def choose(layer: Any, rows: Tensor) -> Tensor:
    """Decide what this call of a layer keeps; in a graph say what the next one is to decide by, or stop.

    Args:
        rows: [n, experts], int or bool, whose sum are the rows of each expert, of all ranks that exchange tokens.

    Returns:
        ``rows``, which are there when it is decided.
    """
    if not is_asked(layer):
        return rows
    load = _load(rows)
    layer.expert_load.copy_(load)
    if not torch.compiler.is_compiling():
        _set_level(layer, zero_memory.LEVEL1 if load.item() > layer.adaptive_scale else None)
    elif layer.stops_when_overloaded and zero_memory.level_of(layer) is None:
        return stop_if_overloaded(rows, layer.adaptive_scale)
    return rows


def call(model: Any, graph: Callable[[], Any]) -> Any:
    """A call of a compiled chunk by the graph that its loads ask for: all of its layers keep nothing if one of them
    was overloaded in the call before, or is in this one.
    """
    from megatron.core.tensor_parallel import random

    layers = [m for m in model.modules() if is_asked(m)]
    is_overloaded = any(m.expert_load.item() > m.adaptive_scale for m in layers)
    states = None if is_overloaded or not model.training else random._get_all_rng_states()
    _set_levels(layers, is_overloaded)
    try:
        return graph()
    except Overloaded:
        pass  # outside of the handler what the graph has made is free
    if states is not None:
        random._set_all_rng_states(*states)
    _set_levels(layers, True)
    return graph()


def _set_levels(layers: list[Any], is_overloaded: bool) -> None:
    for layer in layers:
        _set_level(layer, zero_memory.LEVEL1 if is_overloaded else None)


def _set_level(layer: Any, level: str | None) -> None:
    layer.zero_memory = layer.experts.zero_memory = level
