"""A processor: the documented constants of a small server.

The table is for two cores, since a plan must not depend on the machine that makes it; ``mindspeed-fx calibrate``
measures this machine.
"""

from __future__ import annotations

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
