"""``--moe-zero-memory``: what the experts part of a layer makes is made again in the backward.

With R rows (a token once for each of its experts here), hidden size H and width F of an expert, gated, a layer keeps
R (H + 2 F) values for its first product and R F for each of what its activation makes and its second product reads.
Level 0 keeps the R H rows that came from other ranks and the R 2 F values of the first product: rows are permuted, and
the activation is computed, again. Level 1 keeps nothing but the layer's input and what its router chose: rows are also
exchanged again, and the first product is made again. Shared experts keep their first product at level 0, nothing at
level 1.

Semantics: MindSpeed's moe_zero_memory, which also counts the layers of level 1 by pipeline stage.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from typing import Any, Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import fp8_linears
from mindspeed_fx.megatron.flags import recomputed

FLAG = "--moe-zero-memory"
LEVEL0, LEVEL1 = "level0", "level1"
_PRODUCTS = tuple(f"mindspeed::grouped_linear{kind}" for kind in ("", "_main_grad", "_fp8"))


def is_of_our_parts(layer: Any) -> bool:
    """Whether permutation, products and activation of a layer of experts are ours, one by one."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    if layer.config.moe_latent_size or layer.config.moe_router_padding_for_quantization:
        return False
    return type(layer.experts) is SequentialMLP and not fp8_linears.are_of_transformer_engine(layer.experts)


def check_parts(layer: Any, flag: str) -> None:
    """
    Raises:
        OptionError: experts whose parts are not ours to make again, which ``flag`` asks for.
    """
    if not is_of_our_parts(layer):
        kind = type(layer.experts).__name__
        raise OptionError(
            f"{flag}: experts are a {kind}, with a latent projection, padded rows or TransformerEngine's products of 8 "
            "bits; remove the flag"
        )


def level_of(module: Any) -> str | None:
    """The level of a layer of experts or of its experts; None without the flag."""
    return getattr(module, "zero_memory", None)


def is_asked(module: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the flag is about this module, or another that sets its level at every call."""
    return level_of(module) is not None or hasattr(module, "adaptive_scale")


def whole(layer: Any, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, of which a layer of level 1 keeps nothing but the arguments."""
    if level_of(layer) != LEVEL1:
        return function(*args)
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def up_to_first_product(layer: Any, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, of which a layer of level 0 keeps the arguments and the product of the experts alone."""
    if level_of(layer) != LEVEL0:
        return function(*args)
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = getattr(operator, "_name", "").partition(".")[0] in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.MUST_RECOMPUTE


def made_again(module: Any, function: Callable[..., Tensor], *args: Any) -> tuple[Tensor, Callable[[Tensor], None]]:
    """``function(*args)``, which level 0 does not keep, and what is to be called with the product that reads it."""
    if level_of(module) != LEVEL0:
        return function(*args), lambda out: None
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    again = CheckpointWithoutOutput()
    return again.checkpoint(function, *args), again.discard_output_and_register_recompute


def await_parameters(experts: Any) -> None:
    """Waits for gathered parameters, as hooks of Megatron's before the forward of each linear would, which is not
    called: the experts are one product. (In a graph the first use waits.)"""
    if torch.compiler.is_compiling():
        return
    for expert in experts.local_experts:
        for linear in (expert.linear_fc1, expert.linear_fc2):
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())


def set_levels(model: Any, args: Namespace) -> None:
    """Gives every layer of experts of a GPTModel, or of a pipeline stage of one, its level.

    Raises:
        OptionError: its experts are of a kind whose parts are not ours to make again.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    config, stages = model.config, getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    count = getattr(args, "moe_zero_memory_num_layers", None)
    stage = recomputed.stage_of(model)
    for index, layer in enumerate(model.decoder.layers):
        if not isinstance(layer.mlp, MoELayer) or recomputed.is_recomputed(config, index):
            continue  # recomputed whole, it keeps nothing anyhow
        check_parts(layer.mlp, FLAG)
        level = args.moe_zero_memory
        if level == LEVEL1 and count and index * stages + stage >= count:
            level = LEVEL0
        layer.mlp.zero_memory = layer.mlp.experts.zero_memory = level
