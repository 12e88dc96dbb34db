"""Calls whose kernels are compiled for Ascend, and the golden numbers of what became of them.

python -m tests.ascend.kernel_calls    writes golden_kernels.json anew, for the compiler in the tool chain
"""

import json
import pathlib

import torch

from mindspeed_fx.ascend import kernels
from mindspeed_fx.partition.regions import regions
from tests.kernels import region_cases

GOLDEN = pathlib.Path(__file__).with_name("golden_kernels.json")
SOCS = (
    "Ascend910B1",
    "Ascend910B2",
    "Ascend910B3",
    "Ascend910B4",
    "Ascend910_9391",
    "Ascend910_9382",
    "Ascend910_9381",
    "Ascend910_9372",
    "Ascend910_9362",
)


def _new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def few():
    """A forward and two backwards at the sizes of a Llama 3 8B layer."""
    x, w, rstd, wide = _new(4096, 4096), _new(4096), _new(4096, 1, dtype=torch.float32), _new(4096, 14336)
    return {
        "rms_norm 4096": kernels.call("rms_norm", x, w, 1e-5, True),
        "rms_norm_backward 4096": kernels.call("rms_norm_backward", x, x, w, rstd, True, True),
        "swiglu_backward 14336": kernels.call("swiglu_backward", wide, wide, wide),
    }


