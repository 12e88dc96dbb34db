"""Which layers of a chunk are recomputed, whole or in parts, as MindSpeed counts them.

Layer i of virtual stage s, of v, has the number i, and i v + s with ``--enable-recompute-layers-per-pp-rank``. Layers
with a number below ``--recompute-num-layers`` are recomputed whole; of those behind them the first n their activation
function, or their norms.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags.flag import get

STAGE = "mindspeed_vp_stage"
"""The argument that says of which virtual stage options are asked for; 0 without it."""
LAYERS = "mindspeed_chunk_layers"
"""The argument that says how many layers the chunk has; without it as many as the largest."""
PARTS = {
    "activation_function": ("recompute_activation_function", ["layers.{}.mlp"]),
    "norm": ("recompute_norm", ["layers.{}.*norm", "layers.{}.self_attention.*norm"]),
}
"""Policy -> its flag, and the modules of a layer that it is about."""


def with_stage(args: Namespace, stage: int, **more: Any) -> Namespace:
    """The arguments, for the chunk of a virtual stage."""
    return Namespace(**{**vars(args), STAGE: stage, **more})


def of_chunk(args: Namespace, model: Any) -> Namespace:
    """The arguments, for the chunk that a GPTModel is."""
    decoder = getattr(model, "decoder", None)
    layers = {LAYERS: len(decoder.layers)} if hasattr(decoder, "layers") else {}
    return with_stage(args, stage_of(model), **layers)


def stage_of(model: Any) -> int:
    """The virtual stage of a GPTModel."""
    return getattr(model, "vp_stage", None) or 0


def stage(args: Namespace) -> int:
    """The virtual stage that the arguments are for."""
    return getattr(args, STAGE, 0)


def layers_of_chunk(args: Namespace) -> int:
    """Layers of the chunk that the arguments are for."""
    layers = getattr(args, LAYERS, None)
    return most_layers(args) if layers is None else layers


def is_recomputed(config: Any, index: int) -> bool:
    """Whether layer ``index`` of a chunk is recomputed whole, by the configuration of its model."""
    if config.recompute_granularity != "full":
        return False
    return config.recompute_method != "block" or index < (config.recompute_num_layers or 0)


def count_in_chunk(args: Namespace, count: int) -> int:
    """How many layers of the chunk have a number below ``count``."""
    if not get(args, "enable_recompute_layers_per_pp_rank"):
        return count
    stages = get(args, "virtual_pipeline_model_parallel_size") or 1  # Megatron sets it when it checks its arguments
    return max(0, -(-(count - stage(args)) // stages))


def whole_layers(args: Namespace) -> int:
    """Layers of the chunk that are recomputed whole, from its first."""
    if get(args, "recompute_granularity") != "full":
        return 0
    return count_in_chunk(args, get(args, "recompute_num_layers") or 0)


def wishes(args: Namespace) -> dict[str, Any]:
    """Option ``recompute`` for the policies of flags: empty, or a policy and the layers that it leaves out."""
    parts = {policy: globs for policy, (flag, globs) in PARTS.items() if get(args, flag)}
    if not parts:
        return {}
    result = {"policy": "+".join(parts)}
    layers = most_layers(args)
    before = (get(args, "recompute_num_layers") or 0) if get(args, "recompute_granularity") == "full" else 0
    for policy, globs in parts.items():
        count = get(args, f"{PARTS[policy][0]}_num_layers")
        first = layers if count is None else count_in_chunk(args, before + count)
        result |= {glob.format(n): "save" for n in range(first, layers) for glob in globs}
    return result


def most_layers(args: Namespace) -> int:
    """No chunk has more."""
    layers, ranks = get(args, "num_layers") or 0, get(args, "pipeline_model_parallel_size", 1)
    if get(args, "pipeline_model_parallel_layout") is not None:
        return layers
    return -(-layers // (ranks * (get(args, "virtual_pipeline_model_parallel_size") or 1)))
