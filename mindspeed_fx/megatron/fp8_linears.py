"""``--fp8-format``, ``--fp8-recipe``: linear layers of 8-bit operands in Megatron's local layers.

In Megatron they are TransformerEngine's; without it the flags changed nothing, and nobody said so. As there, the
linears of transformer layers are meant, those of experts too, and not embeddings, routers and the last projection to
the vocabulary. A rank scales its own parts of what is divided, an expert its own rows. Formulas:
:mod:`mindspeed_fx.kernels.linear_fp8`; gradients are added to ``main_grad`` by Megatron's hooks.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Callable

import torch
from torch import Tensor

from mindspeed_fx.megatron import missing, patches
from mindspeed_fx.megatron.patches import EVERYWHERE, Patch

LAYER = "transformer.transformer_layer:TransformerLayer.__init__"
AHEAD = "transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__"
RECIPES = {
    ("hybrid", "tensorwise"): "tensor",
    ("e4m3", "blockwise"): "block",
    ("e4m3", "mxfp8"): "mx",
    ("e4m3", "mxfp8-32x32"): "mx_square",
}
"""(format, recipe) -> recipe of :func:`mindspeed_fx.kernels.linear_fp8.linear_fp8`."""
VALID = ", ".join(f"--fp8-format {form} --fp8-recipe {recipe}" for form, recipe in RECIPES)
KEY = "_mindspeed_fx_fp8_recipe"
_NO_OTHERS = {
    "fp8_param_gather": "--fp8-param-gather",
    "fp8_dot_product_attention": "--fp8-dot-product-attention",
    "fp8_multi_head_attention": "--fp8-multi-head-attention",
    "moe_use_legacy_grouped_gemm": "--moe-use-legacy-grouped-gemm",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "tp_2d": "--tp-2d",
}
"""Arguments beside which it cannot be had, by their names."""
NOT_NEEDED = {
    "1.7.0.dev0": "experts without a token",
    "2.6.0dev0": "activations and norms that are computed again before a product of 8 bits",
}
"""What a configuration of 8 bits asks a version of TransformerEngine for, by that version."""


def refuse(args: Namespace) -> None:
    """What is asked of 8 bits and less and is not done here.

    Raises:
        ValueError: the message names the flag, its value and what is valid.
    """
    if missing.has_transformer_engine():
        return
    if getattr(args, "fp4", None):
        raise ValueError(f"--fp4-format {args.fp4} needs TransformerEngine, which is not installed; remove it")
    if not getattr(args, "fp8", None):
        return
    recipe_asked_by(args)
    if not getattr(args, "fp8_wgrad", True):
        raise ValueError("--no-fp8-wgrad needs TransformerEngine, which is not installed; remove it")
    others = [flag for name, flag in _NO_OTHERS.items() if getattr(args, name, None)]
    if others:
        raise ValueError(f"{others[0]} beside --fp8-format needs TransformerEngine, which is not installed")


def recipe_asked_by(config: Any) -> str:
    """The recipe of arguments or a configuration that ask for 8 bits.

    Raises:
        ValueError: it is one of TransformerEngine's alone.
    """
    form, recipe = config.fp8, getattr(config, "fp8_recipe", None) or "delayed"
    asked = form, getattr(recipe, "value", recipe)
    if asked not in RECIPES:
        raise ValueError(
            f"--fp8-format {asked[0]} --fp8-recipe {asked[1]} needs TransformerEngine, which is not installed; without "
            f"it: {VALID}"
        )
    return RECIPES[asked]


def recipe_of(weight: Tensor) -> str | None:
    """In which recipe products with ``weight`` are of 8 bits; None: they are not."""
    return getattr(weight, KEY, None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
    """``x weight^T + bias`` of 8-bit operands; the bias is added in the type of ``x``."""
    out = torch.ops.mindspeed.linear_fp8(x, weight, recipe)
    return out if bias is None else out + bias


def layer_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """``TransformerLayer.__init__``, after which the weights of its linears know their recipe."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    patches.original(LAYER)(self, *args, **kwargs)
    if not is_first_last_bf16_layer(self.config, self.layer_number - 1):
        mark(self)


def ahead_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """``MultiTokenPredictionLayer.__init__``, likewise: no option leaves these layers in 16 bits."""
    patches.original(AHEAD)(self, *args, **kwargs)
    mark(self)


def mark(layer: Any) -> None:
    """Have the linears of a layer compute as its configuration says."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    if not layer.config.fp8:
        return
    recipe = recipe_asked_by(layer.config)
    for module in layer.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and module.weight is not None:
            setattr(module.weight, KEY, recipe)


def are_of_transformer_engine(experts: Any) -> bool:
    """Whether the products of a ``SequentialMLP`` are of 8 or 4 bits and TransformerEngine's."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = experts.config
    return bool(config.fp8 or config.fp4) and not isinstance(experts.local_experts[0].linear_fc1, ColumnParallelLinear)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """``is_te_min_version`` as a configuration asks it: for what TransformerEngine is needed, and what is done here."""
    return version in NOT_NEEDED


def keep_input(module: Any) -> None:
    """``set_save_original_input``: linears keep their input as it is, and round it again."""


def checkpoint(function: Callable, distribute: bool, rng_tracker: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    """``te_checkpoint`` as Megatron's own of layers in 16 bits: what is recomputed rounds the same numbers alike."""
    from megatron.core import tensor_parallel

    def call(*values: Any) -> Any:
        return function(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))

    return tensor_parallel.checkpoint(call, distribute, *args, *kwargs.values())


def table(has_transformer_engine: bool) -> list[Patch]:
    """The patches."""
    if has_transformer_engine:
        return []
    kept = "refuses linears that are not TransformerEngine's"
    unchanged, missing_there = "--fp8-format changed nothing", "layers of 8 bits are recomputed by what is not there"
    return [
        Patch(LAYER, layer_init, unchanged, EVERYWHERE),
        Patch(AHEAD, ahead_init, unchanged, EVERYWHERE),
        Patch("extensions.transformer_engine:te_checkpoint", checkpoint, missing_there, EVERYWHERE),
        Patch("transformer.transformer_block:te_checkpoint", checkpoint, missing_there, EVERYWHERE, copies=False),
        Patch("extensions.transformer_engine:set_save_original_input", keep_input, kept, EVERYWHERE),
        Patch("transformer.moe.moe_layer:te_checkpoint", checkpoint, missing_there, EVERYWHERE, is_absent=True),
        Patch(
            "transformer.transformer_config:is_te_min_version",
            is_te_min_version,
            "refuses experts of 8 bits, whose products are ours",
            EVERYWHERE,
            copies=False,
        ),
    ]
