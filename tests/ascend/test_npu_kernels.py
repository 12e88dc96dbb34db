"""Triton kernels compiled for Ascend SoCs: they fit, keep double buffering, work on vectors; and what does not is found
out.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_fx.ascend import bishengir, kernels, toolchain
from mindspeed_fx.ascend.npu_graphs import trace_on_npu
from mindspeed_fx.kernels.triton import npu, tiles
from mindspeed_fx.options import Options
from tests.ascend import kernel_calls
from tests.ascend.npu_process import HERE

MISSING = toolchain.missing("triton_ascend")
needs_compiler = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

SINGLE = {"rms_norm_backward 8192", "add_rms_norm_backward 8192"}
"""Rows that fill the buffer once; in column blocks they would be read three times."""

_cache = {}


def compiled(soc, calls):
    if (soc, len(calls)) not in _cache:
        _cache[soc, len(calls)] = kernel_calls.compiled(calls, soc)
    return _cache[soc, len(calls)]


def assert_good(name, rows):
    assert isinstance(rows, list), rows
    for row in rows:
        assert row["outcome"] == "ok" or name in SINGLE, row
        assert row["scalar_loops"] == 0 and 0 < row["on_chip"]["UB"] <= 192 * 1024, row


@pytest.mark.npu
@needs_compiler
@pytest.mark.parametrize(
    "name", [n if n in kernel_calls.few() else pytest.param(n, marks=pytest.mark.slow) for n in kernel_calls.many()]
)
def test_golden_numbers(name):
    compiler, found = compiled("Ascend910B2", kernel_calls.few() if name in kernel_calls.few() else kernel_calls.many())
    assert_good(name, found[name])
    golden = json.loads(kernel_calls.GOLDEN.read_text())
    if compiler not in golden:
        pytest.skip(f"no golden numbers for bishengir-compile {compiler}; run tests/ascend/kernel_calls.py")
    assert found[name] == golden[compiler][name]


@pytest.mark.npu
@needs_compiler
@pytest.mark.parametrize(
    "soc",
    [
        "Ascend910_9391",
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in (
                "Ascend910B1",
                "Ascend910B3",
                "Ascend910B4",
                "Ascend910_9382",
                "Ascend910_9381",
                "Ascend910_9372",
                "Ascend910_9362",
            )
        ),
    ],
)
def test_every_soc(soc):
    """The on-chip memories of these SoCs are equal, and so are the tiles; every kernel is tried in the slow tier."""
    calls = kernel_calls.few() if soc == "Ascend910_9391" else kernel_calls.many()
    found, wanted = compiled(soc, calls)[1], compiled("Ascend910B2", calls)[1]
    for name, rows in found.items():
        assert_good(name, rows)
        assert rows == wanted[name]


@pytest.mark.npu
@needs_compiler
def test_bad_kernels_are_found_out():
    home = toolchain.path("triton_ascend")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), str(HERE.parents[1])])}
    run = subprocess.run(
        [sys.executable, str(HERE / "bad_kernels.py"), str(home)], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["gather"]["scalar_loops"] > 0
    assert found["4096"]["outcome"] == "ok" and found["4096"]["dynamic"] == found["4096"]["scalar_loops"] == 0
    assert found["16384"]["outcome"] == "single-buffered"
    assert (
        found["65536"]["outcome"] == "overflow"
        and found["65536"]["message"].startswith("UB overflow: needs ")
        and found["65536"]["message"].endswith("of 196,608")
    )


def test_what_cannot_be_compiled():
    with pytest.raises(ValueError, match='no SoC "Ascend910B9"'):
        kernels.compile_kernels([], "Ascend910B9")
    with pytest.raises(ValueError, match="mindspeed::attention has no Triton kernel"):
        kernels.call("attention")


@given(st.integers(1, 262144))
def test_column_blocks(width):
    found = [t["BLOCK"] for t in tiles.candidates({"N": width, "BLOCK": 4096})]
    assert found == sorted(set(found), reverse=True) and 1 <= len(found) <= tiles.TRIES
    assert all(b % 16 == 0 and b <= tiles._WIDEST for b in found)


@given(st.integers(1, 32768), st.sampled_from([1, 2, 4, 8]))
def test_whole_rows(width, rows):
    found = tiles.candidates({"N": width, "ROWS": rows, "BLOCK": 1 << max(0, width - 1).bit_length()})
    assert (
        all(t["BLOCK"] == width for t in found)
        and found[-1]["ROWS"] >= 1
        and found[0]["ROWS"] * width <= tiles._TOGETHER
    )


class Overflowing:
    """A kernel of which only tiles of at most ``most`` compile."""

    __name__ = "overflowing"

    def __init__(self, most):
        self.started, self.most = [], most

    def __getitem__(self, grid):
        def start(*args, **constants):
            self.started.append((grid, constants))
            if constants["BLOCK"] > self.most:
                raise RuntimeError("MLIRCompilationError: ub overflow, requires 1704192 bits")
            if constants["BLOCK"] == 1024:
                raise ValueError("no such type")

        return start


def test_launches_take_the_first_tile_that_fits():
    kernel, x = Overflowing(4096), torch.empty(4, 16384)
    for _ in range(2):
        npu.start(kernel, 40, (x, 4), {"N": 16384, "BLOCK": 4096})
    assert [c["BLOCK"] for _, c in kernel.started] == [16384, 8192, 4096, 4096] and {g for g, _ in kernel.started} == {
        (40,)
    }
    with pytest.raises(ValueError, match="no such type"):
        npu.start(kernel, 40, (x, 4), {"N": 1024, "BLOCK": 1024})
    with pytest.raises(RuntimeError, match="ub overflow"):
        npu.start(Overflowing(16), 40, (x, 4), {"N": 10007, "BLOCK": 16384})


IR = """
func.func @kernel(%arg0: memref<?xbf16>) {
  scf.for %i = %a to %b {
    hivm.hir.load ins(%1 : memref<4096xbf16, gm>) outs(%2 : memref<4096xbf16, ub>)
    hivm.hir.vmul ins(%3, %4 : memref<4096xf32, ub>, memref<4096xf32, ub>) outs(%5 : memref<4096xf32, ub>)
    hivm.hir.set_flag[<PIPE_V>, <PIPE_MTE3>]
    scf.for %j = %a to %b {
      %6 = memref.load %7[%j] : memref<?xf32>
      memref.store %6, %8[%j] : memref<1024xf32>
    }
    hivm.hir.store ins(%5 : memref<?xbf16, ub>) outs(%9 : memref<?xbf16, gm>)
  }
  return
}
"""


def test_what_a_trip_does():
    found = bishengir.tally(IR)
    assert (
        found["work"] == {"1": {"repeats": 64, "sync": 1, "moves": 2}}
        and found["scalar_loops"] == 1
        and found["dynamic"] == 1
    )


def test_the_highest_byte():
    module = """