def many():
    """Every kernel family; further widths, types and layouts."""
    f32, found = torch.float32, few()
    for hidden, dtype in ((1000, f32), (8192, torch.bfloat16)):
        x, w, rstd = _new(4096, hidden, dtype=dtype), _new(hidden, dtype=dtype), _new(4096, 1, dtype=f32)
        found[f"rms_norm {hidden}"] = kernels.call("rms_norm", x, w, 1e-5, False)
        found[f"rms_norm_backward {hidden}"] = kernels.call("rms_norm_backward", x, x, w, rstd, False, True)
    x, angles = _new(4096, 2, 32, 128), _new(4096, 1, 1, 128, dtype=f32)
    found["rope half"] = kernels.call("rope", x, angles, angles, False)
    found["rope_backward interleaved"] = kernels.call("rope_backward", x, x, angles, angles, True, False)
    q, w, angles, rstd = (
        _new(1, 4096, 32, 128).transpose(1, 2),
        _new(128),
        _new(1, 1, 4096, 128),
        _new(1, 32, 4096, 1, dtype=f32),
    )
    found["qk_norm_rope"] = kernels.call("qk_norm_rope", q, w, angles, angles, 1e-6, True, False)
    found["qk_norm_rope_backward"] = kernels.call("qk_norm_rope_backward", q, q, w, rstd, angles, angles, False, True)
    angles = _new(1, 1, 4096, 64)
    found["qk_norm_rope interleaved, partial"] = kernels.call("qk_norm_rope", q, w, angles, angles, 1e-6, True, True)
    found["qk_norm_rope_backward interleaved, partial"] = kernels.call(
        "qk_norm_rope_backward", q, q, w, rstd, angles, angles, True, True
    )
    x, w = _new(1, 4096, 8192).transpose(1, 2), _new(8192, 4)
    found["causal_conv1d channels last"] = kernels.call("causal_conv1d", x, w, None, True)
    found["causal_conv1d_backward channels last"] = kernels.call("causal_conv1d_backward", x, x, w, None, True)
    x = _new(1, 8192, 4096)
    found["causal_conv1d sequence last"] = kernels.call("causal_conv1d", x, w, None, True)
    keys = _new(1, 4096, 8, 128).transpose(1, 2)
    found["rope_pair"] = kernels.call("rope_pair", q, keys, _new(1, 1, 4096, 128), _new(1, 1, 4096, 128), False, False)
    for heads in (32, 40):
        top = _new(1, heads, 4096, 8, dtype=f32)
        found[f"attention_lse {heads}"] = kernels.call("attention_lse", top, top)
    heads = lambda n, *width: _new(1, 4096, n, *width).transpose(1, 2)  # noqa: E731
    rule = (heads(16, 128), heads(16, 128), heads(32, 128), heads(32), heads(32), None, 0.1, 1e-6, 64)
    starts = _new(1, 32, 16, 128, 128, dtype=f32)
    found["gated_delta_rule"] = kernels.call("gated_delta_rule", *rule)
    found["gated_delta_rule_backward"] = kernels.call("gated_delta_rule_backward", rule[2], None, starts, *rule)
    rule = (*rule[2:3] * 3, _new(1, 4096, 32, 128, dtype=f32).transpose(1, 2), heads(32), None, 0.1, 1e-6)
    found["kimi_delta_attention"] = kernels.call("kimi_delta_attention", *rule)
    found["kimi_delta_attention_backward"] = kernels.call("kimi_delta_attention_backward", rule[2], None, starts, *rule)
    x, dt, rates = _new(1, 4096, 80, 64), _new(1, 4096, 80), _new(80, dtype=f32)
    dual = (x, dt, rates, _new(1, 4096, 1, 128), _new(1, 4096, 1, 128), rates, None, 64)
    found["ssd"] = kernels.call("ssd", *dual)
    found["ssd_backward"] = kernels.call("ssd_backward", x, None, _new(1, 16, 80, 64, 128, dtype=f32), *dual)
    rows = lambda n: _new(1, 4096, n).transpose(1, 2)  # noqa: E731
    a, channels = _new(5120, 16, dtype=f32), _new(5120, dtype=f32)
    scan = (rows(5120), rows(5120), a, rows(16), rows(16), channels, rows(5120), None, None, True)
    found["selective_scan"] = kernels.call("selective_scan", *scan)
    starts = _new(1, 128, 16, 5120, dtype=f32)
    found["selective_scan_backward"] = kernels.call("selective_scan_backward", scan[0], None, starts, *scan)
    streams = _new(4096, 4, 4, dtype=f32)
    found["sinkhorn_knopp"] = kernels.call("sinkhorn_knopp", streams, 20, 1e-6)
    found["sinkhorn_knopp_backward"] = kernels.call("sinkhorn_knopp_backward", streams, streams, 20, 1e-6)
    logits, target, lse = _new(4096, 128256), _new(4096, dtype=torch.int64), _new(4096, dtype=f32)
    found["cross_entropy 128256"] = kernels.call("cross_entropy", logits, target, -100, 0.1)
    found["cross_entropy_backward 128256"] = kernels.call("cross_entropy_backward", lse, logits, target, lse, -100, 0.0)
    found["swiglu packed 11008"] = kernels.call("swiglu", _new(4096, 2 * 11008), None)
    x, bias, seed = _new(4096, 4096), _new(4096), _new(2, dtype=torch.int32)
    found["dropout_add_seeded 4096"] = kernels.call("dropout_add_seeded", x, bias, x, seed, 0.1)
    found["dropout_add_seeded_backward 4096"] = kernels.call("dropout_add_seeded_backward", x, seed, 0.1)
    for hidden in (2048, 4096, 8192):
        x, w, rstd = _new(4096, hidden), _new(hidden), _new(4096, 1, dtype=f32)
        found[f"add_rms_norm {hidden}"] = kernels.call("add_rms_norm", x, x, w, 1e-5, True)
        found[f"add_rms_norm_backward {hidden}"] = kernels.call("add_rms_norm_backward", x, x, x, w, rstd, True, True)
    for hidden in (1024, 4096):
        x, w, rstd = _new(4096, hidden), _new(hidden), _new(4096, 1, dtype=f32)
        found[f"add_layer_norm {hidden}"] = kernels.call("add_layer_norm", x, x, w, w, 1e-5)
        found[f"layer_norm_backward {hidden}"] = kernels.call("layer_norm_backward", x, x, w, rstd, rstd, True, True)
    x, pairs, probs = _new(4096 * 2, 4096), _new(4096 * 2, dtype=torch.int64), _new(4096, 2)
    found["moe_unpermute 4096"] = kernels.call("moe_unpermute", x, pairs, probs, 2)
    found["moe_unpermute_backward 4096"] = kernels.call("moe_unpermute_backward", _new(4096, 4096), x, pairs, probs, 2)
    logits, target, upstream = _new(128, 128256), _new(128, dtype=torch.int64), _new(128, dtype=f32)
    found["linear_cross_entropy_chunk 128256"] = kernels.call(
        "linear_cross_entropy_chunk", logits, target, None, 0.0, 0.0, 0.0, True
    )
    found["linear_cross_entropy_chunk, capped"] = kernels.call(
        "linear_cross_entropy_chunk", logits, target, upstream, 0.1, 1e-4, 30.0, True
    )
    flat, narrow = _new(2**24, dtype=f32), _new(2**24)
    found["adamw"] = kernels.call("adamw", flat, narrow, flat, flat, narrow, 1e-3, 0.999, 0.9, 0.95, 1e-8, 1.5, 0.5)
    wide = _new(4096, 14336)
    for activation in ("gelu", "gelu_tanh", "relu"):
        found[f"glu {activation}"] = kernels.call("glu", wide, wide, activation)
        found[f"glu_backward {activation}"] = kernels.call("glu_backward", wide, wide, wide, activation)
    for name in region_cases.CASES:
        found[f"region {name}"] = kernels.region_call(regions(region_cases.graph(name))[0])
    return found


def compiled(calls, soc):
    """(compiler, name -> kernels with what the golden file keeps of them)."""
    made = kernels.compile_kernels(calls.values(), soc)
    keep = ("kernel", "tile", "outcome", "on_chip", "dynamic", "scalar_loops")
    return made["compiler"], {
        name: c["problem"] or [{k: row[k] for k in keep} for row in c["kernels"]]
        for name, c in zip(calls, made["calls"])
    }


if __name__ == "__main__":
    compiler, found = compiled(many(), "Ascend910B2")
    others = {soc: compiled(few(), soc)[1] for soc in SOCS if soc != "Ascend910B2"}
    assert all(v == {n: found[n] for n in v} for v in others.values()), "the SoCs differ"
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    GOLDEN.write_text(json.dumps({**golden, compiler: found}, indent=1) + "\n")
