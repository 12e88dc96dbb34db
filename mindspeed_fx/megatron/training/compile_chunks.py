"""Each chunk of the model that Megatron's ``get_model`` builds is compiled, below its wrappers."""

from __future__ import annotations

import os
from typing import Any

import torch

from mindspeed_fx.compat import dynamo
from mindspeed_fx.megatron import (
    adaptive_memory,
    buckets,
    flags,
    forward_beside_backward,
    fsdp2_graph,
    logged_losses,
    nanopipe,
    patches,
    ripipe,
    smart_swap,
    torch_fsdp2,
    vision,
)
from mindspeed_fx.megatron.dualpipev import placement
from mindspeed_fx.megatron.dualpipev import schedule as dualpipev
from mindspeed_fx.megatron.flags import recomputed, swapped
from mindspeed_fx.megatron.run_arguments import loop_arguments

SWITCH = "MINDSPEED_FX_COMPILE"


def get_model(*args: Any, **kwargs: Any) -> Any:
    """``megatron.training.training.get_model``, whose chunks compile at their first call."""
    arguments = loop_arguments()
    if placement.is_asked(arguments):
        args = (placement.provider(args[0]), *args[1:])
    model = patches.original("megatron.training.training:get_model")(*args, **kwargs)
    turns = getattr(arguments, "moe_fb_overlap", False) and wants_compile()
    if placement.is_asked(arguments):
        dualpipev.prepare(model, getattr(arguments, "dualpipev_dw_detach", False) and wants_compile(), turns)
    if turns:
        forward_beside_backward.prepare(model, by_megatron=not placement.is_asked(arguments))
    if getattr(arguments, "use_nanopipe", False):
        if not wants_compile():
            raise ValueError(f"{SWITCH}=0: --use-nanopipe splits compiled backwards; expected 1")
        nanopipe.prepare(model, getattr(arguments, "use_nanopipe_swap", False))
    if wants_compile():
        here = [recomputed.of_chunk(arguments, unwrap(chunk)) for chunk in model]
        if swapped.plans_memory(arguments):
            here = smart_swap.with_budgets(arguments, model, here)
        for chunk, its_arguments in zip(model, here, strict=True):
            compile_chunk(chunk, {**_gathering(arguments), **flags.backend_options(its_arguments)})
    if getattr(arguments, "recompute_in_advance", False):
        ripipe.prepare(model, ripipe.ALWAYS, _is_whole, unwrap)
    elif getattr(arguments, "recompute_in_bubble", False):
        ripipe.prepare(model, ripipe.BEYOND, lambda chunk: True, unwrap)
    return model


def _gathering(args: Any) -> dict[str, bool]:
    """Megatron keeps a rank's own tokens, and gathers them again in the backward."""
    return {"regather": True} if getattr(args, "sequence_parallel", False) else {}


def _is_whole(model: Any) -> bool:
    """Whether every layer is recomputed whole."""
    return all(recomputed.is_recomputed(model.config, n) for n in range(len(model.decoder.layers)))


def wants_compile() -> bool:
    """Whether chunks are compiled.

    Raises:
        ValueError: the environment variable has another value than 0 or 1.
    """
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}={value!r}: expected 0 or 1")
    return value == "1"


def compile_chunk(chunk: torch.nn.Module, options: dict[str, Any]) -> None:
    """Compile the model within Megatron's wrappers (data parallelism, conversion to 16 bits), in place.

    Args:
        chunk: the model in its wrappers.
        options: of the backend, see :class:`mindspeed_fx.options.Options`.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    module = unwrap(chunk)
    if apart := vision.parts(module):
        for part in apart:
            part.compile(backend="mindspeed", fullgraph=True, options=options)
        return
    has_buckets = hasattr(chunk, "param_to_bucket_group") and buckets.listen(chunk)
    if isinstance(getattr(module, "config", None), TransformerConfig):
        logged_losses.prepare(module.config)
    if has_buckets or hasattr(chunk, "late_gradients"):
        dynamo.compile_alone(module, backend="mindspeed", fullgraph=True, options=options)
    elif torch_fsdp2.is_divided(chunk):
        fsdp2_graph.compile_whole(module, options)
    else:
        module.compile(backend="mindspeed", fullgraph=True, options=options)
    if any(adaptive_memory.is_asked(m) for m in module.modules()):
        dynamo.around_compiled_calls(module, lambda graph: adaptive_memory.call(module, graph))


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model within Megatron's wrappers."""
    while hasattr(chunk, "module") and isinstance(chunk.module, torch.nn.Module):
        chunk = chunk.module
    return chunk
