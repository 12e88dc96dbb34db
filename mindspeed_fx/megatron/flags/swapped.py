"""What waits in host memory until its backward: ``--swap-attention``, ``--swap-layer-input``, ``--smart-swap``; and
flags that plan what is made again by what the device has room for.

All are options of the backend: what a module makes ("offload") or what enters it ("offload_input") is moved in every
plan, or the planner moves, or makes again, what does not fit.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags import recomputed
from mindspeed_fx.megatron.flags.flag import NotDone, get, has_virtual_stages
from mindspeed_fx.options import Options

SWAP_MODULES = ("self_attention", "input_layernorm", "pre_mlp_layernorm", "mlp")
"""Parts of a layer, as Megatron-core calls them."""
RESERVED = 2 * 2**30
"""Bytes of the device that ``--smart-swap`` leaves alone, as MindSpeed's ``redundant_memory`` does."""
GRAPH_MEMORY = "mindspeed_graph_memory"
"""The argument that says how many bytes the graph of a chunk may hold."""
DIVIDED = ("use_torch_fsdp2", "layerzero", "use_megatron_fsdp", "use_custom_fsdp")
"""Megatron's and MindSpeed's flags with which a rank gathers weights that it does not hold."""


PLANNED = {
    "smart_swap": True,
    "adaptive_memory_optimization": True,
    "adaptive_recompute_device_swap": False,
    "adaptive_recompute_device_size": False,
}
"""Flags that ask for a plan within the device's memory -> whether it may move values to host memory. MindSpeed's
"device-swap" swaps while it profiles, and then recomputes alone."""


def _modules(args: Namespace) -> list[str]:
    return [name for name in SWAP_MODULES if name in (get(args, "swap_modules") or "self_attention")]


def swap_attention(args: Namespace) -> str:
    """Of ``--swap-attention``."""
    if not _modules(args):
        raise NotDone(f"--swap-modules names no part of a layer; valid: {', '.join(SWAP_MODULES)}")
    whole = get(args, "recompute_granularity") == "full"
    note = "; a layer that is recomputed whole keeps none of it" if whole else ""
    return f"what the backward reads of {', '.join(_modules(args))} waits in host memory{note}"


def swap_core(args: Namespace) -> str:
    """Of ``--mla-swap-core-attn-out``."""
    if not get(args, "multi_latent_attention"):
        raise NotDone("it is about latent attention; give --multi-latent-attention")
    if get(args, "recompute_granularity") == "full":
        return "no effect: a layer that is recomputed whole keeps none of it"
    return "what the backward reads of self_attention.core_attention waits in host memory"


def swap_input(args: Namespace) -> str:
    """Of ``--swap-layer-input``."""
    if not has_virtual_stages(args) and recomputed.most_layers(args) == 1:
        return "no effect: a rank has one layer, with which its backward begins"
    later = get(args, "pipeline_model_parallel_size", 1) > 1
    note = "; what a stage received stays, since Megatron's schedule holds it" if later else ""
    return f"the input of every layer but the last of a rank waits in host memory{note}"


def plan_memory(args: Namespace) -> str:
    """Of the flags of ``PLANNED``."""
    if not _planning(args):
        return "no effect: a size above 0 is expected"
    waits = "waits in host memory, or is made again where that is faster" if _moves(args) else "is made again"
    if (budget := _asked_budget()) is not None:
        return f"what memory_budget {budget!r} of the options has no room for {waits}"
    for flag in DIVIDED:
        if get(args, flag):
            raise NotDone(
                f"beside --{flag.replace('_', '-')}, whose gathered weights it does not count; give "
                'MINDSPEED_FX_OPTIONS={"memory_budget": ...} beside it'
            )
    size = get(args, "adaptive_recompute_device_size", -1)
    device = f"{size} MiB have" if size > 0 else f"the device, less {RESERVED / 2**30:g} GiB, has"
    return f"what {device} no room for beside weights, gradients and states of the optimizer {waits}"


def plans_memory(args: Namespace) -> bool:
    """Whether a flag asks for a plan within the device's memory, and the environment does not say how much that is."""
    return bool(_planning(args)) and _asked_budget() is None


def planning_flags(args: Namespace) -> str:
    """The flags that ask for it."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in _planning(args))


def _planning(args: Namespace) -> list[str]:
    return [name for name in PLANNED if (get(args, name) or 0) > 0]  # a size, or True


def _moves(args: Namespace) -> bool:
    return any(PLANNED[name] for name in _planning(args))


def options(args: Namespace) -> dict[str, Any]:
    """Options of the backend for these flags and those of :mod:`recomputed` together."""
    wishes = recomputed.wishes(args)
    names = _modules(args) if get(args, "swap_attention") else []
    names += ["self_attention.core_attention"] if get(args, "mla_swap_core_attn_out") else []
    globs = {f"layers.*.{name}": "offload" for name in names} | _inputs(args)
    if globs or _planning(args):
        asked = {"recompute": {**wishes, **globs}} if wishes or globs else {}
        moved = {"offload": True} if globs or _moves(args) else {}
        return {"memory_budget": _budget(args), **moved, **asked}
    if not wishes:
        return {}
    return {"recompute": wishes["policy"] if len(wishes) == 1 else wishes}


def _inputs(args: Namespace) -> dict[str, str]:
    """The layers of a chunk whose inputs are moved: MindSpeed leaves out the last one of a rank."""
    if not get(args, "swap_layer_input"):
        return {}
    stages = get(args, "virtual_pipeline_model_parallel_size") or 1
    is_last = recomputed.stage(args) == stages - 1
    count = recomputed.layers_of_chunk(args) - is_last
    return {f"decoder.layers.{n}": "offload_input" for n in range(count)}


def _asked_budget() -> float | int | str | None:
    """``memory_budget`` of the environment."""
    return Options.parse({}, os.environ).memory_budget


def _budget(args: Namespace) -> float | int | str:
    """The environment's, or what the device has room for, or 1.0, with which nothing but what is named is moved."""
    budget = _asked_budget()
    if budget is not None or not _planning(args):
        return 1.0 if budget is None else budget
    return getattr(args, GRAPH_MEMORY, 1.0)
