"""NVIDIA data-centre GPUs of the Ampere and Hopper generations, SXM boards of eight. Dense rates, without sparsity."""

from __future__ import annotations

from mindspeed_fx.cost.device import Constant as C
from mindspeed_fx.cost.device import Hardware, Tier, fitted_constant

GB, TF = 1e9, 1e12
AUTOPARALLEL = "AutoParallel (meta-pytorch), constants of its cost model"


H100_FIT = {
    "source": "fit to 89 published runs and 7 kernels on H100",
    "measured": ("matrix products", "vector kernels", "training runs"),
    "matrix_efficiency": (0.763, 0.05),
    "product_ramp": (184, 0.48),
    "attention_forward": (0.551, 0.21),
    "attention_backward": (0.435, 0.17),
    "attention_ramp": (309, 0.66),
    "memory_efficiency": (0.554, 0.03),
    "launch": (4.1e-6, 0.48),
    "nvlink": (0.589, 0.14),
    "network": (0.950, 0.21),
}
A100_FIT = {
    "source": "fit to 188 published runs on A100 of llm-foundry",
    "measured": ("training runs",),
    "matrix_efficiency": (0.737, 0.06),
    "product_ramp": (151, 0.44),
    "attention_forward": (0.564, 0.13),
    "attention_backward": (0.368, 0.19),
    "attention_ramp": (368, 0.66),
    "memory_efficiency": (0.950, 0.16),
    "launch": (4.4e-6, 0.50),
    "nvlink": (0.704, 0.15),
    "network": (0.787, 0.25),
}
"""Constant -> value and relative spread."""


def _rates(values: dict[str, float], source: str) -> dict[str, C]:
    return {k: C(v * TF, "FLOP/s", source, "high") for k, v in values.items()}


def _device(
    name: str,
    title: str,
    sms: int,
    matrix: dict,
    vector: dict,
    gb: float,
    tbs: float,
    cache_mb: float,
    nvlink: float,
    port: float,
    pcie: float,
    sheet: str,
    fit: dict,
) -> Hardware:
    runs = f"{fit['source']} (benchmarks/fit_runs.py)"

    def constant(name: str, unit: str, note: str = "") -> C:
        value, spread = fit[name]
        return fitted_constant(value, unit, f"{runs}{note and '; '}{note}", spread)

    return Hardware(
        name,
        title,
        "cuda",
        matrix_cores=sms,
        vector_cores=sms,
        node=8,
        matrix=_rates(matrix, sheet),
        vector=_rates(vector, f"{sheet}, CUDA cores"),
        memory_bandwidth=C(tbs * 1e12, "B/s", sheet, "high"),
        memory=C(gb * 1e9, "B", sheet, "high"),
        cache=C(cache_mb * 1e6, "B", sheet, "high"),
        matrix_efficiency=constant("matrix_efficiency", "", f"{AUTOPARALLEL}: 0.70; best of a public table 0.81"),
        product_ramp=constant("product_ramp", ""),
        attention_forward=constant("attention_forward", "", "FlashAttention-3 reaches 0.75"),
        attention_backward=constant("attention_backward", ""),
        attention_ramp=constant("attention_ramp", ""),
        vector_efficiency=C(0.70, "", f"{AUTOPARALLEL}, for all arithmetic", "low"),
        memory_efficiency=constant("memory_efficiency", "", "QuACK reductions on H100: 3.0 of 3.35 TB/s, copies 0.92"),
        launch=constant("launch", "s", f"{AUTOPARALLEL}: 7 us, floor of a launch"),
        fitted=fit["measured"],
        host_bandwidth=C(
            pcie * GB,
            "B/s",
            "PCIe x16 of the generation on the data sheet, one way; protocol costs not counted",
            "high",
        ),
        tiers=(
            Tier(
                "nvlink",
                "switch",
                C(nvlink * GB / 2, "B/s", f"{sheet}: {nvlink:g} GB/s both ways", "high"),
                constant("nvlink", "", f"{AUTOPARALLEL}: 320 of 450 GB/s for 8-way all-gather on H100, 0.71"),
                C(1e-6, "s", "assumed: order of one hop through a switch", "low"),
                8,
            ),
            Tier(
                "network",
                "switch",
                C(port * GB, "B/s", "one InfiniBand or RoCE port per GPU: DGX user guide", "medium"),
                constant("network", ""),
                C(10e-6, "s", "assumed", "low"),
            ),
        ),
    )


_HOPPER = (
    {
        "bfloat16": 989.4,
        "float16": 989.4,
        "tf32": 494.7,
        "float32": 67.0,
        "float64": 67.0,
        "int8": 1978.9,
        "float8_e4m3fn": 1978.9,
        "float8_e5m2": 1978.9,
    },
    {"float32": 67.0, "bfloat16": 133.8, "float16": 133.8, "float64": 34.0},
)
HARDWARE = (
    _device(
        "a100",
        "NVIDIA A100 80 GB SXM",
        108,
        {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5, "float64": 19.5, "int8": 624},
        {"float32": 19.5, "bfloat16": 39, "float16": 78, "float64": 9.7},
        80,
        2.039,
        40,
        600,
        25,
        31.5,
        "NVIDIA A100 data sheet",
        A100_FIT,
    ),
    _device("h100", "NVIDIA H100 SXM", 132, *_HOPPER, 80, 3.35, 50, 900, 50, 63, "NVIDIA H100 data sheet", H100_FIT),
    _device(
        "h200",
        "NVIDIA H200 SXM",
        132,
        *_HOPPER,
        141,
        4.8,
        50,
        900,
        50,
        63,
        "NVIDIA H200 data sheet; MLPerf system description",
        H100_FIT,
    ),
)
ALIASES = {
    "nvidia a100-sxm4-80gb": "a100",
    "nvidia h100 80gb hbm3": "h100",
    "nvidia h100": "h100",
    "h100-sxm": "h100",
    "nvidia h200": "h200",
    "h200-sxm": "h200",
}
