"""The Triton kernels: values in Triton's interpreter, code for real devices by offline compilation, both on CPU; and on
CUDA.

What imports triton runs in processes of its own (triton_worker.py). They find it installed, or in the directory that
MINDSPEED_FX_TRITON names, which keeps it out of every other test:

    pip install --no-deps --target build/triton triton==3.9.0
    MINDSPEED_FX_TRITON=build/triton python -m pytest tests/kernels/test_triton.py
"""

import ast
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from mindspeed_fx.compat import dispatcher
from mindspeed_fx.kernels import REGISTRY, triton
from tests.kernels import loss_cases
from tests.kernels import triton_cases as cases

HERE = pathlib.Path(__file__).parent
NAMED = os.environ.get("MINDSPEED_FX_TRITON", "")
FOUND = NAMED if os.path.isdir(os.path.join(NAMED, "triton")) else None
needs_triton = pytest.mark.skipif(
    not FOUND and importlib.util.find_spec("triton") is None,
    reason="triton is not installed, nor named by MINDSPEED_FX_TRITON",
)


def jitted_functions():
    """Name -> names that it calls, of every function under ``@triton.jit`` in kernels/triton."""
    results = {}
    for path in pathlib.Path(triton.__file__).parent.glob("*.py"):
        for f in ast.walk(ast.parse(path.read_text())):
            if isinstance(f, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in f.decorator_list):
                results[f.name] = {
                    c.func.id for c in ast.walk(f) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)
                }
    return results


JITTED = jitted_functions()
ON_NPU = {"selective_scan_gradients"}
"""Kernels of NPUs alone."""
KERNELS = set(JITTED) - set().union(*JITTED.values()) - ON_NPU
"""What is launched on cuda: no other kernel calls it."""

SPILLED = {
    # Faster with few warps, spills and all: benchmarks/results/2026-11-27-gpu_sweeps.txt. Of the scan triton 3.9 spills
    # where a sequence is one segment.
    **{"delta_rule_chunks": 152, "delta_rule_query_gradients": 104, "delta_rule_key_gradients": 168},
    "ssd_step_gradients": 32,
    "selective_scan_segment_gradients": 104,
    "layer_norm_backward_parts sum-16384-bfloat16 sm_90": 24,
}
"""Bytes per thread where it is more than 8 (ptxas holds one backward to 80 registers, for occupancy, and leaves two
values on the stack): of the first after its loop."""


SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on every device since sm_80; sm_86 and sm_89 have the least."""


@functools.cache
def run_worker(*mode):
    paths = [os.path.abspath(FOUND)] if FOUND else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(HERE.parents[1])])}
    return subprocess.run(
        [sys.executable, str(HERE / "triton_worker.py"), *mode], env=env, capture_output=True, text=True
    )


def worker(*mode):
    run = run_worker(*mode)
    if "InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars')" in run.stderr:
        pytest.skip("this Triton's interpreter needs NumPy before 2.4, which makes no number of an array of one")
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@needs_triton
@pytest.mark.parametrize(
    "case, dtype, mode",
    [
        pytest.param(c.name, str(t).removeprefix("torch."), mode, marks=marks)
        for c in cases.CASES
        for t in cases.TOLERANCE
        for mode, marks in [("interpret", ()) if t is cases.in_turn(c) else ("interpret_rest", pytest.mark.slow)]
    ],
)
def test_values_in_the_interpreter(case, dtype, mode):
    distances = worker(mode)[f"{case}-{dtype}"]
    assert distances and all(d <= 1 for d in distances.values()), distances


@needs_triton
@pytest.mark.parametrize("weight", ["float16", "float32"])
def test_where_the_norm_is_rounded(weight):
    shares = worker("interpret")[f"cast_first-{weight}"]
    assert shares["True-True"] > 0.99 and shares["False-False"] > 0.99, shares
    assert shares["True-False"] < 0.9 and shares["False-True"] < 0.9, shares


@needs_triton
def test_no_rows():
    assert worker("interpret")["without_rows"] == [
        [0, 64],
        [0, 1],
        [0, 64],
        [64],
        [9000],
        [0, 32],
        [0],
        [0],
        [0, 1, 64],
    ]


@needs_triton
def test_places_beyond_32_bits():
    assert worker("interpret")["far_apart"] == [True] * 4


@needs_triton
def test_adamw_in_the_interpreter():
    assert all(d <= 1 for d in worker("interpret")["adamw"].values()), worker("interpret")["adamw"]


@needs_triton
def test_losses_in_chunks_that_nobody_waits_for():
    found = worker("interpret")
    assert len(found["loss_in_chunks"]) == 12 and all(d <= 1 for d in found["loss_in_chunks"].values()), found
    assert all(found["loss_not_finite"])


@needs_triton
def test_regions_in_the_interpreter():
    assert all(d < 2e-6 for d in worker("interpret")["regions"].values()), worker("interpret")["regions"]


@needs_triton
def test_infinities_and_nan_in_the_interpreter():
    assert not any(worker("interpret")["not_finite"].values()), worker("interpret")["not_finite"]


@needs_triton
def test_kernels_of_an_npu_in_the_interpreter():
    found = worker("interpret")["as_on_npu"]
    assert set(found["kernels"]) == ON_NPU | {"selective_scan_states"} and len(found["distances"]) == 2
    assert all(d <= 1 for ds in found["distances"].values() for d in ds.values()), found


@needs_triton
def test_segments_of_a_scan_fill_the_device_once():
    """5 chunks: 13 segments of 160 programs on 132 * 16 warps; a sequence is not split for programs that fill it."""
    assert worker("interpret")["chunks_of_segment"] == {"cuda": [5, 1, 4, 64, 1], "npu": [64, 64, 10, 64, 1]}


def assert_lowered(found, codegen):
    ours = [k for k in found["kernels"] if ": triton, " in k]
    left_to_codegen = ["rms_norm", "rope", "swiglu"]
    left_to_codegen += [f"{name}_backward" for name in (*left_to_codegen, "cross_entropy")]
    left_to_codegen = left_to_codegen if codegen == "inductor" else []
    assert len(found["kernels"]) == 8 and len(ours) == 8 - len(left_to_codegen), found
    assert not any(name in k for k in ours for name in left_to_codegen)
    assert found["error"] < 1e-5


@needs_triton
@pytest.mark.parametrize("codegen", [pytest.param("inductor", marks=pytest.mark.slow), "eager"])
def test_a_model_lowered_to_the_kernels(codegen):
    assert_lowered(worker("lower", codegen), codegen)


@needs_triton
@pytest.mark.parametrize(
    "mode, devices",
    [("compile", {"sm_90"}), pytest.param("compile_all", {"sm_80", "sm_90"}, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_compiled_for_real_devices(kernel, mode, devices):
    found = {k: v for k, v in worker(mode).items() if k.split()[0] == kernel}
    assert {k.split()[-1] for k in found} == devices
    for name, made in found.items():
        assert made["cubin"] > 0, name
        assert made["stack"] <= SPILLED.get(name, SPILLED.get(kernel, 8)), f"{name} spills registers"
        assert made["registers"] * 32 * made["warps"] <= 65536, f"{name} does not fit a multiprocessor"
        assert made["shared"] <= SHARED, f"{name} takes more shared memory than some devices have"
        assert made["wide_loads"] > 0, f"{name} reads no 16 bytes at once"


@needs_triton
def test_every_kernel_was_compiled():
    assert {k.split()[0] for k in worker("compile")} == KERNELS


def test_every_kernel_has_cases():
    """An operator with a Triton kernel is compared with its reference: ``CASES`` of triton_cases.py."""
    assert len(triton.KERNELS) > 15 and len(KERNELS) > 20
    names = {name.removeprefix("mindspeed.").removesuffix("_backward") for name in triton.KERNELS}
    assert names - {"adamw_step"} <= {c.operator for c in cases.CASES}, "an operator with a kernel and without a case"


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


SPACES = meta(1, 8, 4), meta(4, dtype=torch.float32)
"""Steps and rates of a state space dual."""


@pytest.mark.parametrize(
    "name, args, reason",
    [
        ("rms_norm", (meta(4, 8), meta(8), 1e-5, True), None),
        ("rms_norm", (meta(4, 16)[:, :8], None, 1e-5, True), None),
        ("rms_norm", (meta(4, 8, dtype=torch.float64), None, 1e-5, True), "x is float64"),
        ("rms_norm", (meta(8, 4).t(), None, 1e-5, True), "rows of x"),
        ("rms_norm", (meta(3, 4, 8).transpose(0, 1), None, 1e-5, True), "rows of x"),
        (
            "rms_norm_backward",
            (meta(1).expand(4, 8), meta(4, 8), None, meta(4, 1, dtype=torch.float32), True, False),
            "rows of grad",
        ),
        ("swiglu", (meta(4, 16),), None),
        ("swiglu", (meta(4, 2**18 + 2),), "262146 elements"),
        ("swiglu_backward", (meta(4, 8), meta(4, 8), meta(8, 4).t()), "rows of up"),
        ("rope", (meta(2, 6, 4, 8).transpose(1, 2), meta(6, 8), meta(6, 8), False), None),
        ("rope", (meta(2, 2, 4, 6, 8), meta(6, 8), meta(6, 8), False), "leading dimensions"),
        ("rope", (meta(6, 2048), meta(6, 2048), meta(6, 2048), False), "heads of 2048"),
        ("rope_backward", (meta(6, 8), meta(6, 8), meta(6, 8), meta(6, 8), False, True), "angles have gradients"),
        ("cross_entropy", (meta(4, 2**18), meta(4, dtype=torch.int64), -100, 0.1), None),
        ("sinkhorn_knopp", (meta(5, 4, 4), 2, 1e-6), None),
        ("sinkhorn_knopp", (meta(5, 3, 3), 2, 1e-6), "matrices of 3 rows"),
        ("ssd", (meta(1, 8, 4, 16), *SPACES, meta(1, 8, 2, 128), meta(1, 8, 2, 128), None, None), None),
        ("ssd", (meta(1, 8, 4, 16), *SPACES, meta(1, 8, 2, 256), meta(1, 8, 2, 256), None, None), "states 256 wide"),
        (
            "ssd",
            (meta(1, 8, 4, 16, dtype=torch.float32), *SPACES, meta(1, 8, 2, 16), meta(1, 8, 2, 16), None, None),
            "no 16-bit type",
        ),
        ("cross_entropy", (meta(4, 2**18 + 1), meta(4, dtype=torch.int64), -100, 0.1), "262145 elements"),
    ],
)
def test_when_a_kernel_is_refused(monkeypatch, name, args, reason):
    monkeypatch.setattr(triton, "missing", lambda: None)
    lowering, reasons = REGISTRY[getattr(torch.ops.mindspeed, name).default].choose("cuda", args, {})
    assert (lowering is not None) == (reason is None) and (reason is None or reason in reasons[0]), reasons


def test_without_triton(monkeypatch):
    monkeypatch.setattr(triton, "missing", lambda: "triton is not installed")
    lowering, reasons = REGISTRY[torch.ops.mindspeed.rms_norm.default].choose(
        "cuda", (meta(4, 8), None, 1e-5, True), {}
    )
    assert lowering is None and "triton is not installed" in reasons[0]


# ---------------------------------------------------------------- on a CUDA device

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", cases.TOLERANCE, ids=str)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_values_on_cuda(case, dtype):
    distances = cases.distances(case, dtype, "cuda")
    assert all(d <= 1 for d in distances.values()), distances


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("weight", [torch.float16, torch.float32], ids=str)
def test_where_the_norm_is_rounded_on_cuda(weight):
    shares = cases.equal_shares(weight, "cuda")
    assert (
        shares["True-True"] > 0.99
        and shares["False-False"] > 0.99
        and shares["True-False"] < 0.9
        and shares["False-True"] < 0.9
    ), shares


@cuda
@pytest.mark.cuda
def test_adamw_and_places_beyond_32_bits_on_cuda():
    assert all(d <= 1 for d in cases.adamw("cuda").values()) and all(cases.far_apart("cuda"))


@cuda
@pytest.mark.cuda
def test_losses_in_chunks_on_cuda():
    distances = loss_cases.distances("cuda")
    assert all(d <= 1 for d in distances.values()) and all(loss_cases.what_is_not_finite("cuda")), distances
    assert dispatcher.adds_narrow_products(torch.bfloat16, torch.device("cuda"))


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_a_model_on_cuda(codegen):
    assert_lowered(cases.through_the_backend("cuda", {"codegen": codegen}), codegen)


@cuda
@pytest.mark.cuda
def test_offsets_beyond_32_bits():
    tokens, vocab = 20000, 131072  # 2.6e9 logits
    logits = torch.zeros(tokens, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-3:] = torch.randn(3, vocab)
    target = torch.arange(tokens, device="cuda")
    loss, lse = torch.ops.mindspeed.cross_entropy_triton(logits, target, -100, 0.0)
    args = (logits[-3:].double(), target[-3:], -100, 0.0)
    want, want_lse = torch.ops.mindspeed.cross_entropy(*args)
    torch.testing.assert_close(loss[-3:].double(), want, rtol=1e-5, atol=1e-5)
    grad = torch.ops.mindspeed.cross_entropy_backward_triton(torch.ones_like(loss), logits, target, lse, -100, 0.0)
    want_grad = torch.ops.mindspeed.cross_entropy_backward(torch.ones_like(want), args[0], args[1], want_lse, -100, 0.0)
    torch.testing.assert_close(grad[-3:].double(), want_grad, rtol=1e-2, atol=1e-7)


def test_large_gradients_are_kernels_beside_generated_code_and_small_ones_say_why_not(monkeypatch):
    monkeypatch.setattr(triton, "missing", lambda: None)
    fused = REGISTRY[torch.ops.mindspeed.rms_norm_backward.default]
    with FakeTensorMode():
        for rows, taken in ((2**12, True), (2**11, False)):
            x, w, rstd = torch.empty(rows, 4096), torch.empty(4096), torch.empty(rows, 1)
            kernel, reasons = fused.choose("cuda", (x, x, w, rstd, True, True), {}, codegen=True)
            assert (kernel is not None) == taken
            assert taken or [r.split(": ", 1)[1] for r in reasons] == [
                "fewer than 16777216 elements, or an unknown number"
            ]
            assert fused.choose("cuda", (x, x, w, rstd, True, True), {})[0] is not None
