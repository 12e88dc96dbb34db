"""Ascend training devices. "ini": platform files of CANN, as third parties quote them. One rank is one die."""

from __future__ import annotations

import dataclasses

from mindspeed_fx.cost.device import Constant as C
from mindspeed_fx.cost.device import Hardware, Tier

GB, GiB, TF = 1e9, 2**30, 1e12
INI = "CANN platform ini, quoted by third parties"
MSMODELING = "msmodeling, profile ATLAS_800_A2_376T_64G"
CUBE = 16 * 16 * 16 * 2
"""FLOP of one cube core and cycle in 16 bits."""

FIT = "fit to 169 published runs and 19 kernels on 910B (benchmarks/fit_runs.py)"
EFFICIENCY = {
    "matrix_efficiency": C(
        0.890, "", f"{FIT}; 910B2 reaches 0.85 to 0.89 at 4 to 10 thousand cubed; MindSpeed assumes 0.742", "high", 0.03
    ),
    "product_ramp": C(92.6, "", f"{FIT}; 910B2 reaches 0.70 of its peak at 2048 cubed, launch included", "low", 0.49),
    "attention_forward": C(0.393, "", f"{FIT}; the vendor's kernel on 910B2: 0.36 at 16 thousand keys", "high", 0.05),
    "attention_backward": C(0.341, "", FIT, "high", 0.07),
    "attention_ramp": C(407, "", FIT, "low", 0.66),
    "vector_efficiency": C(0.70, "", f"{MSMODELING}: vector 15.4 of 22.1 TF", "medium"),
    "memory_efficiency": C(0.488, "", f"{FIT}; {MSMODELING} 0.60: 0.96 of 1.6 TB/s", "high", 0.08),
    "launch": C(
        12e-6, "s", f"{FIT}; an empty kernel takes 1 us, a decode product 11 us more than its work", "medium", 0.12
    ),
}
MEASURED = ("matrix products", "attention", "collectives", "training runs")
"""What the constants of 910B are fitted to."""


def _cores(
    aic: int, ghz: float, factor: int = 1, source: str = "matches vendor figures", confidence: str = "high"
) -> dict[str, C]:
    """Peak of the cube cores; float32 runs at a quarter of the 16-bit rate (910B: 88 TF), int8 at twice."""
    half = aic * ghz * 1e9 * CUBE
    derived = f"derived: {aic} cores x {ghz} GHz x {CUBE} FLOP; {source}"
    return {
        "bfloat16": C(half, "FLOP/s", derived, confidence),
        "float16": C(half, "FLOP/s", derived, confidence),
        "float32": C(
            half / 4, "FLOP/s", f"{derived}; a quarter of it, 88 TF is quoted for 910B, 87 was measured", "medium"
        ),
        "int8": C(half * 2, "FLOP/s", f"{derived}; twice", "medium"),
    }


def _vectors(aiv: int, ghz: float, lanes: int = 128) -> dict[str, C]:
    """Peak of the vector cores: 128 16-bit lanes and 64 of 32 bits, two FLOP each (910B2: 22.1 TF in 16 bits)."""
    rate = aiv * ghz * 1e9 * lanes * 2
    derived = f"derived: {aiv} cores x {ghz} GHz x {lanes * 2} FLOP; matches 22.1 TF of 910B2, 54 TF of 950"
    # The vector cores have no bfloat16 arithmetic: it is widened to float32.
    return {
        "float16": C(rate, "FLOP/s", derived, "high"),
        "float32": C(rate / 2, "FLOP/s", f"{derived}; half", "high"),
        "bfloat16": C(rate / 2, "FLOP/s", f"{derived}; as float32, to which it is widened", "medium"),
    }


