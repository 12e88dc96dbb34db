"""overlap.symmetric_memory: torch's operators for a product and its collective: sites, every limit by name, the model's
choice, values.
"""

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from mindspeed_fx.compat import distributed, fx_graph
from mindspeed_fx.graph.collectives import is_start, kind
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.overlap import mc2
from mindspeed_fx.passes.overlap.decompose import overlap_decompose
from mindspeed_fx.passes.overlap.schedule import overlap_schedule
from mindspeed_fx.passes.overlap.split import overlap_split
from mindspeed_fx.passes.overlap.symmetric_memory import OPERATORS, _of_torch, overlap_symmetric_memory
from tests.passes.overlap import parallel_layers as layers

LARGE = [(1024, 1, 8192), (8192,), (3584, 8192), (8192, 3584)]


def context(**options):
    return Context(Options(**{"target": "cuda", "codegen": "eager", "hardware": "h100", **options}), "forward")


@pytest.fixture
def enabled(monkeypatch):
    monkeypatch.setattr(distributed, "has_symmetric_memory", lambda group: True)


def run(program, of=LARGE, dtype=torch.bfloat16, **options):
    gm = layers.graph(program, of, dtype)
    overlap_split(gm, context())
    return gm, overlap_symmetric_memory(gm, context(**options))


def calls(gm):
    return sorted(str(n.target).split(".")[1] for n in gm.graph.nodes if str(n.target).startswith("symm_mem."))


def test_a_training_step(ranks, enabled):
    ranks(8)
    gm, report = run(layers.training(layers.mlp))
    assert (
        calls(gm) == ["fused_all_gather_matmul"] * 4 + ["fused_matmul_reduce_scatter"] * 4 and len(report.rewrites) == 8
    )
    gm.graph.lint()
    fused = [n for n in gm.graph.nodes if "all_gather_matmul" in str(n.target)]
    assert all(
        n.args[2:] == (0, "0") and n.kwargs == {"return_A": True} for n in fused
    )  # the weight gradient reads what was gathered
    whole, products = fused[0].meta["val"]
    assert tuple(whole.shape) == (8192, 8192) and [tuple(p.shape) for p in products] == [(8192, 3584)]
    assert overlap_decompose(gm, context()).notes == ["no collective that can be cut"]
    assert not overlap_schedule(gm, context()).skipped  # what is in one operator hides its own collective


def test_nobody_else_reads_what_is_gathered(ranks, enabled):
    ranks(8)
    gm, _ = run(lambda x, n, u, d: (torch.ops.mindspeed.linear(layers.all_gather(x), u),))
    (node,) = [n for n in gm.graph.nodes if "symm_mem" in str(n.target)]
    assert (
        node.kwargs == {"return_A": False}
        and node.meta["val"][0] is None
        and not any("c10d" in str(n.target) for n in gm.graph.nodes)
    )


def reasons(program, **given):
    gm, report = run(program, **given)
    assert not report.rewrites and not calls(gm)
    return {s.reason for s in report.skipped} | set(report.notes if not report.skipped else ())


def test_limits(ranks, monkeypatch):
    ranks(8)
    program = layers.training(layers.mlp)
    assert reasons(program, target="npu", hardware="ascend910b2") == {
        'torch has these operators on cuda; the target is "npu"'
    }
    assert reasons(program) == {
        'symmetric memory is not enabled for group "0": '
        'torch.distributed._symmetric_memory.enable_symm_mem_for_group("0")'
    }
    monkeypatch.setattr(distributed, "has_symmetric_memory", lambda group: True)
    assert reasons(lambda x, n, u, d: (layers.all_reduce(x),)) == {"no collective that torch fuses with a product"}
    assert "no product of matrices reads its rows as they are gathered" in reasons(
        lambda x, n, u, d: (layers.all_gather(x).sin(),)
    )
    bias = lambda x, n, u, d: (torch.ops.mindspeed.linear(layers.all_gather(x), u, u[:, 0]),)
    assert reasons(bias) == {"it has a bias"}
    torch.use_deterministic_algorithms(True)
    try:
        assert any("deterministic" in r for r in reasons(program))
    finally:
        torch.use_deterministic_algorithms(False)


def test_several_machines(ranks, enabled):
    ranks(16)
    assert "the ranks are in several machines; symmetric memory is open within one" in reasons(
        layers.training(layers.mlp)
    )


@pytest.fixture
def on_cpu():
    """torch's own fallbacks of the operators, for real tensors of the CPU."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    yield
    library._destroy()


def test_values(lone_world, on_cpu):
    """One rank, whose collectives give back what they get: layouts, transposed weights, who reads what was gathered."""
    gm = layers.graph(layers.training(layers.mlp))
    overlap_split(gm, context())
    fused = fx_graph.copy_graph(gm)
    pairs = [
        p
        for p in (mc2.neighbour_product(n) for n in fused.graph.nodes if is_start(n) and kind(n) in OPERATORS)
        if not isinstance(p, str)
    ]
    for pair in pairs:
        mc2.fuse(fused, pair, _of_torch)
    mc2.in_order(fused)
    fused.graph.lint()
    fused.recompile()
    assert len(calls(fused)) == len(pairs) == 8
    given = layers.inputs(0)
    for a, b in zip(fused(*given), gm(*given), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
