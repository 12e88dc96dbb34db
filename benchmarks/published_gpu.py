"""Rows of GPU runs: MosaicML's table (FSDP), NeMo's performance summaries (Megatron), torchtitan, DeepSpeed."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from benchmarks.published_cells import Case, Unreadable, named, number, pad
from benchmarks.published_scripts import launch_of
from mindspeed_fx.planning.predict import Architecture, Settings
from mindspeed_fx.planning.predict.architecture import from_flags
from mindspeed_fx.planning.predict.launch_flags import settings_from_flags
from mindspeed_fx.planning.predict.settings import FUSED


def gpu_run(case: Case, line: dict[str, str], config: dict[str, str]) -> tuple[Architecture, Settings]:
    """Model and settings of one row.

    Raises:
        Unreadable: the row does not say enough.
    """
    if (launch := launch_of(case.source)) is not None:
        return _functional_test(*launch)
    if config.get("gpus") == "?":
        raise Unreadable("number of devices not stated")
    for name in ("gpus", "seq"):
        if not number(config, name):
            raise Unreadable(f"{name} not stated")
    automodel = "Automodel" in line["source"]
    if line["hardware"].startswith("DGX") and "precision" not in config and not automodel:
        raise Unreadable("precision not stated")  # Automodel's configurations of its tables all say bf16
    if "params" in config:
        return _mosaic(case, config)
    if "layers" in config:
        raise Unreadable("a test of which the row has no vocabulary and no switches")
    model = named(case.what)
    if "DeepCompile" in case.what:
        return model, _deepspeed(case, config)
    if "parallel" in config:
        return model, _titan(config)
    return _nemo(case, model, config, automodel)


def _functional_test(devices: int, flags: list[str]) -> tuple[Architecture, Settings]:
    """A functional test of Megatron-LM, with TransformerEngine's kernels."""
    fused = FUSED[:4] if "--no-gradient-accumulation-fusion" in flags else FUSED
    run = dataclasses.replace(settings_from_flags(flags, devices), fused=fused, gelu_chain=False)
    return pad(from_flags(flags), run.tp), run


def precision(config: dict[str, str]) -> str:
    return "float8_e4m3fn" if "fp8" in config.get("precision", "").lower() else "bfloat16"


def _mosaic(case: Case, config: dict[str, str]) -> tuple[Architecture, Settings]:
    sequence = number(config, "seq")
    model = dataclasses.replace(named(case.what), max_positions=sequence)
    parameters = float(config["params"])
    if abs(model.parameters / parameters - 1) > 0.02:
        raise Unreadable(f"the row has {parameters / 1e9:.2f}e9 parameters, the model {model.parameters / 1e9:.2f}e9")
    run = Settings(
        devices=number(config, "gpus"),
        sequence=sequence,
        microbatch=number(config, "mbs"),
        batch=number(config, "gbs"),
        zero=2 if "SHARD_GRAD_OP" in config["parallel"] else 3,
        recompute=config["recompute"],
        precision=precision(config),
        float32_gradients=False,
        overlap_gradients=True,
        overlap_parameters=True,
        attention_kernel="early",  # llm-foundry's attn_impl: triton
        framework="fsdp",
    )
    return model, run


def _deepspeed(case: Case, config: dict[str, str]) -> Settings:
    return Settings(
        devices=number(config, "gpus"),
        sequence=number(config, "seq"),
        microbatch=number(config, "mbs"),
        zero=3,
        offload="activations" if "offload all" in case.what else "none",
        float32_gradients=False,
        overlap_gradients=True,
        overlap_parameters=True,
        framework="deepspeed",
    )


def _titan(config: dict[str, str]) -> Settings:
    tp, shards = number(config, "tp", 1), int(re.sub(r"\D", "", config["parallel"]) or 1)
    devices = number(config, "gpus")
    full = config.get("recompute") == "full" or config.get("policy") == "full"
    return Settings(
        devices=devices,
        sequence=number(config, "seq"),
        microbatch=number(config, "lbs", 1),
        tp=tp,
        zero=3,
        shards=shards,
        recompute="full" if full else "selective",
        overlap_gradients=True,
        overlap_parameters=True,
        overlap_tp="async" in config.get("mode", ""),
        precision=precision(config),
        framework="fsdp",
    )


def _nemo(case: Case, model: Architecture, config: dict[str, str], automodel: bool) -> tuple[Architecture, Settings]:
    tp, cp = number(config, "tp", 1), number(config, "cp", 1)
    devices, pp = number(config, "gpus"), number(config, "pp", 1)
    fsdp = number(config, "fsdp")
    ep = number(config, "ep") or (math.gcd(devices, model.experts) if model.experts else 1)
    more: dict[str, Any] = {}
    if case.family == "gpt-oss":  # a clamped gate and biases, which the fused SwiGLU does not do
        more["fused"] = tuple(f for f in FUSED if f != "swiglu")
    # The paper (arXiv 2407.21783) interleaves stages and does not say how many: a layer each is assumed.
    vpp = number(config, "vp") or (8 if "405B" in case.what else 1)
    batch = number(config, "gbs") or number(config, "batch_per_dp") * (devices // tp // cp // pp)
    if automodel or fsdp > 1:
        more |= {"zero": 3 if fsdp > 1 else 0, "shards": fsdp if fsdp > 1 else 0, "framework": "fsdp"}
        if case.kind == "lora time" and devices > 1:  # activation_checkpointing of its recipes for several devices
            more["recompute"] = "full"
    else:
        more |= {"zero": 1, "etp": 1 if model.experts else 0}
    run = Settings(
        devices=devices,
        sequence=number(config, "seq"),
        microbatch=number(config, "mbs", 1),
        batch=batch,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        overlap_gradients=True,
        overlap_parameters=True,
        overlap_tp=tp > 1,
        precision=precision(config),
        lora=16 if case.kind == "lora time" else 0,
        float32_gradients=not automodel,
        **more,
    )
    return pad(model, tp), run
