"""Experts: which layers have them, shared ones, how they are placed."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_fx.megatron.flags.flag import (
    MEGATRON,
    OPTION,
    NotDone,
    count_layers,
    get,
    number,
    setting,
    switch,
)


def shared_size(args: Namespace) -> int:
    """Width of the shared experts together: n times that of one expert."""
    return args.n_shared_experts * (get(args, "moe_ffn_hidden_size") or args.ffn_hidden_size)


def _shared_experts(args: Namespace) -> str:
    if not (get(args, "moe_ffn_hidden_size") or get(args, "ffn_hidden_size")):
        raise NotDone("the width of an expert is not given; give --moe-ffn-hidden-size")
    size, other = shared_size(args), get(args, "moe_shared_expert_intermediate_size")
    if other not in (None, size):
        raise NotDone(f"it makes a width of {size}, and --moe-shared-expert-intermediate-size is {other}; remove one")
    args.moe_shared_expert_intermediate_size = size
    return f"moe_shared_expert_intermediate_size = {size}"


def expert_layers(layers: int, first: int, frequency: int) -> list[int]:
    """1 for a layer with experts: from layer ``first`` on, those whose number ``frequency`` divides.

    >>> expert_layers(4, 1, 1)
    [0, 1, 1, 1]
    """
    return [int(n >= first and n % frequency == 0) for n in range(layers)]


def _first_dense(args: Namespace) -> str:
    frequency, first = get(args, "moe_layer_freq", 1), args.first_k_dense_replace
    if not get(args, "num_experts") or not first or not frequency:
        return "no effect without experts, or at 0"
    if isinstance(frequency, list):
        raise NotDone("--moe-layer-freq names every layer already; remove one of the two")
    args.moe_layer_freq = expert_layers(count_layers(args), first, frequency)
    return f"moe_layer_freq = {_shorten(args.moe_layer_freq)}"


def _shorten(pattern: list[int]) -> str:
    """Runs of equal numbers as Megatron writes them: [0]*1+[1]*3."""
    runs: list[list[int]] = []
    for value in pattern:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return "+".join(f"[{value}]*{count}" for value, count in runs)


def _gate(args: Namespace) -> str:
    if get(args, "shared_expert_gate_output_dimension", 1) != 1:
        raise NotDone("Megatron's gate is one number for a token; give --shared-expert-gate-output-dimension 1")
    args.moe_shared_expert_gate = True
    return "moe_shared_expert_gate = True"


def _hot(args: Namespace) -> str:
    """--balanced-moe-experts (:mod:`mindspeed_fx.megatron.hot_experts`)."""
    experts, ranks = get(args, "num_experts"), get(args, "expert_model_parallel_size", 1)
    if not experts or ranks == 1:
        return "no effect without experts on other ranks"
    number, local = args.balanced_moe_hot_expert_num, experts // ranks
    if not 0 < number <= local:
        raise NotDone(
            f"{number} copies, and a rank has {local} experts; give --balanced-moe-hot-expert-num 1 to {local}"
        )
    if args.trans_hot_expert_group_num < 1:
        raise NotDone(f"--trans-hot-expert-group-num is {args.trans_hot_expert_group_num}; give 1 or more")
    if get(args, "moe_token_dispatcher_type") != "alltoall":
        raise NotDone("tokens are exchanged; give --moe-token-dispatcher-type alltoall")
    if (get(args, "expert_tensor_parallel_size") or get(args, "tensor_model_parallel_size", 1)) > 1:
        raise NotDone("experts are not divided; give --expert-tensor-parallel-size 1")
    for flag in NOT_BESIDE_HOT:
        if get(args, flag) not in (None, False, "disable"):
            raise NotDone(f"--{flag.replace('_', '-')} beside it; remove one of the two")
    if get(args, "add_bias_linear"):
        raise NotDone("copies have no bias; give --disable-bias-linear")
    args.gradient_accumulation_fusion = False
    return f"tokens of the {number} busiest experts stay on their ranks; gradient_accumulation_fusion = False"


NOT_BESIDE_HOT = (
    "moe_zero_memory",
    "moe_adaptive_recompute_activation",
    "moe_apply_probs_on_input",
    "gemm_gradient_accumulation_fusion",
    "moe_latent_size",
)
"""Arguments that balanced experts are not done with."""


def _placed(args: Namespace) -> str:
    """--enable-expert-placement (:mod:`mindspeed_fx.megatron.expert_placement`)."""
    if _is_alone(args):
        return "no effect without experts on other ranks"
    if args.expert_placement_freq < 1:
        raise NotDone(f"--expert-placement-freq is {args.expert_placement_freq}; give 1 or more")
    for flag in NOT_BESIDE_PLACEMENT:
        if get(args, flag) not in (None, False, "fused_adamw", "fused_torch_adamw"):
            raise NotDone(f"--{flag.replace('_', '-')} beside it; remove one of the two")
    return f"experts change ranks every {args.expert_placement_freq} iterations where loads are nearer each other then"


def _printed(args: Namespace) -> str:
    if _is_alone(args):
        return "no effect without experts on other ranks"
    return "tokens of every rank, layer by layer, every --log-interval iterations"


def _is_alone(args: Namespace) -> bool:
    if not get(args, "num_experts") or get(args, "expert_model_parallel_size", 1) == 1:
        return True
    if (get(args, "expert_tensor_parallel_size") or get(args, "tensor_model_parallel_size", 1)) > 1:
        raise NotDone("experts are not divided; give --expert-tensor-parallel-size 1")
    return False


NOT_BESIDE_PLACEMENT = (
    "overlap_param_gather",
    "reuse_fp32_param",
    "swap_optimizer",
    "o2_optimizer",
    "quant_states",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "optimizer_selection",
)
"""Arguments by which an optimizer keeps weights and states in a place or a form of its own."""

FLAGS = [
    number(
        "--first-k-dense-replace",
        None,
        MEGATRON,
        "the first k layers have no experts; of the others every --moe-layer-freq-th has",
        "`--moe-layer-freq`, with a number for every layer",
        act=_first_dense,
        shown_by="test_which_layers_have_experts",
        llm=True,
    ),
    number(
        "--n-shared-experts",
        None,
        MEGATRON,
        "experts that every token goes to",
        "`--moe-shared-expert-intermediate-size`: n times the width of an expert",
        act=_shared_experts,
        shown_by="test_which_layers_have_experts",
    ),
    switch(
        "--shared-expert-gate",
        MEGATRON,
        "shared experts times a sigmoid of the token",
        "`--moe-shared-expert-gate`",
        act=_gate,
        llm=True,
    ),
    number(
        "--shared-expert-gate-output-dimension",
        1,
        MEGATRON,
        "numbers of that gate",
        "1, or an error: Megatron's gate is one number",
        act=lambda args: "read by --shared-expert-gate",
        llm=True,
    ),
    switch(
        "--balanced-moe-experts",
        OPTION,
        "copies of experts with many tokens",
        "a rank keeps its tokens of the busiest experts, on copies of their weights, chosen in every layer and call; "
        "copies are one sum over ranks for each of the two weights, whatever --trans-hot-expert-group-num",
        act=_hot,
        skip=True,
        shown_by="test_hot_experts.py::test_two_ranks",
    ),
    setting("--balanced-moe-hot-expert-num", "--balanced-moe-experts", 3),
    setting("--trans-hot-expert-group-num", "--balanced-moe-experts", 3),
    switch(
        "--enable-expert-placement",
        OPTION,
        "experts placed by their tokens",
        "weights and optimizer states of experts move to ranks that have fewer tokens; checkpoints hold them where "
        "Megatron places them",
        act=_placed,
        skip=True,
        shown_by="test_expert_placement.py::test_two_ranks",
    ),
    setting("--expert-placement-freq", "--enable-expert-placement", 50),
    setting("--enable-fine-grained-expert-placement", "--enable-expert-placement"),
    setting("--fine-grained-expert-placement-thre", "--enable-expert-placement", 0.08),
    switch(
        "--print-expert-load",
        OPTION,
        "tokens of every expert are printed",
        "mean tokens of every rank of experts, a line for each layer",
        act=_printed,
        skip=True,
    ),
]
"""Rows of the table."""
