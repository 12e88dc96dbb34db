"""Single kernels and collectives of the table that constants are fitted to beside whole runs: products by shape, the
vendor's attention by length, vector kernels, collectives by ranks. NCCL's 480 GB/s of H100 is more than a port carries:
switches reduce it, which the formulas of the model do not have.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from typing import Callable

from mindspeed_fx.cost.collectives import collective_seconds
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.operators import Cost, Spec, attention, product

LARGE = 2**28
"""Bytes of a collective that the table calls large."""
EVENT = 50e-6
"""Seconds that timing by events adds to a short kernel: the vendor's attention takes 58 us for work of 8."""


@dataclass(frozen=True)
class KernelRow:
    label: str
    hardware: str
    published: float
    """Seconds."""
    seconds: Callable[[Hardware], float]


def read_kernels(path: str) -> list[KernelRow]:
    """The rows whose shapes are stated."""
    result = []
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            config = dict(p.partition("=")[::2] for p in line["shape_or_config"].split(";"))
            row = (
                _product(line, config) or _attention(line, config) or _collective(line, config) or _vector(line, config)
            )
            if row is not None:
                result.append(row)
    return result


def _product(line: dict[str, str], config: dict[str, str]) -> KernelRow | None:
    names = {"bf16": "bfloat16", "fp16": "float16"}
    if line["what"] == "torch.matmul" and line["hardware"] == "H100":  # the best of its table: a large square
        size, dtype = 8192, "bfloat16"
        square = Spec((size, size), dtype, 2)
        cost = product(square, size, square, square)
        return _row("product, best", cost.matrix / (float(line["value"]) * 1e12), cost, "h100")
    if line["what"] != "torch.matmul" or "m" not in config or config.get("dtype") not in names:
        return None
    m, n, k = (int(config[x]) for x in "mnk")
    dtype = names[config["dtype"]]
    cost = product(Spec((m, n), dtype, 2), k, Spec((m, k), dtype, 2), Spec((k, n), dtype, 2))
    seconds = cost.matrix / (float(line["value"]) * 1e12)
    return _row(f"product {m} {dtype}", seconds, cost)


VECTOR = {
    "megatron_swiglu megatron forward": ("ffn_local", 8192, 6),
    "megatron_rms_norm megatron forward": ("H", 4096, 4),
    "layer_norm huggingface forward": ("N", 4096, 8),
}
"""Kernel of the H100 table -> column of its width, rows, bytes of each element that it moves."""


def _vector(line: dict[str, str], config: dict[str, str]) -> KernelRow | None:
    known = VECTOR.get(line["what"])
    if known is None or "H100 80GB" not in line["hardware"]:
        return None
    column, count, each = known
    nbytes = int(config[column]) * count * each
    if nbytes < LARGE:
        return None
    cost = Cost(read=nbytes / 2, write=nbytes / 2)
    return _row(f"{line['what'].split()[0]} {config[column]}", float(line["value"]) * 1e-3, cost, "h100")


def _attention(line: dict[str, str], config: dict[str, str]) -> KernelRow | None:
    if not line["what"].startswith("npu_fusion_attention") or int(config.get("sq", 0)) < 8192:
        return None
    shape = (1, int(config["heads"]), int(config["sq"]), int(config["hd"]))
    q = Spec(shape, "float16", 2)
    cost = attention(q, q, q, q, False)
    return _row(f"attention {config['sq']}", float(line["value"]) * 1e-6 - EVENT, cost)


def _row(label: str, published: float, cost: Cost, hardware: str = "ascend910b2") -> KernelRow:
    return KernelRow(label, hardware, published, lambda hw: float(cost.seconds(hw)))


def _collective(line: dict[str, str], config: dict[str, str]) -> KernelRow | None:
    match = re.match(r"HCCL (all_gather|all_reduce)$", line["what"])
    if match is None or "ranks" not in config or "A2" not in line["hardware"]:
        return None
    kind, ranks = match[1], int(config["ranks"])
    seconds = LARGE / (float(line["value"]) * 1e9)
    return KernelRow(f"{kind} {ranks}", "ascend910b2", seconds, lambda hw: collective_seconds(kind, LARGE, ranks, hw))
