"""overlap.decompose: chunks give every rank the rows and values that it had; which regions, how many chunks, and why
not.
"""

import collections
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_fx.compat import fx_graph
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.graph.collectives import is_start, is_wait, kind
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.overlap import decompose
from mindspeed_fx.passes.overlap.chunking import chunk_rules, chunk_search, windows
from mindspeed_fx.passes.overlap.chunking.chunk import compute_in_chunks
from mindspeed_fx.passes.overlap.chunking.chunk_search import disjoint
from mindspeed_fx.passes.overlap.chunking.chunk_spec import ChunkSpec, shares, through_view
from mindspeed_fx.passes.overlap.chunking.region import KINDS, _grown, regions
from mindspeed_fx.passes.overlap.decompose import overlap_decompose
from mindspeed_fx.passes.overlap.split import overlap_split
from tests.passes.overlap import parallel_layers as layers

PROGRAMS = {
    "sequence": layers.training(layers.mlp),
    "all_reduce": layers.training(layers.mlp_whole),
    "batch_first": layers.batch_first,
    "packed": layers.packed,
    "all_to_all": layers.exchange,
    "experts": layers.training(layers.experts),
}


def context(**options):
    return Context(Options(**{"target": "npu", "codegen": "eager", "hardware": "ascend910b2", **options}), "inference")


def collectives(gm):
    return collections.Counter(kind(n) for n in gm.graph.nodes if is_start(n))


def in_chunks(gm, reach, parts):
    """``gm`` with every region that can be in ``parts`` chunks; how many regions."""
    gm = fx_graph.copy_graph(gm)
    overlap_split(gm, context())
    found = list(disjoint([n for n in gm.graph.nodes if is_start(n) and kind(n) in KINDS], reach))
    cut = [r for r in found if parts in r.most_parts((parts,))]
    for region in cut:
        compute_in_chunks(gm, region, parts)
    gm.graph.lint()
    gm.recompile()
    return gm, len(cut)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_rank_has_the_rows_it_had(program, ranks):
    mode = ranks(4)
    gm = layers.graph(PROGRAMS[program])
    expected = layers.on_every_rank(gm, mode)
    assert len({t.sum().item() for t in expected[0]}) == 4  # ranks differ, or rows could be swapped unseen
    whole = collectives(gm)
    for reach, parts in (("pair", 2), ("pipeline", 2 if program == "experts" else (1, 2, 1))):  # a rank has two experts
        cut, regions = in_chunks(gm, reach, parts)
        parts = len(shares(parts))
        assert regions
        for a, b in zip(
            [t for o in layers.on_every_rank(cut, mode) for t in o], [t for o in expected for t in o], strict=True
        ):
            assert a.shape == b.shape and a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        made = collectives(cut)
        assert all(made[k] <= parts * n and (made[k] - n) % (parts - 1) == 0 for k, n in whole.items()), (
            made,
            whole,
        )  # chunks of each, and nothing gathered twice
        assert sum(made.values()) > sum(whole.values())


def test_sixteen_bits_stay_within_twice_the_error_of_the_whole(ranks):
    mode = ranks(4)
    exact = layers.on_every_rank(layers.graph(PROGRAMS["sequence"]), mode)
    gm = layers.graph(PROGRAMS["sequence"], dtype=torch.bfloat16)
    whole = layers.on_every_rank(gm, mode, dtype=torch.bfloat16)
    cut = layers.on_every_rank(in_chunks(gm, "pipeline", 4)[0], mode, dtype=torch.bfloat16)
    for e, w, c in zip(exact, whole, cut):
        error = lambda got: max((a.double() - b).abs().max().item() for a, b in zip(got, e))
        assert 0 < error(c) <= 2 * error(w)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4), st.data())
def test_a_cut_seen_through_a_view(before, data):
    """The chunk of the view is the view of the chunk."""
    total, after = torch.Size(before).numel(), []
    while total > 1 and len(after) < 3:
        after.append(data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0])))
        total //= after[-1]
    after.append(total)
    dim, blocks, parts = (
        data.draw(st.integers(0, len(before) - 1)),
        data.draw(st.sampled_from([1, 2, 3, 4])),
        data.draw(st.sampled_from([2, 4, (1, 2, 1), (3, 1)])),
    )
    cut = ChunkSpec(dim, blocks)
    assume(before[dim] % blocks == 0 and cut.fits(before, parts))
    seen = through_view(cut, before, after)
    assume(seen is not None and seen.fits(after, parts))
    x = torch.arange(torch.Size(before).numel()).view(before)
    each = shares(parts)
    chunk = lambda t, c, i: (
        t.unflatten(c.dim, (c.blocks, sum(each), -1))
        .narrow(c.dim + 1, sum(each[:i]), each[i])
        .flatten(c.dim, c.dim + 2)
    )
    for i in range(len(each)):
        assert torch.equal(chunk(x.view(after), seen, i).flatten(), chunk(x, cut, i).flatten())


