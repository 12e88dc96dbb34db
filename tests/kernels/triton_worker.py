"""What needs triton in a process of its own, because importing it changes how the rest of torch behaves.

    python triton_worker.py interpret    distances of every case from float64, each in one type, on CPU in Triton's
                                         interpreter
    python triton_worker.py interpret_rest  of every case in the other types
    python triton_worker.py lower CODEGEN   a model compiled for "cuda", on CPU in the interpreter: its kernels and its
                                            gradients
    python triton_worker.py compile      every kernel compiled for sm_90, in one size: registers, stack and
                                         shared memory
    python triton_worker.py compile_all  in every size, for sm_80 and sm_90

Prints one JSON object on the last line.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from typing import Any
from unittest import mock

MODE = sys.argv[1]
if not MODE.startswith("compile"):
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
import triton

from mindspeed_fx.kernels.triton import column_sums
from mindspeed_fx.kernels.triton import launch as launch_module
from mindspeed_fx.kernels.triton.launch import launching
from tests.kernels import loss_cases, region_cases, triton_not_finite
from tests.kernels import triton_cases as cases

BF16, F32 = torch.bfloat16, torch.float32


def interpret() -> dict[str, Any]:
    found = {
        f"cast_first-{dtype}".replace("torch.", ""): cases.equal_shares(dtype, "cpu")
        for dtype in (torch.float16, torch.float32)
    }
    found["without_rows"] = cases.without_rows("cpu")
    found["far_apart"] = cases.far_apart("cpu")
    found["adamw"] = cases.adamw("cpu")
    found["loss_in_chunks"] = loss_cases.distances("cpu")
    found["loss_not_finite"] = loss_cases.what_is_not_finite("cpu")
    found["regions"] = region_cases.distances(F32)
    found["not_finite"] = triton_not_finite.counts("cpu")
    found["as_on_npu"] = as_on_npu()
    found["chunks_of_segment"] = chunks_of_segment()
    return found | distances(rest=False)


def as_on_npu() -> dict[str, dict]:
    """Distances of a scan in the kernels that an NPU has."""

    def run(kernel: Any, grid: int, args: tuple, num_warps: int, constants: dict[str, Any]) -> None:
        kernels.append(kernel.fn.__name__)
        kernel[(grid,)](*args, **constants)

    kernels: list[str] = []
    with launching(run, for_npu=True):
        wanted = [c for c in cases.CASES if c.name in ("selective_scan-whole", "selective_scan-plain")]
        found = {c.name: cases.distances(c, F32, "cpu") for c in wanted}
    return {"kernels": sorted(set(kernels)), "distances": found}


def chunks_of_segment() -> dict[str, list[int]]:
    """Chunks of a segment of a scan on 132 multiprocessors of 16 warps, by (programs of a segment, chunks)."""
    segments = importlib.import_module("mindspeed_fx.kernels.triton.selective_scan_segments")
    sizes, found = ((160, 64), (2, 64), (700, 10), (4000, 64), (1, 1)), {}
    for device in ("cuda", "npu"):
        u: Any = types.SimpleNamespace(device=types.SimpleNamespace(type=device))
        with mock.patch.object(launch_module, "_multiprocessors", lambda _: 132):
            found[device] = [segments.chunks_of_segment(u, count, chunks, 16) for count, chunks in sizes]
    return found


def distances(rest: bool = True) -> dict[str, dict]:
    column_sums.COLUMNS = 512  # 33,000 columns are 2,063 programs of 16, of 15 ms each in the interpreter
    return {
        f"{case.name}-{dtype}".replace("torch.", ""): cases.distances(case, dtype, "cpu")
        for case in cases.CASES
        for dtype in cases.TOLERANCE
        if rest != (cases.in_turn(case) is dtype)
    }


def lower() -> dict[str, Any]:
    """Kernels that were chosen, and the largest error of loss and gradients against eager."""
    return cases.through_the_backend("cpu", {"target": "cuda", "codegen": sys.argv[2]})


# ---------------------------------------------------------------- offline, for real devices


class Launchers(dict):
    """Modules of kernels/triton by name."""

    def __missing__(self, name):
        self[name] = importlib.import_module(f"mindspeed_fx.kernels.triton.{name}")
        return self[name]


def launches() -> list[tuple[str, object, tuple, int, dict]]:
    """(label, kernel, arguments, warps, constants) of the launches that the launchers make for training shapes."""
    found = []
    run = Launchers()
    new = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    with launching(
        lambda kernel, grid, args, num_warps, constants: found.append((label, kernel, args, num_warps, constants))
    ):
        for dtype in (BF16, F32):
            short = str(dtype).removeprefix("torch.")
            for hidden in (64, 1000, 4096, 8192, 16384, 32768, 131072):
                label = f"{hidden}-{short}"
                x, w, rstd = new(8192, hidden, dtype=dtype), new(hidden, dtype=dtype), new(8192, 1, dtype=F32)
                run["rms_norm"].forward(x, w, 1e-5, True)
                run["rms_norm"].backward(x, x, w, rstd, True, True)
                if hidden not in ((4096, 32768) if dtype == BF16 else (8192,)):
                    continue
                label = f"sum-{hidden}-{short}"
                run["add_rms_norm"].forward(x, x, w, 1e-5, True)
                run["add_rms_norm"].backward(x, x, x, w, rstd, True, True)
            for hidden in (4096, 12288, 16384, 32768) if dtype == BF16 else (8192,):
                label = f"sum-{hidden}-{short}"
                x, w, rstd = new(8192, hidden, dtype=dtype), new(hidden, dtype=dtype), new(8192, 1, dtype=F32)
                run["add_layer_norm"].forward(x, x, w, w, 1e-5)
                run["add_layer_norm"].backward(x, x, x, w, rstd, rstd, True, True)
            label = f"experts-{short}"
            x, pairs, probs = (
                new(8192 * 2, 4096, dtype=dtype),
                new(8192 * 2, dtype=torch.int64),
                new(8192, 2, dtype=dtype),
            )
            run["moe_unpermute"].forward(x, pairs, probs)
            run["moe_unpermute"].backward(new(8192, 4096, dtype=dtype), x, pairs, probs, 2)
            for ffn in (1000, 11008) if dtype == BF16 else ():
                label = f"{ffn}-{short}"
                x, y = new(8192, 2 * ffn, dtype=dtype), new(8192, ffn, dtype=dtype)
                run["glu"].forward(x)
                run["glu"].backward(y, x)
            for activation in ("gelu", "relu") if dtype == BF16 else ("gelu_tanh",):
                label = f"{activation}-{short}"
                x = new(8192, 4096, dtype=dtype)
                run["glu"].forward(x, x, activation)
                run["glu"].backward(x, x, x, activation)
            if dtype == BF16:
                label, flat, narrow = f"flat-{short}", new(2**24, dtype=F32), new(2**24, dtype=BF16)
                run["adamw"].step(flat, narrow, flat, flat, narrow, 1e-3, 0.999, 0.9, 0.95, 1e-8, 1.5, 0.5)
            for interleaved in (True, False):
                label = f"{'interleaved' if interleaved else 'half'}-{short}"
                x, cos = new(4096, 2, 32, 128, dtype=dtype), new(4096, 1, 1, 128, dtype=F32)
                run["rope"].forward(x, cos, cos, interleaved)
                if interleaved != (dtype == F32):
                    run["rope_pair"].rotate(x, x[:, :, :8], cos, cos, interleaved, False)
                label = "backward-" + label
                run["rope"].backward(x, x, cos, cos, interleaved, False)
            x = new(2, 4096, 8192, dtype=dtype)
            label, w = f"{'channels' if dtype == BF16 else 'sequence'}-last-{short}", new(4096, 4, dtype=dtype)
            x = new(2, 8192, 4096, dtype=dtype).transpose(1, 2) if dtype == BF16 else x
            run["causal_conv1d"].forward(x, w, None, True)
            run["causal_conv1d"].backward(x, x, w, None, True)
            for width in (128, 64) if dtype == BF16 else ():
                label, heads = f"32 heads of {width}", lambda n, *width: new(1, 4096, n, *width, dtype=BF16)
                q, v, gate = (x.transpose(1, 2) for x in (heads(16, width), heads(32, width), heads(32)))
                call = (q, q, v, gate, gate, None, 0.1, 1e-6, 64)
                starts = run["gated_delta_rule"].forward(*call)[2]
                run["gated_delta_rule_backward"].backward(v, None, starts, *call)
                label, rates = f"32 heads of {width}, gates of channels", new(1, 4096, 32, width, dtype=F32)
                call = (v, v, v, rates.transpose(1, 2), gate, None, 0.1, 1e-6)
                starts = run["kimi_delta_attention"].forward(*call)[2]
                run["kimi_delta_attention_backward"].backward(v, None, starts, *call)
            for width in (128, 64) if dtype == BF16 else ():
                label, rates = f"80 heads of 64 and {width}", new(80, dtype=F32)
                x, columns = new(1, 4096, 80, 64, dtype=BF16), new(1, 4096, 1, width, dtype=BF16)
                call = (x, x[..., 0], rates, columns, columns, rates, None, 64)
                out, _, starts = run["ssd"].forward(*call)
                run["ssd_backward"].backward(out, None, starts, *call)
            label, rows = f"5120 channels-{short}", lambda n: new(1, 4096, n, dtype=dtype).transpose(1, 2)  # noqa: B023
            rates, channels = new(5120, 16, dtype=F32), new(5120, dtype=F32)
            call = (rows(5120), rows(5120), rates, rows(16), rows(16), channels, rows(5120), channels, None, True)
            out, _, starts = run["selective_scan"].forward(*call)
            run["selective_scan_backward"].backward(out, None, starts, *call)
            label, rows = f"segments-{short}", lambda n: new(1, 4096, n, dtype=dtype).transpose(1, 2)  # noqa: B023
            call = (rows(32), rows(32), new(32, 16, dtype=F32), rows(16), rows(16), None, None, None, None, True)
            out, _, starts = run["selective_scan"].forward(*call)
            run["selective_scan_backward"].backward(out, None, starts, *call)
            label, streams = f"4 streams-{short}", new(8192, 4, 4, dtype=dtype)
            run["sinkhorn_knopp"].forward(streams, 20, 1e-6)
            run["sinkhorn_knopp"].backward(streams, streams, 20, 1e-6)
            if dtype == F32:
                label, top = "32 heads", new(1, 32, 4096, 8, dtype=F32)
                run["attention_lse"].forward(top, top)
            turned, interleaved = (128, False) if dtype == BF16 else (32, True)
            label = f"{turned}-{'interleaved' if interleaved else 'half'}-{short}"
            q, w, angles, rstd = (
                new(1, 4096, 32, 128, dtype=dtype).transpose(1, 2),
                new(128, dtype=dtype),
                new(1, 1, 4096, turned, dtype=dtype),
                new(1, 32, 4096, 1, dtype=F32),
            )
            run["qk_norm_rope"].forward(q, w, angles, angles, 1e-6, True, interleaved)
            run["qk_norm_rope"].backward(q, q, w, rstd, angles, angles, interleaved, True)
            for vocab in (32000, 128256):
                label = f"{vocab}-{short}"
                x, target, lse = new(8192, vocab, dtype=dtype), new(8192, dtype=torch.int64), new(8192, dtype=F32)
                run["cross_entropy"].forward(x, target, -100, 0.1)
                if vocab == (128256 if dtype == BF16 else 32000):
                    run["linear_cross_entropy"].chunk(
                        x, target, lse, *((0.0, 0.0, 0.0) if dtype == BF16 else (0.1, 0.1, 30.0)), True
                    )
                run["cross_entropy"].backward(lse, x, target, lse, -100, 0.1)
            for hidden in (4096,) if dtype == BF16 else (1000,):
                label = f"{hidden}-{short}"
                x, bias, seed = new(8192, hidden, dtype=dtype), new(hidden, dtype=dtype), new(2, dtype=torch.int32)
                run["dropout_add_seeded"].forward(x, bias, x, seed, 0.1)
                run["dropout_add_seeded"].backward(x, seed, 0.1)
    return found


def compile_offline(every: bool = False) -> dict[str, dict]:
    """ "kernel label sm_NN" -> {seconds, cubin bytes, registers, stack, shared}; one size of each kernel, or ``every``
    one for both architectures.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = {}
    todo = launches()
    if not every:
        todo = list({kernel.fn: (label, kernel, *rest) for label, kernel, *rest in todo}.values())
    for label, kernel, args, num_warps, constants in todo:
        # As a launch specializes them: integers equal to one are constants, alignment to 16 is known.
        runtime = dict(zip(kernel.arg_names, args))
        constants = constants | {
            name: value for name, value in runtime.items() if isinstance(value, int) and value == 1
        }
        signature = {name: "constexpr" if name in constants else _type(runtime[name]) for name in kernel.arg_names}
        aligned = [n for n, v in runtime.items() if isinstance(v, torch.Tensor) or isinstance(v, int) and v % 16 == 0]
        attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = ASTSource(
            kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, attributes
        )
        for arch in (80, 90) if every else (90,):
            start = time.perf_counter()
            made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})
            seconds = time.perf_counter() - start
            wide = re.findall(r"ld\.global[.\w]*\.v4\.b32|cp\.async\.cg\.shared\.global .*, 0x10", made.asm["ptx"])
            found[f"{kernel.fn.__name__} {label} sm_{arch}"] = {
                "seconds": seconds,
                "cubin": len(made.asm["cubin"]),
                "warps": num_warps,
                "shared": made.metadata.shared,
                "wide_loads": len(wide),
                **_resources(made.asm["cubin"]),
            }
    return found


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return {BF16: "*bf16", F32: "*fp32", torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes of stack per thread: what ptxas spills lies there."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(usage[1]), "stack": int(usage[2])}


if __name__ == "__main__":
    modes = {
        "interpret": interpret,
        "interpret_rest": distances,
        "lower": lower,
        "compile": compile_offline,
        "compile_all": lambda: compile_offline(every=True),
    }
    print(json.dumps(modes[MODE]()))