func.func @kernel() {
  %c0_i64 = arith.constant 0 : i64
  %c8192_i64 = arith.constant 8192 : i64
  %0 = hivm.hir.pointer_cast(%c0_i64, %c8192_i64) : memref<4096xbf16, #hivm.address_space<ub>>
  %1 = hivm.hir.pointer_cast(%c8192_i64) : memref<16x16xf32, #hivm.address_space<cc>>
}
"""
    assert bishengir.on_chip(module) == {"UB": 16384, "L0C": 8192 + 1024}


def test_the_last_attempt_counts():
    log = [
        "// -----// IR Dump After A //----- //",
        *IR.replace("4096xf32", "8192xf32").splitlines(),
        "[NOTE] Ub overflow detected; automatically set enable-auto-multi-buffer to false and retrying",
        "// -----// IR Dump After A //----- //",
        *IR.splitlines(),
    ]
    messages, ir = bishengir._separate("\n".join(log))
    assert (
        len(messages) == 2 - 1 + 0
        and "auto-multi-buffer to false" in messages[0]
        and bishengir.tally(ir)["work"]["1"]["repeats"] == 64
    )
    assert bishengir._failure(["error: ub overflow, requires 1704192 bits while 1572864 bits available!"]) == {
        "outcome": "overflow",
        "message": "UB overflow: needs 213,024 bytes of 196,608",
    }


def test_kernels_of_a_graph_and_of_an_operators_way():
    """Dropout and gated units are called by the graph; the chunks of a linear loss that torch_npu does not take launch
    theirs.
    """

    def model(x, gate, up, head, target):
        x = x + torch.nn.functional.dropout((torch.nn.functional.relu(x @ gate) * (x @ up)), 0.1, True)
        x = (x.abs() * 0.3).exp().neg() * x  # of no operator
        return torch.nn.functional.cross_entropy(x @ head.t(), target)

    x, gate, up, head = torch.randn(64, 32), *(torch.randn(n, 32, requires_grad=True) for n in (32, 32, 5000))
    options = Options.parse({"target": "npu", "enable": ["fusion.linear_cross_entropy"]}, environ={})
    calls = trace_on_npu(
        model, (x, gate, up, head, torch.zeros(64, dtype=torch.int64)), {}, options, device="cpu"
    ).triton_calls
    found = {c["operator"]: c for c in calls}
    names = ("dropout_add_seeded", "dropout_add_seeded_backward", "glu", "glu_backward", "linear_cross_entropy_chunk")
    assert all(found[n]["in_graph"] for n in names)
    assert any(
        c["shape"] == [64, 32] and "tl.exp" in c["source"] and not c["in_graph"]
        for c in calls
        if c["operator"] == "region"
    )
    assert found["linear_cross_entropy_chunk"]["arguments"][0]["shape"] == [64, 5000]