A2 = (
    Tier(
        "hccs",
        "mesh",
        C(
            28 * GB,
            "B/s",
            "Huawei EDOC1100317202: 56 GB/s both ways between each two of 8 cards; 196 GB/s one way over 7 links is "
            "MindSpeed's constant",
            "high",
        ),
        C(
            0.626,
            "",
            f"{FIT}; MindSpeed auto_tuning/module/hardware.py 0.65; 0.57-0.68 from measured all-gathers read as tensor "
            "bytes / time",
            "high",
            0.03,
        ),
        C(10e-6, "s", "assumed: no source; order of a kernel launch", "low"),
        8,
    ),
    Tier(
        "roce",
        "switch",
        C(25 * GB, "B/s", "200 Gb/s per card: vendor documentation", "high"),
        C(0.859, "", f"{FIT}; msmodeling: 17.5 GB/s, 0.70; MindSpeed's constant", "medium", 0.23),
        C(20e-6, "s", "assumed: no source", "low"),
    ),
)
A3 = (
    Tier(
        "sio",
        "switch",
        C(
            224 * GB,
            "B/s",
            "msmodeling comm_config.yaml, between the two dies of a package; taken as one way",
            "medium",
        ),
        C(0.70, "", "assumed: as msmodeling's 137.2 of 196 GB/s inside a machine", "low"),
        C(0.2e-6, "s", "msmodeling comm_config.yaml", "medium"),
        2,
    ),
    Tier(
        "ub",
        "switch",
        C(196 * GB, "B/s", "msmodeling: one way per die", "medium"),
        C(0.70, "", "msmodeling: 137.2 of 196 GB/s", "medium"),
        C(0.5e-6, "s", "msmodeling comm_config.yaml", "medium"),
        16,
    ),
    Tier(
        "supernode",
        "switch",
        C(196 * GB, "B/s", "msmodeling comm_config.yaml, grid [48, 8, 2]", "medium"),
        C(0.70, "", "assumed: as inside a machine", "low"),
        C(5.5e-6, "s", "msmodeling comm_config.yaml", "medium"),
        768,
    ),
    Tier(
        "rdma",
        "switch",
        C(25 * GB, "B/s", "200 Gb/s per die: msmodeling", "medium"),
        C(0.70, "", "assumed: as A2's RoCE", "low"),
        C(20e-6, "s", "assumed: no source", "low"),
    ),
)
A5 = (
    Tier(
        "ub",
        "switch",
        C(1000 * GB, "B/s", "official 2025-09: 2 TB/s of interconnect; taken as both ways together", "low"),
        C(0.70, "", "assumed: as 910C", "low"),
        C(0.5e-6, "s", "assumed: as 910C", "low"),
        8192,
    ),
    Tier(
        "rdma",
        "switch",
        C(25 * GB, "B/s", "assumed: as A2", "low"),
        C(0.70, "", "assumed: as A2", "low"),
        C(20e-6, "s", "assumed: no source", "low"),
    ),
)


def _device(
    name: str,
    title: str,
    aic: int,
    aiv: int,
    ghz: float,
    memory: float,
    tbs: float,
    source: str,
    tiers: tuple[Tier, ...],
    node: int,
    cache_mib: float | None,
    lanes: int = 128,
    **more: object,
) -> Hardware:
    values = {
        "matrix": _cores(aic, ghz),
        "vector": _vectors(aiv, ghz, lanes),
        **EFFICIENCY,
        "memory_bandwidth": C(tbs * 1e12, "B/s", source, "medium"),
        "memory": C(memory * GiB, "B", f"{source}; about 0.95 of it is visible", "medium"),
        "host_bandwidth": C(
            31.5 * GB, "B/s", "assumed: PCIe 4.0 x16, what the host processor has; protocol costs not counted", "low"
        ),
        "cache_bandwidth": None
        if cache_mib is None
        else C(
            aic * ghz * 1e9 * 110, "B/s", f"derived: {aic} cores x {ghz} GHz x 110 B: L2 read rate of {INI}", "medium"
        ),
        "cache": None if cache_mib is None else C(cache_mib * 2**20, "B", INI, "medium"),
    }
    fitted = MEASURED if tiers is A2 else ()
    cores = {"matrix_cores": aic, "vector_cores": aiv}
    return Hardware(name, title, "npu", tiers=tiers, node=node, fitted=fitted, **{**values, **cores, **more})


