"""A processor: the documented constants of a small server, or those of this machine, measured on request.

The table is for two cores, since a plan must not depend on the machine that makes it; ``measure_cpu`` is for numbers.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Callable

from mindspeed_fx.cost.device import Constant as C
from mindspeed_fx.cost.device import Hardware, Tier

GB, GiB, GF = 1e9, 2**30, 1e9
CORES = "batched products measured on two cores of a virtual server, docs/design.md"
ASSUMED = "assumed: a small virtual server"

HARDWARE = (
    Hardware(
        "cpu",
        "two cores of a server processor with 512-bit instructions",
        "cpu",
        matrix_cores=2,
        vector_cores=2,
        node=1,
        matrix={
            "float32": C(180 * GF, "FLOP/s", CORES, "medium"),
            "float64": C(90 * GF, "FLOP/s", f"{CORES}; half", "low"),
            "bfloat16": C(180 * GF, "FLOP/s", f"{CORES}; counted as float32", "low"),
        },
        vector={
            "float32": C(
                45 * GF,
                "FLOP/s",
                "derived: a quarter of the matrix rate, since sums and products are not fused or paired",
                "low",
            ),
            "float64": C(22.5 * GF, "FLOP/s", "derived: half of float32", "low"),
        },
        memory_bandwidth=C(25 * GB, "B/s", ASSUMED, "low"),
        memory=C(8 * GiB, "B", ASSUMED, "low"),
        cache=C(32 * 2**20, "B", ASSUMED, "low"),
        matrix_efficiency=C(1.0, "", "the rate is a measured one", "medium"),
        vector_efficiency=C(1.0, "", "the rate is derived from a measured one", "low"),
        memory_efficiency=C(0.8, "", ASSUMED, "low"),
        launch=C(3e-6, "s", "assumed: dispatch of one ATen operator", "low"),
        host_bandwidth=C(12 * GB, "B/s", "assumed: a copy within memory reads and writes", "low"),
        tiers=(
            Tier(
                "memory",
                "switch",
                C(6 * GB, "B/s", "assumed: gloo between processes of one machine, a copy in and a copy out", "low"),
                C(0.5, "", ASSUMED, "low"),
                C(50e-6, "s", "assumed: a gloo message over loopback", "low"),
                8,
            ),
            Tier(
                "ethernet",
                "switch",
                C(1.25 * GB, "B/s", "assumed: 10 Gb/s", "low"),
                C(0.8, "", ASSUMED, "low"),
                C(100e-6, "s", ASSUMED, "low"),
            ),
        ),
    ),
)
ALIASES: dict[str, str] = {}


def _best(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of the repetitions that fit into ``seconds``."""
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()
        stop = time.perf_counter()
        best = min(best, stop - start)
        if stop > end:
            return best


def measure_device(base: Hardware, name: str, seconds: float) -> Hardware:
    """``base`` with what was measured here: see :func:`mindspeed_fx.cost.hardware.measure_cpu`."""
    import torch

    share, source = seconds / 6, f"measured here with {torch.get_num_threads()} threads of torch {torch.__version__}"
    n, size = 1024, 2**24
    matrix = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a = torch.ones(n, n, dtype=dtype)
        matrix[str(dtype).removeprefix("torch.")] = C(
            2 * n**3 / _best(lambda: a @ a, share), "FLOP/s", f"{source}: product of 1024 x 1024", "high"
        )
    big, out = torch.ones(size), torch.empty(size)
    memory = C(
        2 * 4 * size / _best(lambda: out.copy_(big), share), "B/s", f"{source}: copy of 64 MiB, read and write", "high"
    )
    small = torch.ones(2**12)
    vector = C(
        2**12 * 64 / _best(lambda: [torch.mul(small, small, out=small) for _ in range(64)], share),
        "FLOP/s",
        f"{source}: multiplications of 4096 numbers in cache",
        "medium",
    )
    one = torch.ones(1)
    launch = C(
        _best(lambda: [torch.neg(one, out=one) for _ in range(64)], share) / 64,
        "s",
        f"{source}: negation of one number",
        "high",
    )
    full = C(1.0, "", source, "high")
    return dataclasses.replace(
        base,
        name=name,
        title=f"this machine, {torch.get_num_threads()} threads",
        matrix=matrix,
        vector={"float32": vector, "float64": C(vector / 2, "FLOP/s", "derived: half of float32", "medium")},
        memory_bandwidth=memory,
        matrix_efficiency=full,
        vector_efficiency=full,
        memory_efficiency=full,
        launch=launch,
        matrix_cores=torch.get_num_threads(),
        vector_cores=torch.get_num_threads(),
    )