LARGE = [(1024, 1, 4096), (4096,), (1792, 4096), (4096, 1792)]
"""This rank's part of a Llama-8B layer over 8 ranks."""


@pytest.fixture
def eight(ranks):
    return ranks(8)


def test_the_model_cuts_what_pays(eight):
    gm = layers.graph(PROGRAMS["sequence"], LARGE, torch.bfloat16)
    overlap_split(gm, context())
    before = collectives(gm)
    report = overlap_decompose(gm, context())
    assert report.rewrites and all("chunks" in s.operator for s in report.rewrites)
    after = collectives(gm)
    assert after["all_gather_into_tensor"] > before["all_gather_into_tensor"]
    first, second = (float(report.notes[0].split(" ms")[k].split(" ")[-1]) for k in (0, 1))
    assert second < 0.99 * first
    gm.graph.lint()


@pytest.mark.parametrize("sizes", [None, LARGE])
def test_no_order_is_searched_where_a_bound_says_that_none_is_shorter(eight, monkeypatch, sizes):
    """Of layers of some rows all chunks are launches; those of a large one are tried."""
    searched, bounds = [], []

    def schedule(graph, **limits):
        searched.append(chunk_search_schedule(graph, **limits))
        bounds.append(graph.highest_bound)
        return searched[-1]

    chunk_search_schedule = chunk_search.schedule
    monkeypatch.setattr(chunk_search, "schedule", schedule)
    report = overlap_decompose(layers.graph(PROGRAMS["sequence"], sizes, torch.bfloat16), context())
    assert "ways tried" in report.notes[0] and " 0 ways" not in report.notes[0]
    assert (len(searched) > 1) == (sizes is LARGE)
    # The plain graph is scheduled once more at the end, and may be as short as its own bound.
    assert all(bound < searched[0].seconds * (1 + 1e-9) for bound in bounds[1:])


def test_a_pair_ends_where_its_sum_is_awaited(eight):
    gm = layers.graph(PROGRAMS["sequence"])
    sums = [n for n in gm.graph.nodes if is_start(n) and kind(n) == "reduce_scatter_tensor"]
    regions = list(disjoint(sums, "pair"))
    waits = [n for region in regions for n in region.cuts if is_wait(n)]
    assert waits and not any(u in region.cuts for region in regions for w in waits for u in w.users)


def test_of_regions_that_are_alike_the_most_exposed_is_tried_first():
    exposed = {"a": 1.0, "b": 3.0, "c": 2.0, "alone": 9.0, "hidden": 0.0}
    trials = SimpleNamespace(within=None, _exposed=exposed.get, plain=SimpleNamespace(seconds=1.0))
    assert chunk_search.Trials._single(trials, [["a", "b", "hidden", "c"], ["alone"]]) == [["b"], ["c"], ["a"]]


@pytest.mark.parametrize("within, counts", [(None, {2, 4, 8}), (10**6, {2, 4})])
def test_a_search_that_may_try_little_leaves_eight_chunks_out(eight, monkeypatch, within, counts):
    gm = layers.graph(PROGRAMS["sequence"], LARGE, torch.bfloat16)
    overlap_split(gm, context())
    tried, asked = chunk_search.Trials(gm, context(), hardware("ascend910b2"), within=within), set()
    monkeypatch.setattr(tried, "way", lambda chosen, below=None: asked.update(parts for _, parts in chosen))
    monkeypatch.setattr(tried, "_added", lambda seconds, kinds: (seconds, []))
    starts = [n for n in gm.graph.nodes if is_start(n) and kind(n) in KINDS]
    tried.best({reach: list(disjoint(starts, reach)) for reach in ("pair", "pipeline")})
    assert asked == counts


