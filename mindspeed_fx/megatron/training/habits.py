"""Arguments that ask for CUDA extensions, Apex or TransformerEngine by Megatron's defaults, settled before Megatron
checks them: what the compiler does anyway is switched off there, and said in one line each.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable

from mindspeed_fx.megatron import fp8_linears, groups, patches
from mindspeed_fx.megatron.training import assertions

ARGUMENTS = "megatron.training.arguments:validate_args"
YAML = "megatron.training.yaml_arguments:validate_yaml"
CONFIG_FIELDS = "megatron.training.yaml_arguments:core_config_from_args"


@dataclass(frozen=True)
class Habit:
    """One argument that is changed.

    Args:
        name: of the argument in Megatron's namespace.
        asks: values at which it is changed.
        value: what it is set to.
        needs: module without which it cannot be had.
        why: what takes its place.
    """

    name: str
    asks: tuple[Any, ...]
    value: Any
    needs: str
    why: str


TE, APEX = "transformer_engine", "apex"
_FUSED = "the compiler fuses it"
PADDING = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
HABITS = (
    Habit("transformer_impl", ("transformer_engine",), "local", TE, "Megatron's local layers are compiled"),
    Habit("apply_rope_fusion", (True,), False, TE, _FUSED),
    Habit("moe_permute_fusion", (True,), False, TE, _FUSED),
    Habit("moe_router_fusion", (True,), False, TE, _FUSED),
    Habit("masked_softmax_fusion", (True,), False, "scaled_masked_softmax_cuda", "the compiler fuses attention"),
    Habit("no_persist_layer_norm", (False,), True, APEX, "the compiler fuses the norm"),
    Habit(
        "moe_grouped_gemm",
        (True,),
        False,
        TE,
        "the experts' products are one grouped product in the graph (sequential experts in a checkpoint)",
    ),
    *(Habit(name, (True,), False, TE, "experts' products take any number of rows") for name in PADDING),
)


def settle(args: Namespace | SimpleNamespace) -> list[str]:
    """Change what ``args`` ask for by habit; returns a line for each change."""
    lines = []
    for habit in HABITS:
        value = getattr(args, habit.name, None)
        if value not in habit.asks or importlib.util.find_spec(habit.needs) is not None:
            continue
        setattr(args, habit.name, habit.value)
        lines.append(f"{habit.name}={habit.value}: {habit.needs} is not installed; {habit.why}")
        if habit.name == "moe_grouped_gemm":
            lines += _leave_activation_to_the_partition(args)
    return lines + _settle_mask(args)


def _settle_mask(args: Namespace | SimpleNamespace) -> list[str]:
    """No mask where it says no more than that attention is causal: a ring knows that, and needs no squares of the
    sequence's length. (TransformerEngine, and MindSpeed, take no notice of such a mask.)
    """
    if getattr(args, "context_parallel_size", 1) == 1 or not getattr(
        args, "create_attention_mask_in_dataloader", False
    ):
        return []
    if getattr(args, "reset_attention_mask", False) or getattr(args, "attention_mask_type", "causal") != "causal":
        return []
    args.create_attention_mask_in_dataloader = False
    return ["create_attention_mask_in_dataloader=False: with context_parallel_size the causal mask is not data"]


def _leave_activation_to_the_partition(args: Namespace | SimpleNamespace) -> list[str]:
    """Megatron recomputes the activation of grouped experts alone, and refuses "moe_act" for others."""
    modules = getattr(args, "recompute_modules", None) or []
    if "moe_act" not in modules:
        return []
    args.recompute_modules = [m for m in modules if m != "moe_act"]
    return [
        f"recompute_modules={args.recompute_modules}: without moe_act; the compiler decides which activations of the "
        "experts are recomputed"
    ]


def _after_settling(name: str) -> Callable:
    """A check of arguments of Megatron's, after :func:`settle`."""

    def validate(args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        _settle_and_print(args)
        has_variable_lengths = getattr(args, "variable_seq_lengths", False)
        validated = check_hidden(patches.original(name), args, *rest, **kwargs)
        if has_variable_lengths:  # Megatron has no flag for it, and sets it to False here
            args.variable_seq_lengths = True
        return validated

    return validate


def check_hidden(check: Callable, args: Namespace, *rest: Any, **kwargs: Any) -> Any:
    """``check(args, ...)``, a check of Megatron's, which sees nothing of what it refuses and is done here."""
    hidden = _hidden(args)
    real = {name: getattr(args, name) for name in hidden}
    vars(args).update(hidden)
    validated = assertions.with_words(check, args, *rest, **kwargs)
    vars(args).update(real)
    return validated


def _hidden(args: Namespace) -> dict[str, bool]:
    """Arguments that Megatron refuses beside others -> what it takes."""
    result = {}
    if getattr(args, "mindspeed_layerzero", None) is not None:  # FSDP2's wrapper knows nothing of pipeline stages
        result["use_torch_fsdp2"] = False
    if getattr(args, "disable_gloo_group", False) and getattr(args, "ckpt_format", None) == "torch":
        result["enable_gloo_process_groups"] = True  # states that Megatron gathers by gloo alone (sliced_states)
    return result


def core_config_from_args(args: Namespace, dataclass: Any) -> dict[str, Any]:
    """``megatron.training.yaml_arguments.core_config_from_args``, where a file may leave out what has a default:
    Megatron's own check wants one field of the configuration outside of the sections, and then refuses it in them."""
    for field in dataclasses.fields(dataclass):
        if not hasattr(args, field.name) and field.default is not dataclasses.MISSING:
            setattr(args, field.name, field.default)
    return patches.original(CONFIG_FIELDS)(args, dataclass)


validate_args = _after_settling(ARGUMENTS)
validate_yaml = _after_settling(YAML)


def refuse(args: Namespace) -> None:
    """Arguments that cannot be had here.

    Raises:
        ValueError: one of them is asked for; the message names it.
    """
    _refuse_flex(args)
    fp8_linears.refuse(args)
    if getattr(args, "use_megatron_fsdp", False) and groups.kind() != "cuda":
        raise ValueError(
            f"--use-megatron-fsdp needs CUDA, which it names, and this is {groups.kind()}; --use-torch-fsdp2 "
            "divides weights, gradients and the optimizer's state, --use-distributed-optimizer the last"
        )


def _refuse_flex(args: Namespace) -> None:
    if getattr(args, "moe_token_dispatcher_type", None) != "flex":
        return
    backend = getattr(args, "moe_flex_dispatcher_backend", "deepep")
    module = FLEX.get(backend, backend)
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"--moe-token-dispatcher-type flex with --moe-flex-dispatcher-backend {backend} needs {module}, which is "
            "not installed; alltoall moves the same rows"
        )


FLEX = {"deepep": "deep_ep", "hybridep": "deep_ep"}
"""The module behind each backend of the dispatcher flex."""


def _settle_and_print(args: Namespace) -> None:
    refuse(args)
    sections = [x for x in vars(args).values() if isinstance(x, SimpleNamespace)]  # of a file of arguments
    for line in [line for x in (args, *sections) for line in settle(x)]:
        if getattr(args, "rank", 0) == 0:
            print(f"mindspeed_fx: {line}")
    if groups.kind() != "cuda" and getattr(args, "distributed_backend", None) == "nccl":
        args.distributed_backend = BACKENDS[groups.kind()]


BACKENDS = {"cpu": "gloo", "npu": "hccl"}
"""What takes the place of nccl, Megatron's default."""


def device_architecture() -> int:
    """``get_device_arch_version`` without CUDA: the first for which Megatron asks for no setting of CUDA's queues."""
    return 10
