"""Pairs of features that MindSpeed refuses together, by its own checks (``validate_args`` of its features, July 2026).

A run that asks for both ends with an error that names both, as there. Where the two work together here the pair stands
in the table all the same, with the reason why nothing is refused. ``mindspeed-fx flags --conflicts`` prints
docs/mindspeed_conflicts.md.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Callable, Collection

from mindspeed_fx.megatron.flags.flag import get
from mindspeed_fx.megatron.flags.table import BY_KEY

Asked = Callable[[Namespace], bool]


@dataclass(frozen=True)
class Conflict:
    """Two features of which MindSpeed takes one."""

    first: str
    """A flag of MindSpeed's, or "--flag value"."""
    second: str
    """Another, or one of Megatron's (:data:`OF_MEGATRON`)."""
    why: str
    """What of the one does not go with the other."""
    done: str = ""
    """Why the two are not refused here; "": they are."""

    def is_asked(self, args: Namespace, skipped: Collection[str] = ()) -> bool:
        """Whether a run asks for both, and leaves neither aside."""
        return not {self.first, self.second} & set(skipped) and _asks(self.first, args) and _asks(self.second, args)

    @property
    def text(self) -> str:
        """What the user is told of ``first``."""
        return f"MindSpeed does not take it beside {self.second}: {self.why}; remove one of the two"


def _whole(attribute: str, above: int = 0) -> Asked:
    return lambda args: (get(args, attribute) or 0) > above


def _is(attribute: str, value: str) -> Asked:
    return lambda args: get(args, attribute) == value


def _given(attribute: str) -> Asked:
    return lambda args: bool(get(args, attribute))


OF_MEGATRON: dict[str, Asked] = {
    "--overlap-grad-reduce": _given("overlap_grad_reduce"),
    "--overlap-param-gather": _given("overlap_param_gather"),
    "--sequence-parallel": _given("sequence_parallel"),
    "--expert-model-parallel-size": _whole("expert_model_parallel_size", 1),
    "--num-experts": _whole("num_experts", 1),
    "--normalization LayerNorm": _is("normalization", "LayerNorm"),
    "--load": _given("load"),
    "--recompute-granularity": _given("recompute_granularity"),
    "--recompute-granularity selective": _is("recompute_granularity", "selective"),
    "--moe-expert-capacity-factor": lambda args: get(args, "moe_expert_capacity_factor") is not None,
    "--multi-latent-attention": _given("multi_latent_attention"),
    "--pipeline-model-parallel-layout": _given("pipeline_model_parallel_layout"),
    "--fp16": _given("fp16"),
    "--use-torch-fsdp2": _given("use_torch_fsdp2"),
    "--use-legacy-models": _given("use_legacy_models"),
    "--use-nanopipe": _given("use_nanopipe"),
    "--save": _given("save"),
    "--context-parallel-size": _whole("context_parallel_size", 1),
    "--num-layers-per-virtual-pipeline-stage": _whole("num_layers_per_virtual_pipeline_stage"),
    "--optimizer muon": _is("optimizer", "muon"),
}
"""Flags that are Megatron's own: when a run asks for them."""
OF_VALUES: dict[str, Asked] = {
    "--optimizer-selection fused_ema_adamw": _is("optimizer_selection", "fused_ema_adamw"),
    "--ampipe-degree": _whole("ampipe_degree", 1),
    "--moe-model-type deepspeed_moe": _is("moe_model_type", "deepspeed_moe"),
    "--adaptive-recompute-device-size": _whole("adaptive_recompute_device_size"),
    "--moe-zero-memory": lambda args: get(args, "moe_zero_memory", "disable") != "disable",
    "--moe-zero-memory-num-layers": lambda args: get(args, "moe_zero_memory_num_layers") is not None,
    "--schedules-method": _is("schedules_method", "dualpipev"),
    "--virtual-optimizer": lambda args: get(args, "virtual_optimizer") is not None,
}
"""Flags of MindSpeed's that ask for something by some values alone."""


def _asks(name: str, args: Namespace) -> bool:
    asked = OF_MEGATRON.get(name) or OF_VALUES.get(name)
    return asked(args) if asked is not None else BY_KEY[name].is_requested(args, frozenset())


def _pairs(first: str, why: str, *seconds: str) -> list[Conflict]:
    return [Conflict(first, second, why) for second in seconds]


SCHEDULE = "both set the order of the pipeline's passes"
ADAPTIVE = "both choose what is kept and what is recomputed or swapped"
ONE_FUSION = "both take the products and their collectives"
EMA = "the averages lie in the optimizer's states, which the other stores in a form of its own"
LAYOUT = "both say which stage has which layers"