def test_the_busiest_link_of_a_way_is_known_before_its_graph_is_made(eight, monkeypatch):
    gm = layers.graph(PROGRAMS["sequence"])
    overlap_split(gm, context())
    tried, graphs = chunk_search.Trials(gm, context(), hardware("ascend910b2")), []

    def tasks(*args):
        graphs.append(cached_tasks(*args))
        return graphs[-1]

    cached_tasks = chunk_search.cached_tasks
    monkeypatch.setattr(chunk_search, "cached_tasks", tasks)
    found = list(disjoint([n for n in gm.graph.nodes if is_start(n) and kind(n) in KINDS], "pipeline"))
    expected = {}
    for parts in (2, 4, (1, 2, 1)):
        chosen = [(r, parts) for r in found if r.most_parts((parts,))]
        expected[parts] = tried.busiest_link(chosen)
        assert chosen and tried.way(chosen) in (None, float("inf"))
    assert len(graphs) < len(expected)  # of many chunks the launches alone take longer than the step
    monkeypatch.setattr(chunk_search.Trials, "busiest_link", lambda *args: 0.0)
    tried.tried.clear(), graphs.clear()
    for parts, seconds in expected.items():
        tried.way([(r, parts) for r in found if r.most_parts((parts,))])
        busy = graphs.pop().tasks.busy()
        assert seconds == pytest.approx(max(v for k, v in busy.items() if k != "compute"), rel=1e-12)


def test_a_way_that_a_quick_search_finds_long_is_searched_no_further(eight, monkeypatch):
    """The step is the one that a whole search of every way finds."""

    def modelled(near):
        placed = []
        monkeypatch.setattr(chunk_search, "NEAR", near)
        monkeypatch.setattr(
            chunk_search, "schedule", lambda graph, **limits: placed.append(limits["work"]) or schedule(graph, **limits)
        )
        gm = layers.graph(PROGRAMS["all_reduce"], LARGE, torch.bfloat16)
        overlap_split(gm, context())
        report = overlap_decompose(gm, context(hardware="h100"))
        assert " 0 ways" not in report.notes[0]
        return report.notes, [str(site) for site in report.rewrites], sum(placed)

    schedule, near = chunk_search.schedule, chunk_search.NEAR
    whole, quick = modelled(float("-inf")), modelled(near)
    assert quick[:2] == whole[:2]
    assert quick[2] < whole[2] / 2


def repeated(x, norm, up, down):
    """Five layers, each of which needs the whole sequence at its end."""
    for _ in range(5):
        x = torch.cumsum(layers.mlp(x, norm, up, down), 0)
    return (x,)


def test_of_regions_that_are_alike_few_are_tried_alone(eight, monkeypatch):
    """Layers repeat: what brings nothing to the first of them brings nothing to the others. The step is the same."""

    def modelled(few, sizes):
        monkeypatch.setattr(chunk_search, "FEW", few)
        report = overlap_decompose(layers.graph(repeated, sizes, torch.bfloat16), context())
        step, _, ways = report.notes[0].partition(" regions in chunks ")
        return step, [str(site) for site in report.rewrites], int(ways.split()[0].strip("("))

    kept = chunk_search.FEW
    for sizes, saved in (([(128, 1, 2048), (2048,), (688, 2048), (2048, 688)], 5), (LARGE, 0)):
        every, few = modelled(100, sizes), modelled(kept, sizes)
        assert few[:2] == every[:2] and few[2] <= every[2] - saved
        assert bool(few[1]) == (sizes is LARGE)


def test_a_way_with_too_much_work_for_one_stream_is_not_scheduled(eight, monkeypatch):
    gm = layers.graph(PROGRAMS["sequence"], LARGE, torch.bfloat16)
    tried = chunk_search.Trials(gm, context(), hardware("ascend910b2"))
    busiest = max(tried.work.busy().values())
    monkeypatch.setattr(chunk_search, "schedule", lambda *args, **limits: pytest.fail("an order was searched"))
    assert tried.step(lambda copy, at: None, most_work=busiest) == float("inf")
    monkeypatch.undo()
    assert tried.step(lambda copy, at: None, most_work=busiest * (1 + 1e-9)) < float("inf")


