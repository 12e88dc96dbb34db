"""overlap.mc2: torch_npu's operators for a product and its collective: sites, every documented limit by name, the
model's choice.
"""

import pytest
import torch

from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.overlap import mc2
from mindspeed_fx.passes.overlap.decompose import overlap_decompose
from mindspeed_fx.passes.overlap.split import overlap_split
from tests.passes.overlap import parallel_layers as layers

pytestmark = pytest.mark.filterwarnings("error:erase_node")  # of what is erased already
LARGE = [(1024, 1, 4096), (4096,), (1792, 4096), (4096, 1792)]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_domain():
    mc2._domain.clear()
    yield
    mc2._domain.clear()


def context(side="forward", **options):
    return Context(Options(**{"target": "npu", "codegen": "eager", "hardware": "ascend910b2", **options}), side)


def run(program, of=LARGE, dtype=BF16, side="forward", **options):
    gm = layers.graph(program, of, dtype)
    overlap_split(gm, context())
    return gm, mc2.overlap_mc2(gm, context(side, **options))


def calls(gm):
    return sorted(str(n.target).split(".")[1] for n in gm.graph.nodes if str(n.target).startswith("npu."))


def test_a_training_step(ranks):
    ranks(8)
    gm, report = run(layers.training(layers.mlp))
    assert (
        calls(gm) == ["npu_all_gather_base_mm"] * 4 + ["npu_mm_reduce_scatter_base"] * 4 and len(report.rewrites) == 8
    )
    gm.graph.lint()
    fused = [n for n in gm.graph.nodes if "all_gather_base" in str(n.target)]
    assert all(
        n.args[2:] == ("0", 8) and n.kwargs == {"gather_output": True} for n in fused
    )  # the weight gradient reads what was gathered
    assert [tuple(v.shape) for v in fused[0].meta["val"]] == [(8192, 1792), (8192, 4096)]
    report = overlap_decompose(gm, context())
    assert report.notes == ["no collective that can be cut"]


def test_nobody_else_reads_what_is_gathered(ranks):
    ranks(8)
    gm, report = run(lambda x, n, u, d: (torch.ops.mindspeed.linear(layers.all_gather(x), u),))
    (node,) = [n for n in gm.graph.nodes if "npu" in str(n.target)]
    assert (
        node.kwargs == {"gather_output": False}
        and node.meta["val"][1].numel() == 0
        and not any("c10d" in str(n.target) for n in gm.graph.nodes)
    )


def reasons(program, of=LARGE, dtype=BF16, side="forward", **options):
    gm, report = run(program, of, dtype, side, **options)
    assert not report.rewrites and not calls(gm)
    return {s.reason for s in report.skipped} | set(report.notes if not report.skipped else ())


def gathered(x, n, u, d):
    return (layers.all_gather(x) @ u.t(),)


def scattered(x, n, u, d):
    return (layers.reduce_scatter(x @ u.t()),)


def test_limits(ranks):
    ranks(8)
    assert reasons(gathered, dtype=torch.float32) == {"x is float32; valid: float16, bfloat16"}
    assert reasons(gathered, [(64, 1, 128), (128,), (256, 128), (128, 256)]) == {"k is 128; valid: 256 to 65534"}
    assert reasons(gathered, hardware="ascend950pr") == {"documented for Atlas A2 and A3; the hardware is ascend950pr"}
    assert reasons(gathered, target="cpu") == {'torch_npu has these operators; the target is "cpu"'}
    assert reasons(lambda x, n, u, d: (layers.all_reduce(x @ u.t()),)) == {
        "documented for inference, and this graph belongs to a training step"
    }
    assert reasons(lambda x, n, u, d: (torch.ops.mindspeed.linear(layers.all_gather(x), u, u[:, 0]),)) == {
        "it has a bias"
    }
    assert reasons(lambda x, n, u, d: (layers.all_gather(x).sin() @ u.t(),)) == {
        "no product of matrices reads its rows as they are gathered"
    }
    assert reasons(layers.batch_first) >= {"no product of matrices makes its rows as they are scattered"}
    twice = lambda x, n, u, d: (layers.reduce_scatter(y := x @ u.t()), y)
    assert reasons(twice) == {"the product is read by others too, before it is reduced"}
    torch.use_deterministic_algorithms(True)
    try:
        assert reasons(gathered) == {
            "torch.use_deterministic_algorithms is on, and chunks are equal to the whole within rounding only"
        }
    finally:
        torch.use_deterministic_algorithms(False)


def test_world_and_communication_domain(ranks):
    ranks(16)
    assert reasons(gathered) == {"16 ranks; valid on ascend910b2: 2, 4, 8"}
    assert calls(run(gathered, hardware="ascend910c")[0]) == ["npu_all_gather_base_mm"]
    mc2._domain.clear()
    mc2._domain.add("another")
    import torch.distributed as dist

    group = dist.new_group(list(range(8)))
    import torch.distributed._functional_collectives as functional

    inside = lambda x, n, u, d: (functional.wait_tensor(functional.all_gather_tensor(x, 0, group)) @ u.t(),)
    assert reasons(inside) == {
        'on Atlas A2 the fused operators of a model share one communication domain, and group "another" has it'
    }
    mc2._domain.clear()
    across = dist.new_group(list(range(0, 16, 8)))
    apart = lambda x, n, u, d: (functional.wait_tensor(functional.all_gather_tensor(x, 0, across)) @ u.t(),)
    assert reasons(apart) == {"the ranks are in several machines; on Atlas A2 the operator works within one"}


def test_inference_reduces_too(ranks):
    ranks(8)
    reduced = lambda x, n, u, d: (layers.all_reduce(torch.ops.mindspeed.linear(x, u)),)
    assert calls(run(reduced, side="inference")[0]) == ["npu_mm_all_reduce_base"]
    assert reasons(reduced, side="inference", hardware="ascend910c") == {
        "documented for Atlas A2; the hardware is ascend910c"
    }
    mc2._domain.clear()
    short = [(64, 1, 128), (128,), (256, 128), (128, 256)]  # 128 columns, which the others do not take
    assert calls(run(reduced, short, side="inference")[0]) == ["npu_mm_all_reduce_base"]


@pytest.mark.parametrize("layer", [layers.mlp, layers.mlp_whole])
def test_emulated_values(layer, lone_world):
    """One rank, whose collectives give back what they get: layouts, transposed weights, who reads what was gathered."""
    from mindspeed_fx.compat import fx_graph
    from mindspeed_fx.graph.collectives import is_start
    from mindspeed_fx.kernels import npu

    assert npu.missing(tuple(mc2.OPERATORS.values())) is None
    gm = layers.graph(layers.training(layer))
    overlap_split(gm, context())
    fused = fx_graph.copy_graph(gm)
    pairs = [p for p in (mc2.neighbour_product(n) for n in fused.graph.nodes if is_start(n)) if not isinstance(p, str)]
    for pair in pairs:
        mc2.fuse(fused, pair)
    mc2.in_order(fused)
    fused.graph.lint()
    fused.recompile()
    assert len(calls(fused)) == len(pairs) == (8 if layer is layers.mlp else 4)
    given = layers.inputs(0)
    for a, b in zip(fused(*given), gm(*given), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
