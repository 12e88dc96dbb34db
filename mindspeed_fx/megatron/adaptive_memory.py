"""``--moe-adaptive-recompute-activation``: a layer of experts keeps nothing for the backward where one expert has many
times its share of the tokens, and all that it makes where tokens are spread evenly.

With T tokens of the ranks that exchange them, each with k of E experts, an expert has T k / E rows when the load is
even. A layer in which one has more than ``scale`` times as many is of level 1 of :mod:`zero_memory`: rows are
exchanged, and its products are made, again. All ranks of the exchange see the same counts, and so decide alike, which
the second exchange needs.

Eager layers decide by the counts of the very call. A graph holds either way, not both, so that of a compiled chunk the
counts of its call before decide, as in MindSpeed (whose layers are all eager); two graphs are made, one for each way.
Semantics: MindSpeed's moe_adaptive_forward.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import zero_memory
from mindspeed_fx.megatron.flags import recomputed

FLAG = "--moe-adaptive-recompute-activation"


def prepare(model: Any, args: Namespace) -> None:
    """Gives every layer of experts of a GPTModel, or of a pipeline stage of one, its scale.

    Raises:
        OptionError: its experts are of a kind whose parts are not ours to make again.
    """
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    config = model.config
    for index, layer in enumerate(model.decoder.layers):
        if not isinstance(layer.mlp, MoELayer) or recomputed.is_recomputed(config, index):
            continue  # recomputed whole, it keeps nothing anyhow
        special = config.moe_latent_size or config.moe_router_padding_for_quantization or config.fp8 or config.fp4
        if special or type(layer.mlp.experts) is not SequentialMLP:
            kind = type(layer.mlp.experts).__name__
            raise OptionError(f"{FLAG}: experts are a {kind}, with a latent projection or in 8 bits; remove the flag")
        layer.mlp.adaptive_scale = float(args.moe_adaptive_recompute_activation_scale)
        layer.mlp.expert_load = torch.zeros((), device=next(layer.mlp.parameters()).device)
        _set_level(layer.mlp, None)


def is_asked(layer: Any) -> bool:
    """Whether the flag is about this layer."""
    return hasattr(layer, "adaptive_scale")


def choose(layer: Any, counts: Tensor) -> None:
    """Decide what this call of a layer keeps; in a graph say what the next one is to decide by.

    Args:
        counts: rows of each expert, [experts], of all ranks that exchange tokens.
    """
    if not is_asked(layer):
        return
    load = counts.max() / counts.float().mean().clamp(min=1.0)
    layer.expert_load.copy_(load)
    if not torch.compiler.is_compiling():
        _set_level(layer, zero_memory.LEVEL1 if load.item() > layer.adaptive_scale else None)


def choose_by_last_call(model: Any) -> None:
    """Before a compiled chunk is called: all of its layers keep nothing if one of them was overloaded."""
    layers = [m for m in model.modules() if is_asked(m)]
    is_overloaded = any(m.expert_load.item() > m.adaptive_scale for m in layers)
    for layer in layers:
        _set_level(layer, zero_memory.LEVEL1 if is_overloaded else None)


def _set_level(layer: Any, level: str | None) -> None:
    layer.zero_memory = layer.experts.zero_memory = level
