"""NVIDIA data-centre GPUs of the Ampere and Hopper generations, SXM boards of eight. Dense rates, without sparsity."""

from __future__ import annotations

from mindspeed_fx.cost.device import Constant as C
from mindspeed_fx.cost.device import Hardware, Tier

GB, TF = 1e9, 1e12
AUTOPARALLEL = "AutoParallel (meta-pytorch), constants of its cost model"


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
) -> Hardware:
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
        matrix_efficiency=C(0.70, "", f"{AUTOPARALLEL}; FlashAttention-3 reaches 0.75", "medium"),
        vector_efficiency=C(0.70, "", f"{AUTOPARALLEL}, for all arithmetic", "low"),
        memory_efficiency=C(0.90, "", "QuACK reductions: 3.0 of 3.35 TB/s on H100; copies reach 0.92", "medium"),
        launch=C(7e-6, "s", f"{AUTOPARALLEL}: floor of a launch", "low"),
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
                C(0.71, "", f"{AUTOPARALLEL}: 320 of 450 GB/s for 8-way all-gather on H100", "medium"),
                C(1e-6, "s", "assumed: order of one hop through a switch", "low"),
                8,
            ),
            Tier(
                "network",
                "switch",
                C(port * GB, "B/s", "one InfiniBand or RoCE port per GPU: DGX user guide", "medium"),
                C(0.80, "", "assumed", "low"),
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
    ),
    _device("h100", "NVIDIA H100 SXM", 132, *_HOPPER, 80, 3.35, 50, 900, 50, 63, "NVIDIA H100 data sheet"),
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