def _ascend950(
    name: str, title: str, aic: int, aiv: int, memory: float, tbs: float, source: str, cache_mib: float | None
) -> Hardware:
    matrix = _cores(
        aic, 1.65, source="432 TF official for 32 cores, 378 for 28; one table shows 371", confidence="medium"
    )
    low = {"float8_e4m3fn": 2, "float8_e5m2": 2, "float4_e2m1fn_x2": 4}
    matrix |= {
        k: C(matrix["bfloat16"] * n, "FLOP/s", "official 2025-09: FP8 865 TF, MXFP4 1730 TF for 32 cores", "medium")
        for k, n in low.items()
    }
    return _device(
        name,
        title,
        aic,
        aiv,
        1.65,
        memory,
        tbs,
        source,
        A5,
        8,
        cache_mib,
        lanes=256,
        matrix=matrix,
        notes=("efficiencies and launch cost are those of 910B: nothing is published for 950",),
    )


HARDWARE = (
    _device("ascend910b1", "Ascend 910B1 (A2)", 24, 48, 1.85, 64, 1.6, INI, A2, 8, 192),
    _device("ascend910b2", "Ascend 910B2 (A2)", 24, 48, 1.8, 64, 1.6, INI, A2, 8, 192),
    _device("ascend910b3", "Ascend 910B3 (A2)", 20, 40, 1.8, 64, 1.6, INI, A2, 8, 192),
    _device(
        "ascend910b4",
        "Ascend 910B4 (A2)",
        20,
        40,
        1.5,
        32,
        0.8,
        "ini; msmodeling A2_280T; 800 GB/s measured by arXiv 2505.15112",
        A2,
        8,
        96,
    ),
    _device(
        "ascend910b4-1",
        "Ascend 910B4-1 (A2), 910B4 with twice the memory",
        20,
        40,
        1.5,
        64,
        1.6,
        "ini of CANN 9.0, quoted by a fork of vllm-ascend that runs on it",
        A2,
        8,
        96,
    ),
    _device(
        "ascend910c",
        "Ascend 910C (A3), one of the two dies",
        24,
        48,
        1.8,
        64,
        1.6,
        "msmodeling, DrivingSDK",
        A3,
        16,
        192,
    ),
    _device(
        "ascend910c20",
        "Ascend 910C (A3) with 20 cube cores, one of the two dies",
        20,
        40,
        1.8,
        64,
        1.6,
        "cores: bishengir-compile 1.2.0; the rest as ascend910c",
        A3,
        16,
        192,
    ),
    _ascend950(
        "ascend950pr", "Ascend 950PR (A5) server", 32, 64, 128, 1.6, "official 2025-09; one table shows 1.4 TB/s", None
    ),
    _ascend950("ascend950dt", "Ascend 950DT (A5)", 32, 64, 144, 4.0, "official 2025-09, DrivingSDK", None),
    _ascend950("atlas350", "Atlas 350, Ascend 950PR (A5) on PCIe", 28, 56, 112, 1.4, INI, 112),
)
ALIASES = {
    "ascend910b2c": "ascend910b2",
    "ascend910_93": "ascend910c",
    "ascend910_93xx": "ascend910c",
    "ascend910_9391": "ascend910c",
    "ascend910_9392": "ascend910c",
    "ascend910_9382": "ascend910c",
    "ascend910_9381": "ascend910c",
    "ascend910_9372": "ascend910c20",
    "ascend910_9362": "ascend910c20",
    "ascend910_9363": "ascend910c20",
    "ascend950": "ascend950pr",
}

