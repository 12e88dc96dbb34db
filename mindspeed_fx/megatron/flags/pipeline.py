"""Pipeline stages: which layers a rank holds, and in which order it runs them."""

from __future__ import annotations

import re
from argparse import Namespace

from mindspeed_fx.megatron.flags.flag import (
    MEGATRON,
    OPTION,
    REFUSED,
    Flag,
    NotDone,
    count_layers,
    get,
    has_virtual_stages,
    setting,
    switch,
    word,
)


def stage_counts(args: Namespace) -> list[int]:
    """Layers of every stage, in the order of the layers: virtual stage by virtual stage, rank by rank.

    Raises:
        NotDone: the layers do not divide.
    """
    layers, ranks = count_layers(args), get(args, "pipeline_model_parallel_size", 1)
    per_stage = get(args, "num_layers_per_virtual_pipeline_stage")
    stages = layers // per_stage if per_stage else ranks * (get(args, "num_virtual_stages_per_pipeline_rank") or 1)
    if layers % stages:
        raise NotDone(f"{layers} layers do not divide over {stages} stages")
    return [layers // stages] * stages


def layout(counts: list[int], mtp_layers: int | None) -> str:
    """Megatron's text for layers of every stage: "Ett|tt|tmL" for 2, 2, 1 and one layer of multi-token prediction.

    >>> layout([2, 2, 1], 1)
    'Ett|tt|tmL'
    """
    stages = ["t" * count for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * (mtp_layers or 0) + "L"
    return "|".join(stages)


def set_layout(args: Namespace, counts: list[int]) -> str:
    """Places layers by Megatron's layout, in place of the flags that divide them evenly."""
    args.num_layers = sum(counts)
    if len(counts) == 1:
        return f"num_layers = {args.num_layers}"
    args.num_layers_per_virtual_pipeline_stage = args.num_virtual_stages_per_pipeline_rank = None
    args.mindspeed_virtual_stages = len(counts) // get(args, "pipeline_model_parallel_size", 1)
    args.pipeline_model_parallel_layout = layout(counts, get(args, "mtp_num_layers"))
    return f"num_layers = {args.num_layers}, pipeline_model_parallel_layout = {args.pipeline_model_parallel_layout}"


def noop_layers(args: Namespace) -> list[int]:
    """The layers that return their input."""
    words, layers = (get(args, "noop_layers") or "").split(","), count_layers(args)
    if not all(w.strip().isdigit() and int(w) < layers for w in words):
        raise NotDone(f"{args.noop_layers!r}: numbers of layers from 0 to {layers - 1} are expected, as in 0,63")
    return sorted({int(w) for w in words})


def _leave_out(args: Namespace) -> str:
    """Layers that return their input are left out; the other layers stay where they were, and start as they would."""
    for attribute in ("pipeline_model_parallel_layout", "window_attn_skip_freq", "no_rope_freq"):
        if get(args, attribute) is not None:
            raise NotDone(
                f"--{attribute.replace('_', '-')} counts layers too; give it for the real layers, without no-ops"
            )
    skipped, total = noop_layers(args), args.num_layers
    counts, first = [], 0
    for count in stage_counts(args):
        counts.append(count - len([n for n in skipped if first <= n < first + count]))
        first += count
    if isinstance(get(args, "moe_layer_freq"), list):
        args.moe_layer_freq = [f for n, f in enumerate(args.moe_layer_freq) if n not in skipped]
    elif (get(args, "moe_layer_freq") or 1) != 1:
        args.moe_layer_freq = [int(n % args.moe_layer_freq == 0) for n in range(total) if n not in skipped]
    args.mindspeed_init_layers = total  # MindSpeed counts the no-ops
    return set_layout(args, counts)


def _layer_list(args: Namespace) -> str:
    """Layers of every rank."""
    if get(args, "noop_layers"):
        return "no effect beside --noop-layers, as in MindSpeed-LLM"
    counts, ranks = [int(w) for w in args.num_layer_list.split(",")], get(args, "pipeline_model_parallel_size", 1)
    if len(counts) != ranks or ranks < 2:
        raise NotDone(
            f"{args.num_layer_list}: one number for each of {ranks} pipeline ranks, of at least 2, is expected"
        )
    if get(args, "num_layers_per_virtual_pipeline_stage"):
        raise NotDone("it has no virtual stages; remove --num-layers-per-virtual-pipeline-stage")
    if sum(counts) != count_layers(args):
        raise NotDone(f"{args.num_layer_list} makes {sum(counts)} layers, and --num-layers is {args.num_layers}")
    return set_layout(args, counts)


def parse_counts(text: str) -> list[list[int]]:
    """Layers of every rank and virtual stage.

    >>> parse_counts("[[0,1],[1,1]*2,[3,0]]")
    [[0, 1], [1, 1], [1, 1], [3, 0]]
    """
    ranks = [
        [[int(n) for n in re.findall(r"\d+", row)]] * int(times or 1)
        for row, times in re.findall(r"\[([\d,\s]*)\](?:\s*\*\s*(\d+))?", text)
    ]
    return [row for rows in ranks for row in rows]


def _unaligned(args: Namespace) -> str:
    rows, ranks = parse_counts(args.pipeline_num_transformer_layers), get(args, "pipeline_model_parallel_size", 1)
    if len(rows) != ranks or len({len(row) for row in rows}) != 1:
        raise NotDone(f"{args.pipeline_num_transformer_layers}: {ranks} lists of one length are expected")
    total = sum(map(sum, rows))
    if total != count_layers(args):
        raise NotDone(f"it makes {total} layers, and --num-layers is {args.num_layers}")
    return set_layout(args, [row[stage] for stage in range(len(rows[0])) for row in rows])


def _check_virtual(args: Namespace) -> None:
    if get(args, "pipeline_model_parallel_size", 1) < 2 or not has_virtual_stages(args):
        raise NotDone("it is about virtual stages; give --num-layers-per-virtual-pipeline-stage")
    if get(args, "moe_fb_overlap"):
        raise NotDone("--moe-fb-overlap beside it, which has a schedule of its own; remove one of the two")


NOT_IN_V = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "num_layer_list",
    "pipeline_num_transformer_layers",
    "overlap_param_gather",
    "recompute_in_bubble",
    "recompute_in_advance",
    "use_nanopipe",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "defer_embedding_wgrad_compute",
)


def _v_shape(args: Namespace) -> str:
    """Two chunks a rank, of which the second is Megatron's of the rank opposite."""
    ranks = get(args, "pipeline_model_parallel_size", 1) or 1
    if ranks < 2:
        raise NotDone("it is about pipeline ranks; give --pipeline-model-parallel-size")
    for flag in NOT_IN_V:
        if get(args, flag):
            raise NotDone(f"--{flag.replace('_', '-')} beside it; remove one of the two")
    for flag in ("dualpipev_dw_detach", "moe_fb_overlap"):
        if get(args, "overlap_grad_reduce") and get(args, flag):
            raise NotDone(f"--overlap-grad-reduce and --{flag.replace('_', '-')} beside it; remove one of the two")
    if count_layers(args) % (2 * ranks):
        raise NotDone(f"{args.num_layers} layers do not divide over {2 * ranks} stages, two for each pipeline rank")
    args.num_virtual_stages_per_pipeline_rank = 2
    text = f"rank r has stages r and {2 * ranks - 1} - r"
    if not get(args, "dualpipev_dw_detach"):
        return text
    for flag in ("gemm_gradient_accumulation_fusion", "reuse_fp32_param"):
        if get(args, flag):
            raise NotDone(f"--{flag.replace('_', '-')} beside --dualpipev-dw-detach; remove one of the two")
    args.gradient_accumulation_fusion = False
    return f"{text}; late gradients of weights where its order has them; gradient_accumulation_fusion = False"


def _in_bubble(args: Namespace) -> str:
    _check_virtual(args)
    if get(args, "recompute_in_advance"):
        raise NotDone("--recompute-in-advance beside it: MindSpeed takes one of the two")
    if get(args, "recompute_granularity") is not None:
        raise NotDone("it chooses by itself what is recomputed; remove --recompute-granularity")
    for flag in ("swap_attention", "moe_adaptive_recompute_activation"):
        if get(args, flag):
            raise NotDone(f"--{flag.replace('_', '-')} beside it: MindSpeed takes one of the two")
    return "a rank keeps as many chunks as there are virtual stages on all ranks, and recomputes the others early"


def _in_advance(args: Namespace) -> str:
    _check_virtual(args)
    if get(args, "recompute_granularity") != "full" or get(args, "recompute_method") != "block":
        raise NotDone(
            "it is about layers that are recomputed whole; give --recompute-granularity full and method block"
        )
    if not get(args, "recompute_num_layers"):
        raise NotDone("it is about layers that are recomputed whole; give --recompute-num-layers")
    return "chunks that are recomputed whole are so before their gradient is waited for"


def _late_weights(args: Namespace) -> str:
    _check_virtual(args)
    refused = (
        "recompute_in_bubble",
        "recompute_in_advance",
        "overlap_grad_reduce",
        "gemm_gradient_accumulation_fusion",
    )
    for flag in (*refused, "overlap_param_gather", "reuse_fp32_param", "use_megatron_fsdp", "use_torch_fsdp2"):
        if get(args, flag):
            raise NotDone(f"--{flag.replace('_', '-')} beside it; remove one of the two")
    args.gradient_accumulation_fusion = False
    return "gradients of a chunk's weights are made while the rank waits; gradient_accumulation_fusion = False"


def _swapped_weights(args: Namespace) -> str:
    if not get(args, "use_nanopipe"):
        raise NotDone("it is about late gradients of weights; give --use-nanopipe")
    return "what they read waits in host memory; one put off is on its way, one is back before it runs"


def _variable_lengths(args: Namespace) -> str:
    """Megatron-core refuses it beside --moe-token-dispatcher-type allgather, its default, also without experts."""
    args.variable_seq_lengths = True
    if get(args, "moe_token_dispatcher_type") != "allgather":
        return "variable_seq_lengths = True"
    if get(args, "num_experts"):
        raise NotDone("experts exchange tokens of one number on every rank; give --moe-token-dispatcher-type alltoall")
    args.moe_token_dispatcher_type = "alltoall"
    return "variable_seq_lengths = True, moe_token_dispatcher_type = alltoall, which no layer reads"


def _several_tensors(args: Namespace) -> str:
    if get(args, "schedules_method"):
        raise NotDone("--schedules-method beside it: MindSpeed takes one of the two")
    if has_virtual_stages(args):
        raise NotDone("Megatron's schedule of virtual stages sends one tensor; remove the virtual stages")
    return "a stage's list of tensors is sent, and its backward begins at all of them; hidden states alone by default"


FLAGS = [
    word(
        "--schedules-method",
        None,
        OPTION,
        "dualpipev: a rank has two chunks in V shape, forwards and backwards of both run beside each other",
        "torch's order of DualPipeV over Megatron's chunks, the last stage on the first rank; the same values; two "
        "micro-batches a rank or more; with `--dualpipev-dw-detach` late gradients of weights, option "
        '`codegen="eager"`',
        act=_v_shape,
        options=lambda args: {"codegen": "eager"} if get(args, "dualpipev_dw_detach") else {},
        choices=("dualpipev",),
        skip=True,
    ),
    setting("--dualpipev-dw-detach", "--schedules-method"),
    word(
        "--num-layer-list",
        None,
        MEGATRON,
        "layers of every pipeline rank, as in 17,20,22,21",
        "`--pipeline-model-parallel-layout`",
        act=_layer_list,
    ),
    word(
        "--pipeline-num-transformer-layers",
        None,
        MEGATRON,
        "layers of every rank and virtual stage, as in [[0,1],[1,1]*2,[3,0]]",
        "`--pipeline-model-parallel-layout`",
        act=_unaligned,
    ),
    word(
        "--noop-layers",
        None,
        MEGATRON,
        "layers that return their input, so that a stage has less to do",
        "they are left out: fewer layers, `--pipeline-model-parallel-layout`; weights start as in a model with them",
        act=_leave_out,
        shown_by="test_layers_without_no_ops_stay_in_their_stages",
    ),
    switch(
        "--variable-seq-lengths",
        MEGATRON,
        "stages send the shape before the values",
        "variable_seq_lengths of Megatron-core's configuration",
        act=_variable_lengths,
    ),
    switch(
        "--recompute-in-bubble",
        OPTION,
        "layers made again while a rank waits, so that fewer chunks are kept",
        "chunks beyond ranks times virtual stages that are kept are recomputed before a gradient is waited for; not "
        "beside recomputation",
        act=_in_bubble,
        skip=True,
    ),
    switch(
        "--recompute-in-advance",
        OPTION,
        "layers made again before their gradient arrives",
        "chunks whose layers are all recomputed, before their gradient is waited for, the last of the model not at "
        "all; others as Megatron has it",
        act=_in_advance,
        skip=True,
    ),
    switch(
        "--use-nanopipe",
        OPTION,
        "weight gradients fill the waiting time",
        'the gradient of a chunk\'s input first, those of weights later; option `codegen="eager"`, '
        "`--no-gradient-accumulation-fusion`; not beside `--overlap-grad-reduce`",
        act=_late_weights,
        options=lambda args: {"codegen": "eager"},
        skip=True,
    ),
    switch(
        "--use-nanopipe-swap",
        OPTION,
        "what late weight gradients read waits in host memory",
        "copied to the host when it is put off, and back while the one before it runs; tensors of 1 MiB and more",
        act=_swapped_weights,
        skip=True,
    ),
    switch(
        "--use-multiparameter-pipeline-model-parallel",
        MEGATRON,
        "stages send several tensors",
        "the shapes are those that the model's provider writes to args.pipeline_tensor_shapes, of one type; without "
        "virtual stages",
        act=_several_tensors,
    ),
    switch(
        "--automated-pipeline",
        REFUSED,
        "layers of stages and recomputation found by profiling",
        "remove it; `mindspeed-fx plan` searches stages, option `memory_budget` plans recomputation",
        skip=True,
    ),
    switch(
        "--automated-pipeline-perf",
        REFUSED,
        "sizes of microbatches found by profiling",
        "remove it; `mindspeed-fx plan` searches plans by its cost model",
        skip=True,
    ),
    setting("--save-memory-ratio", "--automated-pipeline", 0.2),
    setting("--recompute-module-list", "--automated-pipeline", None, str),
    setting("--recompute-type", "--automated-pipeline", 2),
    setting("--optimized-mbs-list", "--automated-pipeline-perf", None, str),
    Flag(
        "--optimized-mbs-mode",
        REFUSED,
        "a setting of `--automated-pipeline-perf`",
        "what becomes of `--automated-pipeline-perf`; without that flag it has no effect",
        action="store_false",
        default=True,
        of="--automated-pipeline-perf",
    ),
    setting("--pp-schedule-list", "--automated-pipeline-perf", None, str),
    setting("--mbs-idx", "--automated-pipeline-perf", None, int),
]
"""Rows of the table."""