def test_what_a_window_finds_is_done_to_all_layers(eight, monkeypatch):
    gm = layers.graph(repeated, LARGE, torch.bfloat16)
    monkeypatch.setattr(windows, "LARGE", 50)
    monkeypatch.setattr(windows, "WIDTH", 3 * len(gm.graph.nodes) // 5)
    cut = fx_graph.copy_graph(gm)
    report = overlap_decompose(cut, context())
    before, after = (float(report.notes[0].split(" ms")[k].split(" ")[-1]) for k in (0, 1))
    assert len(report.rewrites) == 5 and len({s.operator for s in report.rewrites}) == 1 and after < 0.99 * before
    cut.graph.lint()

    monkeypatch.setattr(windows, "TRIED", 0)  # nothing may be tried, and so nothing is found
    assert not overlap_decompose(fx_graph.copy_graph(gm), context()).rewrites
    monkeypatch.setattr(windows, "MOST", 0)
    report = overlap_decompose(fx_graph.copy_graph(gm), context())
    assert not report.rewrites and all("was tried on no window" in s.reason for s in report.skipped)


def test_of_collectives_that_are_alike_one_is_asked_for_its_reason(eight, monkeypatch):
    def program(x, n, u, d):
        for _ in range(6):
            x = layers.all_reduce(x.sin())
        return (x,)

    def run():
        read = []
        monkeypatch.setattr(decompose, "regions", lambda start, reach: read.append(start) or regions(start, reach))
        skipped = overlap_decompose(layers.graph(program, LARGE, torch.bfloat16), context()).skipped
        return len(set(read)), [(s.operator, s.reason) for s in skipped]

    one_by_one = run()
    monkeypatch.setattr(windows, "LARGE", 2)
    by_kind = run()
    assert one_by_one[0] == 6 and by_kind[0] == 1
    assert by_kind[1] == one_by_one[1] and len(by_kind[1]) == 6


def reasons(program, of=None, **options):
    report = overlap_decompose(layers.graph(program, of), context(**options))
    assert not report.rewrites
    return {s.reason for s in report.skipped} | set(report.notes if not report.skipped else ())


def test_reasons(eight):
    assert reasons(lambda x, n, u, d: (x + 1,)) == {"no collective that can be cut"}
    assert reasons(lambda x, n, u, d: (layers.all_gather(x).sin(),)) == {"no product of matrices reads its rows"}
    assert reasons(lambda x, n, u, d: (layers.all_reduce(n * 2),)) == {
        "what it reduces is made by no product of matrices, row by row"
    }
    assert reasons(PROGRAMS["batch_first"]) == {"the model finds no shorter step with it in chunks"}
    odd = [(3, 5, 16), (16,), (24, 16), (16, 24)]
    assert reasons(lambda x, n, u, d: (layers.all_gather(x) @ u.t(),), odd) == {
        "its shape (3, 5, 16) has no dimension that 2 chunks divide evenly"
    }
    from torch.fx.experimental.proxy_tensor import make_fx

    symbolic = make_fx(lambda x, u: (layers.all_gather(x) @ u.t(),), tracing_mode="symbolic")(
        torch.empty(8, 2, 16), torch.empty(24, 16)
    )
    assert [s.reason for s in overlap_decompose(symbolic, context()).skipped] == [
        "its sizes are known at run time only (dynamic shapes)"
    ]
    assert reasons(PROGRAMS["sequence"], hardware=None).pop().startswith("no cost model: ")
    torch.use_deterministic_algorithms(True)
    try:
        assert reasons(PROGRAMS["sequence"], LARGE) == {
            "torch.use_deterministic_algorithms is on, and chunks are equal to the whole within rounding only"
        }
    finally:
        torch.use_deterministic_algorithms(False)


def test_split_gradients_are_bitwise_the_same(ranks):
    mode = ranks(2)
    gm = layers.graph(PROGRAMS["sequence"])
    split = fx_graph.copy_graph(gm)
    report = overlap_split(split, context())
    assert len(report.rewrites) == 4
    assert not any(n.target is torch.ops.mindspeed.linear_backward.default for n in split.graph.nodes)
    for a, b in zip(layers.on_every_rank(split, mode), layers.on_every_rank(gm, mode)):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
    dist.destroy_process_group()


def test_a_call_that_says_nothing_of_its_results_stays_whole():
    """Attention whose random state is saved for a checkpoint: torch's partitioner gives that node no values."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 4)
    saved = torch.ops.higher_order.run_and_save_rng_state
    call = graph.call_function(saved, (torch.ops.aten.native_layer_norm.default, x, [4], None, None, 1e-5))
    part = graph.call_function(operator.getitem, (graph.call_function(operator.getitem, (call, 1)), 0))
    for node in (part, part.args[0]):
        node.meta["val"] = torch.empty(8, 4)
    assert chunk_rules.inputs(part.args[0], ChunkSpec(0, 1)) is None
    assert not list(chunk_rules.results(call, x, ChunkSpec(0, 1)))


def test_a_value_is_cut_as_all_read_it_that_are_in_the_region():
    """A square value and its transpose are added: cut along one dimension, the sum needs the other of the transpose."""
    graph = torch.fx.Graph()

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(2, 8, 8)
        return node

    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 8, 8)
    summed = call(c10d.wait_tensor.default, start := call(c10d.all_reduce.default, x, "sum", "group"))
    doubled = call(aten.mul.Tensor, call(aten.transpose.int, summed, 1, 2), 2)
    both = call(aten.add.Tensor, summed, doubled)
    call(c10d.wait_tensor.default, call(c10d.all_reduce.default, both, "sum", "group"))
    region = _grown(start, ChunkSpec(1), "pipeline")
    assert both in region.cuts and not [
        (n, s) for n, needs in region.needs.items() for s, c in needs.items() if region.cuts.get(s, c) != c
    ]