SOC_TABLE = "SoC table of MindSpore's dvm, from the ini files of CANN 9"
DIES_950 = {
    (28, 128): "PR_9579 PR_957a DT_9571 DT_9572 DT_9575 DT_9576",
    (28, 112): "PR_957b PR_957bx PR_957c DT_9573 DT_9574 DT_9577 DT_9578",
    (28, 96): "PR_957d",
    (32, 128): "PR_9589 PR_958a DT_9581 DT_9582 DT_9582x DT_9585 DT_9586",
    (32, 112): "PR_958b PR_958c PR_958d DT_9583 DT_9584 DT_9587 DT_9588",
    (36, 128): "PR_9599 PR_959a PR_959b DT_9591 DT_9592 DT_9595 DT_9596 DT_95A1 DT_95A2",
    (4, 16): "PR_950z",
    (8, 32): "DT_950x DT_950y",
}
"""(cube cores, MiB of L2 cache) -> names after "Ascend950"; those of the tool chain alone (PR_957a, 958a, 958c, 958d,
959a, 959b) by the names of their kind."""
SLOWER_MEMORY = {
    1.6: {"PR_957d": 4.348, "PR_950z": 25.0}
    | dict.fromkeys("PR_958b PR_958c PR_958d PR_957b PR_957bx PR_957c".split(), 3.704),
    4.0: {"DT_950x": 5.263, "DT_950y": 7.143}
    | dict.fromkeys("DT_9573 DT_9574 DT_9583 DT_9584".split(), 1.429)
    | dict.fromkeys("DT_9575 DT_9576 DT_9585 DT_9586 DT_9595 DT_9596".split(), 1.639)
    | dict.fromkeys("DT_9577 DT_9578 DT_9587 DT_9588".split(), 1.852),
}
"""TB/s of the fastest of a kind -> those whose memory is slower: rate of the cache over rate of the memory, which is
3.226 and 1.25 for the fastest of PR and DT."""


def _die_950(suffix: str, cores: int, cache: int) -> Hardware:
    """One of the dies of 950. Memory goes with the cache, as it does in the three that are published: 128 MiB of cache
    and 128 GB (PR), 112 and 112 (Atlas 350)."""
    fastest, share, full = (1.6, 3.226, 128) if suffix.startswith("PR") else (4.0, 1.25, 144)
    speed = fastest * share / SLOWER_MEMORY[fastest].get(suffix, share)
    title = f"Ascend950{suffix} (A5), {cores} cube cores"
    device = _ascend950(
        f"ascend950{suffix.lower()}",
        title,
        cores,
        2 * cores,
        full * cache / 128,
        speed,
        f"{SOC_TABLE}; scaled from the published 950{suffix[:2]}",
        cache,
    )
    scaled = {name: getattr(device, name) for name in ("memory", "memory_bandwidth")}
    return dataclasses.replace(device, **{n: C(c, c.unit, c.source, "low") for n, c in scaled.items()})


DIES = tuple(_die_950(suffix, *sizes) for sizes, suffixes in DIES_950.items() for suffix in suffixes.split())
"""Devices by the names that drivers say, which no list shows to a person."""

FAMILIES = (
    ("ascend950dt", "ascend950dt"),
    ("ascend950", "ascend950pr"),
    ("ascend910_9", "ascend910c"),
    ("ascend910b", "ascend910b2"),
    ("ascend910", "ascend910b4"),
    ("ascend310", "ascend910b4"),
    ("", "ascend910b2"),
)
"""How a name without a table begins -> what it is taken for: the nearest of its generation, for the first 910 and 310
the smallest there is."""
KNOWN_WITHOUT_TABLE = (
    *("Ascend910PremiumA", "Ascend910ProA", "Ascend910A", "Ascend910ProB", "Ascend910B"),
    *("Ascend310P1", "Ascend310P2", "Ascend310P3", "Ascend310P4", "Ascend310P5", "Ascend310P7"),
    *("Ascend310B1", "Ascend310B2", "Ascend310B3", "Ascend310B4"),
)
"""Names of torch_npu (csrc/core/npu/NpuVariables.cpp) whose rates no source at hand says: the first generation and
devices for inference."""
