"""Kernels that must be found out; run with triton-ascend on the path. Prints what became of each as JSON."""

import json
import sys

import triton
import triton.language as tl

from mindspeed_fx.ascend import bishengir, frontend


@triton.jit
def gather(x, index, y, n, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        y + cols, tl.load(x + tl.load(index + cols, mask=cols < n, other=0), mask=cols < n, other=0.0), mask=cols < n
    )


@triton.jit
def product(a, b, y, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), n, tl.num_programs(0)):
        u, v = tl.load(a + row * BLOCK + cols).to(tl.float32), tl.load(b + row * BLOCK + cols).to(tl.float32)
        tl.store(y + row * BLOCK + cols, (u * tl.sigmoid(u) * v).to(y.dtype.element_ty))


def run(kernel, types, **constants):
    text, _ = frontend.lower(kernel, types, constants, "Ascend910B2")
    return bishengir.compile_linalg(bishengir.compiler(sys.argv[1]), text, "Ascend910B2")


if __name__ == "__main__":
    rows = {"gather": run(gather, {"x": "*fp32", "index": "*i32", "y": "*fp32", "n": "i32"}, BLOCK=1024)}
    rows |= {
        str(b): run(product, {"a": "*bf16", "b": "*bf16", "y": "*bf16", "n": "i32"}, BLOCK=b)
        for b in (4096, 16384, 65536)
    }
    print(json.dumps(rows))