CONFLICTS: list[Conflict] = [
    *_pairs("--use-ascend-mc2", ONE_FUSION, "--use-ascend-coc", "--use-pipe-experts"),
    *_pairs("--use-ascend-mc2", "its products have even shards", "--unaligned-linear"),
    *_pairs("--use-ascend-mc2", "its layers have no gradient of weights of their own", "--use-nanopipe"),
    *_pairs(
        "--use-ascend-mc2",
        "experts' collectives are hidden in another way",
        "--moe-alltoall-overlap-comm",
        "--moe-allgather-overlap-comm",
        "--moe-alltoall-mc2",
    ),
    *_pairs("--use-ascend-coc", "its products have even shards", "--unaligned-linear"),
    *_pairs("--tp-2d", "tokens are divided along two directions already", "--sequence-parallel"),
    *_pairs("--tp-2d", "a norm's rows are divided, and its sums sent", "--use-fused-rmsnorm"),
    *_pairs("--tp-2d", "its linear layers are its own", "--use-nanopipe", "--use-ascend-coc", "--unaligned-linear"),
    *_pairs("--tp-2d", "experts have no second direction", "--expert-model-parallel-size"),
    *_pairs("--tp-2d", "both divide attention and its neighbours", "--ampipe-degree"),
    *_pairs(
        "--ampipe-degree",
        "layers do not run one after the other",
        "--use-ascend-mc2",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--use-nanopipe",
    ),
    *_pairs(
        "--moe-model-type deepspeed_moe",
        "it is about the exchanges of Megatron's experts",
        "--moe-permutation-async-comm",
        "--moe-bmm-mc2",
    ),
    *_pairs(
        "--moe-model-type deepspeed_moe",
        "its experts' products and collectives are its own",
        "--use-ascend-mc2",
        "--use-ascend-coc",
    ),
    *_pairs("--unaligned-linear", "experts' layers have even shards", "--num-experts"),
    *_pairs("--use-nd-matmul", "rows of a norm are divided", "--use-fused-rmsnorm", "--normalization LayerNorm"),
    *_pairs("--use-nd-matmul", "weights have another form than those that were saved", "--load"),
    *_pairs(
        "--moe-fb-overlap",
        SCHEDULE,
        "--use-nanopipe",
        "--automated-pipeline",
        "--recompute-in-bubble",
        "--recompute-in-advance",
        "--use-multiparameter-pipeline-model-parallel",
    ),
    *_pairs("--moe-fb-overlap", "experts' exchanges are hidden in another way", "--moe-alltoall-overlap-comm"),
    *_pairs("--moe-fb-overlap", "experts' exchanges are hidden in another way", "--moe-alltoall-mc2"),
    *_pairs("--moe-fb-overlap", "experts lie over the tensor-parallel ranks", "--moe-tp-extend-ep"),
    *_pairs("--moe-fb-overlap", "layers of two levels have no one schedule", "--moe-zero-memory-num-layers"),
    *_pairs("--moe-fb-overlap", "a layer's parts do not run one after the other", "--swap-attention"),
    *_pairs("--moe-fb-overlap", "gradients of two micro-batches are made in turns", "--overlap-grad-reduce"),
    *_pairs("--moe-fb-overlap", "layers of legacy models have no parts", "--use-legacy-models"),
    *_pairs(
        "--moe-alltoall-mc2",
        "experts' exchanges are hidden in another way",
        "--moe-alltoall-overlap-comm",
        "--moe-allgather-overlap-comm",
        "--moe-tp-extend-ep",
    ),
    *_pairs(
        "--moe-bmm-mc2",
        "experts' exchanges are hidden in another way",
        "--moe-alltoall-overlap-comm",
        "--moe-tp-extend-ep",
    ),
    *_pairs("--moe-zero-memory", "gathered tokens are not made again", "--moe-allgather-overlap-comm"),
    *_pairs(
        "--moe-adaptive-recompute-activation",
        "that dispatcher has no counts of all ranks",
        "--moe-token-dispatcher-type alltoall_seq",
    ),
    *_pairs("--balanced-moe-experts", "tokens are not dropped", "--moe-expert-capacity-factor"),
    *_pairs("--moe-tp-extend-ep", "tokens are not dropped", "--moe-expert-capacity-factor"),
    *_pairs("--recompute-in-bubble", SCHEDULE, "--recompute-in-advance", "--ampipe-degree"),
    *_pairs("--recompute-in-bubble", "messages go in pairs", "--optimize-send-recv-comm"),
    *_pairs("--recompute-in-bubble", ADAPTIVE, "--adaptive-recompute-device-size", "--adaptive-memory-optimization"),
    *_pairs("--recompute-in-advance", SCHEDULE, "--ampipe-degree"),
    *_pairs("--recompute-in-advance", "messages go in pairs", "--optimize-send-recv-comm"),
    *_pairs("--recompute-in-advance", ADAPTIVE, "--adaptive-recompute-device-size"),
    *_pairs("--pipeline-num-transformer-layers", LAYOUT, "--num-layer-list", "--pipeline-model-parallel-layout"),
    *_pairs("--noop-layers", LAYOUT, "--pipeline-num-transformer-layers", "--pipeline-model-parallel-layout"),
    *_pairs(
        "--schedules-method", LAYOUT, "--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"
    ),
    *_pairs("--schedules-method", "stages send one tensor", "--use-multiparameter-pipeline-model-parallel"),
    *_pairs("--schedules-method", "stages send whole hidden states", "--tp-2d"),
    *_pairs("--schedules-method", "weights are in shards", "--use-custom-fsdp"),
    *_pairs(
        "--schedules-method",
        "its order has no place where parameters are gathered, and Megatron gathers them so beside "
        "--overlap-grad-reduce alone, which MindSpeed refuses here",
        "--overlap-param-gather",
    ),
    *_pairs("--swap-attention", ADAPTIVE, "--adaptive-recompute-device-size", "--adaptive-memory-optimization"),
    *_pairs("--smart-swap", ADAPTIVE, "--adaptive-recompute-device-size"),
    *_pairs("--recompute-activation-function", ADAPTIVE, "--compress-dense"),
    *_pairs("--optimizer-selection fused_ema_adamw", EMA, "--compress-optimizer", "--virtual-optimizer"),
    *_pairs("--reuse-fp32-param", EMA, "--optimizer-selection fused_ema_adamw"),
    *_pairs("--reuse-fp32-param", "its weights are in shards", "--enable-zero3"),
    *_pairs("--swap-optimizer", "main weights are taken to the host", "--reuse-fp32-param"),
    *_pairs("--enable-zero3", "its weights are in shards", "--use-ascend-mc2", "--use-pipe-experts"),
    *_pairs("--auto-settings", "it runs many short trainings", "--load", "--save"),
    Conflict(
        "--op-cal-tflops",
        "--multi-latent-attention",
        "its formula is that of plain attention",
        "the graphs count their own products, whatever the attention is",
    ),
    Conflict(
        "--schedules-method",
        "--overlap-grad-reduce",
        "gradients of both chunks are made in turns",
        "buckets of a chunk are reduced from its last micro-batch's backward on",
    ),
    Conflict(
        "--schedules-method",
        "--swap-attention",
        "chunks do not run one after the other",
        "what moves is a part of each chunk's graph, whose backward brings it back; the losses of the run without",
    ),
    Conflict(
        "--schedules-method",
        "--context-parallel-size",
        "stages send whole sequences",
        "messages have a rank's part of the sequence; losses of the interleaved schedule, ulysses and rings",
    ),
    Conflict(
        "--recompute-activation-function",
        "--recompute-granularity selective",
        "both choose what of a layer is recomputed",
        "policies of recomputation are joined; MindSpeed's features of 2026 no longer refuse it either",
    ),
    Conflict(
        "--recompute-norm",
        "--recompute-granularity selective",
        "both choose what of a layer is recomputed",
        "policies of recomputation are joined; MindSpeed's features of 2026 no longer refuse it either",
    ),
]

HEAD = """# Conflicts

Pairs of features of which MindSpeed takes one, by the checks of its own code (July 2026). A run that asks for both ends
before Megatron checks its arguments, with an error that names both. Pairs that are done here although MindSpeed refuses
them say why. `mindspeed-fx flags --conflicts` prints this page; each row is a case of
`tests/megatron/flags/test_conflicts.py`.

| feature | beside | why | here |
|---|---|---|---|
"""


def page() -> str:
    """docs/mindspeed_conflicts.md."""
    return HEAD + "".join(
        f"| `{c.first}` | `{c.second}` | {c.why} | {f'done: {c.done}' if c.done else 'refused'} |\n" for c in CONFLICTS
    )


def conflicts_of(args: Namespace, skipped: Collection[str] = ()) -> list[Conflict]:
    """The pairs that a run asks for and that are refused; before Megatron's arguments are set, which hides what was
    asked.

    Args:
        args: parsed.
        skipped: flags that the run goes on without.
    """
    return [c for c in CONFLICTS if not c.done and c.is_asked(args, skipped)]
