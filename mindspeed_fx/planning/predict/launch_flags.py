"""Settings of a Megatron or MindSpeed launch, read from its flags."""

from __future__ import annotations

from typing import Any, Sequence

from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.predict.architecture import check_flags, check_numbers, values_of
from mindspeed_fx.planning.predict.settings import Settings

SIZES = {
    "--seq-length": "sequence",
    "--micro-batch-size": "microbatch",
    "--global-batch-size": "batch",
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
}
NUMBERS = (
    "--num-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--recompute-num-layers",
    "--lora-r",
    "--coc-parallel-num",
    "--output-layer-slice-num",
)
SWITCHES = {
    "--overlap-grad-reduce": "overlap_gradients",
    "--overlap-param-gather": "overlap_parameters",
    "--use-ascend-mc2": "overlap_tp",
    "--use-mc2": "overlap_tp",
    "--use-ascend-coc": "overlap_tp",
    "--recompute-activation-function": "recompute_activation",
    "--reuse-fp32-param": "reuse_float32",
    "--enable-recompute-layers-per-pp-rank": "recompute_per_rank",
    "--recompute-norm": "recompute_norms",
}
FUSED_FLAGS = {
    "--use-flash-attn": "attention",
    "--use-fused-rmsnorm": "rms_norm",
    "--use-fused-swiglu": "swiglu",
    "--use-fused-rotary-pos-emb": "rope",
}
CP_KINDS = {"ulysses": "ulysses", "hybrid": "hybrid", "kvallgather": "kv_allgather"}


def settings_from_flags(flags: Sequence[str], devices: int) -> Settings:
    """The settings of a launch on ``devices`` ranks.

    Raises:
        OptionError: sizes that are missing, no numbers, or do not divide each other.
    """
    check_flags(flags)
    texts = values_of(flags)
    check_numbers(texts, (*SIZES, *NUMBERS))
    if not texts.get("--seq-length"):
        raise OptionError("the launch has no --seq-length: a step cannot be told without it")
    values: dict[str, Any] = {field: int(texts[flag]) for flag, field in SIZES.items() if texts.get(flag)}
    values |= {field: True for flag, field in SWITCHES.items() if flag in texts}
    pp, layers = values.get("pp", 1), int(texts.get("--num-layers") or 0)
    if (chunk := int(texts.get("--num-layers-per-virtual-pipeline-stage") or 0)) and pp > 1:
        values["vpp"] = max(1, layers // pp // chunk)
    elif (count := int(texts.get("--num-virtual-stages-per-pipeline-rank") or 0)) and pp > 1:
        values["vpp"] = count
    granularity = texts.get("--recompute-granularity", "none")
    values["recompute"] = granularity if granularity in ("full", "selective") else "none"
    if texts.get("--recompute-method") == "block":
        values["recompute_layers"] = int(texts.get("--recompute-num-layers") or 0)
    values["loss_chunks"] = int(texts.get("--output-layer-slice-num") or 1)
    if (level := texts.get("--moe-zero-memory", "disable")) != "disable":
        values["expert_memory"] = level
    values["empty_layers"] = tuple(int(n) for n in texts.get("--noop-layers", "").split(",") if n.strip().isdigit())
    algorithm = texts.get("--context-parallel-algo", "")
    if "--use-ascend-coc" in texts:
        values["tp_chunks"] = int(texts.get("--coc-parallel-num") or 1)
    values["cp_kind"] = next((kind for word, kind in CP_KINDS.items() if algorithm.startswith(word)), "ring")
    values["dispatcher"] = "allgather" if texts.get("--moe-token-dispatcher-type") == "allgather" else "alltoall"
    sharded = "--use-custom-fsdp" in texts or "--use-torch-fsdp2" in texts
    values["zero"] = 3 if sharded else 1 if "--use-distributed-optimizer" in texts else 0
    values["sequence_parallel"] = "--sequence-parallel" in texts or values.get("tp", 1) == 1
    values["precision"] = "float16" if "--fp16" in texts else "bfloat16" if "--bf16" in texts else "float32"
    values["float32_gradients"] = not {"--fp16", "--grad-reduce-in-bf16"} & texts.keys()
    fused = [name for flag, name in FUSED_FLAGS.items() if flag in texts]
    if "--gemm-gradient-accumulation-fusion" in texts:
        fused.append("matmul_add")
    values["fused"] = tuple(fused)
    is_plain = not {"--swiglu", "--geglu", "--squared-relu", "--disable-bias-linear"} & texts.keys()
    values["gelu_chain"] = is_plain and "--no-bias-gelu-fusion" not in texts
    if "--swap-attention" in texts:
        values["offload"] = "attention"
    if "--swap-optimizer" in texts:
        values["offload"] = "optimizer"
    if "--moe-tp-extend-ep" in texts:
        values["etp"] = 1
    values["dropout"] = texts.get("--hidden-dropout", "0.1") not in ("0", "0.0")
    values["lora"] = int(texts.get("--lora-r") or 0)
    return Settings(devices=devices, **values)
