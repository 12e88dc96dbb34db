"""Rows of Ascend runs: MindSpeed-LLM's tables and tests (Megatron's flags) and MindFormers' model cards (MindSpore)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from benchmarks.published_cells import Case, Unreadable, number, pad, truth, vocabulary
from benchmarks.published_scripts import launch_of
from mindspeed_fx.planning.predict import Architecture, Settings
from mindspeed_fx.planning.predict.architecture import from_flags, values_of
from mindspeed_fx.planning.predict.launch_flags import CP_KINDS, settings_from_flags

FUSED = {"fa": "attention", "fused_rmsnorm": "rms_norm", "fused_swiglu": "swiglu", "fused_rope": "rope"}
FEATURES = {
    "tp2d": "tensor parallelism in two dimensions",
    "ha_save": "a further copy for high availability",
    "noop_layer": "layers without work, of which the row does not say how many",
    "disaggregated": "stages on devices of two kinds",
}


def ascend_run(case: Case, config: dict[str, str]) -> tuple[Architecture, Settings]:
    """Model and settings of one row.

    Raises:
        Unreadable: the row does not say enough.
    """
    if (launch := launch_of(case.source)) is not None:
        return _script(case, number(config, "npus") or launch[0], launch[1])
    for name in ("npus", "seq"):
        if not number(config, name):
            raise Unreadable(f"{name} not stated")
    if "layers" not in config or "hidden" not in config:
        raise Unreadable("architecture not stated")
    stage = config.get("stage", "")
    if "lora_r" in config and not config.get("stage"):
        stage = "sft"
    if stage in ("dpo", "simpo", "rm", "orm", "prm", "trl_ppo"):
        raise Unreadable(f"{stage}: more than one pass of a model in a step")
    if stage == "sft" and "pack" not in case.what and case.kind != "time":
        raise Unreadable("fine-tuning on samples of their own lengths, which the row does not have")
    for word, feature in FEATURES.items():
        if word in case.what:
            raise Unreadable(f"{feature}, which no setting describes")
    if "qlora" in case.what:
        raise Unreadable("QLoRA: weights in 4 bits")
    return _mindspore(case, config) if "framework" in config else _megatron(case, config)


PASSES = ("dpo", "simpo", "rm", "orm", "prm", "trl_ppo")
UNDESCRIBED = {
    "--tp-2d": "tensor parallelism in two dimensions",
    "--enable-high-availability": "a further copy for high availability",
    "--share-kvstates": "keys and values that layers share",
    "--enable-mhc": "several residual streams",
    "--enable-dsa-indexer": "sparse attention",
    "--mamba-state-dim": "state-space layers",
    "--mamba-d-state": "state-space layers",
    "--full-attention-interval": "linear attention",
    "--qlora": "weights in 4 bits",
    "--schedules-method": "a schedule other than 1F1B",
}


def _script(case: Case, devices: int, flags: list[str]) -> tuple[Architecture, Settings]:
    """Model and settings of the launch script that the row names, which says more than the row."""
    texts = values_of(flags)
    if (stage := texts.get("--stage", "")) in PASSES:
        raise Unreadable(f"{stage}: more than one pass of a model in a step")
    for flag, feature in UNDESCRIBED.items():
        if flag in texts:
            raise Unreadable(f"{feature}, which no setting describes")
    packed = "--neat-pack" in texts or "--reset-position-ids" in texts or "pack" in case.what
    own_lengths = "--variable-seq-lengths" in texts or "--no-pad-to-seq-lengths" in texts
    if (stage or "--is-instruction-dataset" in texts) and own_lengths and not packed and case.kind != "time":
        raise Unreadable("fine-tuning on samples of their own lengths, which neither row nor script has")
    model, run = from_flags(flags), settings_from_flags(flags, devices)
    if not ("--padded-vocab-size" in texts or "--vocab-size" in texts):
        model = dataclasses.replace(model, vocab=vocabulary(case.what, {}))
    part = int(texts.get("--make-vocab-size-divisible-by") or 128) * run.tp
    if "--padded-vocab-size" not in texts:
        model = dataclasses.replace(model, vocab=-(-model.vocab // part) * part)
    legacy = "--use-mcore-models" not in texts
    old = case.first_seen < "2025"  # Megatron-core 0.6 to 0.8
    return model, dataclasses.replace(run, framework="legacy" if legacy else "megatron", forwards_first=old)


def _megatron(case: Case, config: dict[str, str]) -> tuple[Architecture, Settings]:
    tp, pp = number(config, "tp", 1), number(config, "pp", 1)
    layers = number(config, "layers")
    name = case.what.lower()
    gated = truth(config, "swiglu") or "gemma" in name
    sizes: dict[str, Any] = {"ffn": number(config, "ffn") or 4 * number(config, "hidden")}
    for column, field in (
        ("kv", "kv_heads"),
        ("head_dim", "head_dim"),
        ("experts", "experts"),
        ("topk", "top_k"),
        ("q_lora", "q_lora"),
        ("kv_lora", "kv_lora"),
    ):
        sizes[field] = number(config, column) if config.get(column) else 0
    if sizes["kv_lora"] and not sizes["head_dim"]:
        sizes["head_dim"] = 128
    if sizes["experts"]:
        sizes["expert_ffn"] = number(config, "moe_ffn") or sizes["ffn"]
        sizes["dense_layers"] = min(layers, max(0, number(config, "first_dense")))
        sizes["shared_ffn"] = number(config, "shared_experts") * sizes["expert_ffn"]
    rms = truth(config, "fused_rmsnorm") or truth(config, "swiglu")
    positions = "alibi" if "bloom" in name or "baichuan-13" in name else "rope"
    model = Architecture(
        layers=layers,
        hidden=number(config, "hidden"),
        heads=number(config, "heads"),
        vocab=vocabulary(case.what, config),
        gated=gated,
        tied=not truth(config, "untied"),
        norm="rms" if rms else "layer",
        positions="learned" if name.startswith("gpt") else positions,
        window=4096 if "mistral" in name else 0,  # of Mistral 7B's configuration
        **sizes,
    )
    chunk = number(config, "vpp_layers")
    recompute = config.get("recompute", "none")
    every = config.get("recompute_method") == "uniform"
    run = Settings(
        devices=number(config, "npus"),
        sequence=number(config, "seq"),
        microbatch=number(config, "mbs", 1),
        batch=number(config, "gbs"),
        tp=tp,
        pp=pp,
        vpp=max(1, layers // pp // chunk) if chunk and pp > 1 else 1,
        cp=number(config, "cp", 1),
        cp_kind=next((v for k, v in CP_KINDS.items() if config.get("cp_algo", "").startswith(k)), "ring"),
        ep=number(config, "ep", 1),
        dispatcher="allgather" if config.get("dispatcher") == "allgather" else "alltoall",
        zero=1 if truth(config, "dist_opt") else 0,
        sequence_parallel=truth(config, "sp") or tp == 1,
        recompute="full" if recompute.startswith("full") else "none",
        recompute_layers=0 if every else number(config, "recompute_layers"),
        recompute_activation=truth(config, "recompute_act"),
        offload="attention" if truth(config, "swap_attn") else "none",
        overlap_gradients=truth(config, "overlap_grad"),
        overlap_parameters=truth(config, "overlap_param"),
        overlap_tp=truth(config, "mc2") or truth(config, "coc"),
        precision="float16" if truth(config, "fp16") else "bfloat16",
        float32_gradients=not truth(config, "fp16"),  # Megatron accumulates in float32 for bfloat16 alone
        reuse_float32=truth(config, "reuse_fp32"),
        fused=tuple(v for k, v in FUSED.items() if truth(config, k)),
        framework="legacy" if config.get("impl") == "Legacy" or "legacy" in name else "megatron",
        lora=number(config, "lora_r"),
    )
    return pad(model, tp), run


def _mindspore(case: Case, config: dict[str, str]) -> tuple[Architecture, Settings]:
    hidden, name = number(config, "hidden"), case.what.lower()
    if "glm" in name or "codegeex" in name:
        config = {"heads": "32", "kv": "2", "ffn": "13696", **config}
    if not number(config, "heads"):
        raise Unreadable("heads not stated")
    ffn = number(config, "ffn")
    plain = name.startswith("gpt")
    if not ffn:
        part = number(config, "multiple_of", 256)
        wide = int(2 * 4 * hidden / 3)
        wide = int(float(config["ffn_dim_multiplier"]) * wide) if "ffn_dim_multiplier" in config else wide
        ffn = 4 * hidden if plain else -(-wide // part) * part
    experts = number(config, "expert_num", 1)
    sizes: dict[str, Any] = {}
    if experts > 1:
        sizes = {"experts": experts, "top_k": number(config, "num_experts_chosen", 1), "expert_ffn": ffn}
        if "qwen2-57b" in name:
            sizes["shared_ffn"] = 20480
    if "deepseek2" in name:
        raise Unreadable("latent attention of which the row has no sizes")
    model = Architecture(
        layers=number(config, "layers"),
        hidden=hidden,
        heads=number(config, "heads"),
        vocab=vocabulary(case.what, config),
        ffn=ffn,
        kv_heads=number(config, "kv"),
        gated=not plain,
        norm="layer" if plain else "rms",
        tied=plain,
        positions="learned" if plain else "rope",
        **sizes,
    )
    dp, tp, pp = (number(config, k, 1) for k in ("dp", "tp", "pp"))
    mbs = number(config, "mbs", 1)
    steps = (number(config, "micro_batches", 1) if pp > 1 else 1) * number(config, "gradient_accumulation_steps", 1)
    steps *= number(config, "micro_batch_interleave_num", 1) if pp == 1 else 1
    recompute, count = config.get("recompute", "False"), 0
    if recompute.startswith("["):
        count = -(-sum(int(x) for x in re.findall(r"-?\d+", recompute)) // pp)
    selective = config.get("select_recompute", "False")
    full = recompute == "True" or count > 0
    fused = (
        ("attention", "rms_norm", "swiglu", "rope") if config.get("use_flash_attention") != "False" else ("rms_norm",)
    )
    lora = 16 if "lora" in name or "ptuning" in name else 0
    run = Settings(
        devices=dp * tp * pp,
        sequence=number(config, "seq"),
        microbatch=mbs,
        batch=mbs * dp * steps,
        tp=tp,
        pp=pp,
        vpp=number(config, "pp_interleave_num", 1) if pp > 1 else 1,
        ep=number(config, "expert_parallel", 1),
        zero=1 if truth(config, "enable_parallel_optimizer") and dp > 1 else 0,
        sequence_parallel=truth(config, "use_seq_parallel") or tp == 1,
        recompute="full" if full else "selective" if selective not in ("False", "") else "none",
        recompute_layers=count,
        recompute_activation=not full and selective not in ("False", ""),
        precision="float16" if config.get("compute_dtype") == "float16" else "bfloat16",
        fused=fused,
        framework="mindspore",
        lora=lora,
    )
    return model, run
