"""overlap.mc2_experts: torch_npu's operators for an all-to-all and the experts' product: sites, values on every rank,
every limit by name.
"""

import pytest
import torch

from mindspeed_fx.compat import fx_graph
from mindspeed_fx.graph.collectives import is_start, is_wait, kind
from mindspeed_fx.kernels import npu
from mindspeed_fx.kernels.npu.emulation import registry
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.overlap import mc2, mc2_experts
from tests.passes.overlap import parallel_layers as layers

LARGE, SMALL = [(8192, 4096), (4096,), (2, 4096, 2048), (2, 2048, 4096)], [(24, 8), (8,), (2, 8, 6), (2, 6, 8)]
BF16 = torch.bfloat16


def experts(x, norm, up, down):
    """Two experts on each rank, with a matrix each: [tokens, hidden], as many tokens for every expert."""
    here = layers.Exchange.apply(x * norm).unflatten(0, (layers.size(), 2, -1)).transpose(0, 1).flatten(1, 2)
    made = torch.bmm(torch.relu(torch.bmm(here, up)), down)
    return x + layers.Exchange.apply(made.unflatten(1, (layers.size(), -1)).transpose(0, 1).flatten(0, 2).contiguous())


def run(program, of=LARGE, dtype=BF16, **options):
    gm = layers.graph(program, of, dtype)
    return gm, mc2_experts.overlap_mc2_experts(
        gm, Context(Options(**{"target": "npu", "codegen": "eager", "hardware": "ascend910c", **options}), "forward")
    )


def calls(gm):
    return sorted(str(n.target).split(".")[1] for n in gm.graph.nodes if str(n.target).startswith("npu."))


def found(gm):
    return [
        f
        for f in (
            mc2_experts.neighbour_product(n) for n in gm.graph.nodes if is_start(n) and kind(n) == "all_to_all_single"
        )
        if not isinstance(f, str)
    ]


def test_a_training_step(ranks):
    """Two layers: each sends tokens there and back, forward and backward."""
    ranks(8)
    gm, report = run(layers.training(experts))
    assert calls(gm) == ["npu_alltoallv_gmm"] * 4 + ["npu_gmm_alltoallv"] * 4 and len(report.rewrites) == 8, [
        s.reason for s in report.skipped
    ]
    gm.graph.lint()
    first = next(n for n in gm.graph.nodes if "alltoallv_gmm" in str(n.target))
    assert (
        first.args[2:4] == ("0", 8)
        and first.args[4] == first.args[5] == [512] * 16
        and first.kwargs["permute_out_flag"]
    )  # weight gradients read the tokens


@pytest.mark.parametrize("count", [2, 3])
def test_emulated_values_on_every_rank(count, ranks):
    mode = ranks(count)
    assert npu.missing((mc2_experts.DISPATCH, mc2_experts.COMBINE)) is None
    gm = layers.graph(layers.training(experts), SMALL)
    fused = fx_graph.copy_graph(gm)
    pairs = found(fused)
    for pair in pairs:
        mc2_experts.fuse(fused, pair)
    mc2.in_order(fused)
    fused.graph.lint()
    assert len(calls(fused)) == len(pairs) == 8 and not any(
        kind(n) == "all_to_all_single" for n in fused.graph.nodes if is_start(n)
    )
    for node in fused.graph.nodes:  # an operator sees one rank; the functions that emulate them see all
        if str(node.target).startswith("npu."):
            node.target = registry.EMULATIONS[str(node.target).split(".")[1]].run
    fused.recompile()
    for have, want in zip(layers.on_every_rank(fused, mode, SMALL), layers.on_every_rank(gm, mode, SMALL), strict=True):
        for h, w in zip(have, want, strict=True):
            assert h.stride() == w.stride() and w.abs().max() > 0
            torch.testing.assert_close(h, w, rtol=1e-12, atol=1e-12)


def test_a_wait_that_is_waited_for_goes_too(ranks):
    ranks(2)
    assert npu.missing((mc2_experts.DISPATCH, mc2_experts.COMBINE)) is None
    gm = layers.graph(layers.training(experts), SMALL)
    for wait in [n for n in gm.graph.nodes if is_wait(n)]:
        with gm.graph.inserting_after(wait):
            again = gm.graph.call_function(wait.target, (wait,))
        again.meta.update(wait.meta)
        wait.replace_all_uses_with(again, delete_user_cb=lambda u, again=again: u is not again)
    pairs = found(gm)
    for pair in pairs:
        mc2_experts.fuse(gm, pair)
    assert len(pairs) == 8 and not any(is_wait(n) for n in gm.graph.nodes)


def reasons(program, of=LARGE, dtype=BF16, **options):
    gm, report = run(program, of, dtype, **options)
    assert not report.rewrites and not calls(gm)
    return {s.reason for s in report.skipped} or set(report.notes)


def sent(x, up):
    return layers.all_to_all(x).unflatten(0, (layers.size(), 2, -1))


def test_limits(ranks):
    ranks(8)
    assert reasons(experts, dtype=torch.float32) == {"x is float32; valid: float16, bfloat16"}
    assert reasons(experts, hardware="ascend910b2") == {"documented for Atlas A3; the hardware is ascend910b2"}
    assert reasons(experts, target="cpu") == {'torch_npu has these operators; the target is "cpu"'}
    twisted = lambda x, n, u, d: (torch.bmm(sent(x, u).permute(1, 2, 0, 3).flatten(1, 2), u),)
    assert reasons(twisted) == {"the tokens are not put in the order [experts, ranks, capacity] between"}
    assert reasons(lambda x, n, u, d: (sent(x, u).sin(),)) == {
        "no batched product of matrices reads the tokens by expert, or makes them"
    }
    uneven = lambda x, n, u, d: (
        torch.ops._c10d_functional.all_to_all_single(x, [1023] + [1024] * 6 + [1025], [1024] * 8, "0"),
    )
    assert reasons(uneven) == {"the ranks' shares differ, and how many tokens each expert gets is not in the graph"}
    gm = layers.graph(uneven, LARGE, BF16)
    start = next(n for n in gm.graph.nodes if is_start(n))
    start.args = (start.args[0], [start.args[0]] * 8, *start.args[2:])  # as a dropless router's: results of other nodes
    assert mc2_experts.neighbour_product(start) == mc2_experts.UNKNOWN


def test_number_of_ranks(ranks):
    ranks(4)
    assert reasons(experts) == {"4 ranks; valid: 8, 16, 32, 64"}
