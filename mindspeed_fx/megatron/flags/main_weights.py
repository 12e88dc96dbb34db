"""When the two flags about an optimizer's memory can be done: ``--reuse-fp32-param`` and ``--swap-optimizer``."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_fx.megatron.flags.flag import NotDone, get

REUSE, SWAP = "--reuse-fp32-param", "--swap-optimizer"

READERS = {
    "use_precision_aware_optimizer": "keeps main weights in an optimizer of TransformerEngine's",
    "optimizer_cpu_offload": "steps copies of the weights on the host",
    "log_params_norm": "reads main weights between steps",
    "qk_clip": "writes main weights between steps",
    "fp8_param_gather": "keeps weights in 8 bits",
    "fp4_param_gather": "keeps weights in 4 bits",
    "use_megatron_fsdp": "has main weights of its own",
    "use_torch_fsdp2": "has main weights of its own",
    "rl_offload_optimizer_during_inference": "moves main weights and states itself",
}
"""Megatron's flags for which main weights, or states, lie elsewhere than these two take them to lie."""


def _refuse_conflicts(flag: str, args: Namespace) -> None:
    """Raises :class:`NotDone` where the flag cannot stand beside Megatron's."""
    for attribute, what in READERS.items():
        if get(args, attribute):
            other = "--" + attribute.replace("_", "-")
            raise NotDone(f"not done beside {other}, which {what}; remove one of the two")
    optimizer = get(args, "optimizer", "adam")
    if optimizer not in ("adam", "sgd"):
        raise NotDone(f"not done for --optimizer {optimizer}; give --optimizer adam or sgd, or remove {flag}")


def reuse_weights(args: Namespace) -> str:
    """Of ``--reuse-fp32-param``."""
    if get(args, "swap_optimizer"):
        raise NotDone(f"not done beside {SWAP}, which takes main weights to the host; remove one of the two")
    if get(args, "fp16"):
        raise NotDone("a float16 weight is no half of a float32 one; give --bf16 in place of --fp16, or remove it")
    if not get(args, "bf16"):
        return "the weights are float32, of which there is one copy"
    _refuse_conflicts(REUSE, args)
    return "between steps a main weight is its bfloat16 weight and 16 bits more"


def swap_states(args: Namespace) -> str:
    """Of ``--swap-optimizer``."""
    times = get(args, "swap_optimizer_times", 16)
    if times < 1:
        raise NotDone(f"--swap-optimizer-times {times}: expected at least 1, the parts of a step")
    if get(args, "async_save"):
        raise NotDone("not done beside --async-save, which reads what the next step writes; remove one of the two")
    _refuse_conflicts(SWAP, args)
    return f"between steps main weights and optimizer states wait on the host; a step has {times} parts"


def swap_times(args: Namespace) -> str:
    """Of ``--swap-optimizer-times``."""
    if not get(args, "swap_optimizer"):
        return f"no effect without {SWAP}"
    return f"read by {SWAP}"
