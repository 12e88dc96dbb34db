"""overlap.schedule in the backend: the order reaches the code that runs, with both codegens; reasons, files,
options.
"""

import json
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._inductor.utils import run_and_get_code

import mindspeed_fx
from mindspeed_fx.errors import OptionError
from mindspeed_fx.graph.collectives import is_start
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import PassError
from mindspeed_fx.passes.overlap.scheduler import inductor_order
from mindspeed_fx.passes.overlap.scheduler.rank_agreement import OrderMismatch, compare


def milliseconds(gm, hardware, fused):
    """A matrix product takes 1 ms, a collective 1.5 ms, anything else nothing."""
    return lambda node: (1.5e-3, "wire") if is_start(node) else (1e-3 if "mm" in str(node.target) else 0.0, "")


@pytest.fixture
def plain_costs(monkeypatch):
    for module in ("schedule", "bucket", "chunking.chunk_search"):  # whichever asks first hands its tasks on
        monkeypatch.setattr(f"mindspeed_fx.passes.overlap.{module}.cost_of", milliseconds)


def model(x, w, v, g):
    """Two products that need no communication come first, then a reduced gradient and a gathered weight."""
    c = torch.relu(x @ w) @ v
    c = c.sin() @ v
    s = functional.wait_tensor(functional.all_reduce(g, "sum", dist.group.WORLD))
    t = functional.wait_tensor(functional.all_gather_tensor(w, 0, dist.group.WORLD))
    return c, s.cos(), t.sum()


def inputs():
    return [torch.randn(32, 32, generator=torch.Generator().manual_seed(s)) for s in range(4)]


def calls(text):
    """The order of starts (s), waits (w) and matrix products (m) in code."""
    text = "\n".join(line for line in text.splitlines() if not line.strip().startswith("#") and "assert_" not in line)
    found = re.findall(
        r"(wait_tensor)(?:\.default)?\(|(all_reduce_?|all_gather_into_tensor)(?:\.default)?\(|(?:extern_kernels\.|aten\.|mkldnn\.|mindspeed\.)\S*(?:mm|linear)(?:\.default)?\(",
        text,
    )
    return "".join("w" if w else "s" if s else "m" for w, s in found)


def test_eager_code_has_the_order_and_the_same_values(lone_world, plain_costs, tmp_path):
    report = mindspeed_fx.explain(model, *inputs(), options={"codegen": "eager", "dump": str(tmp_path)})
    code = next(g.stages["inference"] for g in report.graphs)
    assert calls(code).rstrip("w") == "ssmmm"
    assert len(report.sites("overlap.schedule")) == 2 and report.skipped("overlap.schedule") == []
    text = " ".join(str(report).split())
    assert "exposed communication 3.000 -> 0.000 ms" in text and "6.000 -> 3.000 ms (bound 3.000)" in text
    folder = tmp_path / "rank0" / "graph0"
    trace = next(folder.glob("*overlap.schedule.timeline.json"))
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]) == 10
    assert "<svg" in (folder / "report.html").read_text()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"})
    for a, b in zip(compiled(*inputs()), model(*inputs()), strict=True):
        assert torch.equal(a, b)


def test_inductor_keeps_the_order(fake_world, plain_costs):
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(model, backend="mindspeed"), *inputs())
    assert calls(code[code.index("def call") :]).rstrip("w") == "ssmmm"
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(
        torch.compile(model, backend="mindspeed", options={"disable": ["overlap.schedule"]}), *inputs()
    )
    assert not calls(code[code.index("def call") :]).startswith("ss")  # what it does by itself


def test_a_transfer_runs_under_work_and_not_under_the_wait_for_another():
    graph = torch.fx.Graph()
    start, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
    x = graph.placeholder("x")
    first, second = (graph.call_function(start, (x, "sum", group)) for group in "01")
    graph.call_function(wait, (second,))
    work = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    end = graph.call_function(wait, (first,))
    graph.output((work, end))
    for n in graph.nodes:
        n.meta["val"] = torch.empty(2, device="meta")
    assert inductor_order.dependencies(graph) == {work: [first], end: [work]}


def test_transfers_run_under_graphs_that_are_called(fake_world):
    """Work between a start and its wait that is alike in every layer has its code once."""

    def f(x, *weights):
        for w in weights:
            transfer = functional.all_reduce(x, "sum", dist.group.WORLD)
            y = x
            for _ in range(4):
                y = y.exp().sin().tanh().cos().sigmoid()
            x = (functional.wait_tensor(transfer) + y) @ w
        return x

    torch._dynamo.reset()
    args = [torch.rand(6, 6) for _ in range(4)]
    _, (code,) = run_and_get_code(torch.compile(f, backend="mindspeed"), *args)
    words = {"all_reduce_.default(": "s", "= repeated_layer_0(": "L", "ops._c10d_functional.wait_tensor.default(": "w"}
    lines = [line.strip() for line in code[code.index("def call") :].splitlines() if not line.strip().startswith("#")]
    order = [letter for line in lines for word, letter in words.items() if word in line]
    assert re.sub("w+", "w", "".join(order)) == "sLw" * 3


def test_a_called_graph_is_work_that_transfers_run_under():
    start, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(start, (x, "sum", "0"))
    body = graph.get_attr("body")
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", x))
    end = graph.call_function(wait, (first,))
    second = graph.call_function(start, (end, "sum", "0"))
    graph.output((call, graph.call_function(wait, (second,))))
    assert inductor_order.dependencies(graph) == {call: [first], end: [call], second: [first, call]}


def test_backward_graphs_too(lone_world, plain_costs):
    class Reduced(torch.autograd.Function):
        """Copy to a tensor-parallel region: the gradient is reduced."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return functional.wait_tensor(functional.all_reduce(grad, "sum", dist.group.WORLD))

    def f(x, w, v):
        return (torch.tanh(Reduced.apply(x) @ w) @ v).square().sum()

    results = []
    for how in ("plain", "compiled"):
        leaves = [t.double().requires_grad_() for t in inputs()[:3]]
        if how == "compiled":
            report = mindspeed_fx.explain(
                f,
                *(t.double().requires_grad_() for t in inputs()[:3]),
                options={"codegen": "eager", "disable": ["canonicalize.*"]},
            )
            torch._dynamo.reset()
            torch.compile(f, backend="mindspeed", options={"codegen": "eager", "disable": ["canonicalize.*"]})(
                *leaves
            ).backward()
        else:
            f(*leaves).backward()
        results.append([t.grad for t in leaves])
    for a, b in zip(*results, strict=True):
        assert b is not None and torch.equal(a, b)
    assert re.search(r"backward: modelled step 5\.\d+ -> 4\.\d+ ms", " ".join(str(report).split())), str(report)
    backward = calls(next(g.stages["backward"] for g in report.graphs))
    assert backward.index("s") < backward.rindex("m") < backward.index("w")


def test_no_collective_no_report_and_bad_options(lone_world):
    report = mindspeed_fx.explain(lambda x: x.cos() @ x, inputs()[0])
    assert report.sites("overlap.schedule") == [] and "modelled step" not in str(report)
    with pytest.raises(OptionError, match="\"overlap_memory\" is 'lots'; valid: bytes"):
        Options(overlap_memory="lots")
    with pytest.raises(OptionError, match="\"hardware\" is 'ascend910b22'.*did you mean"):
        Options(hardware="ascend910b22")
    assert (
        Options(overlap_memory="1.5KiB").overlap_memory == 1536 and Options(hardware="910b2").hardware == "ascend910b2"
    )


def test_an_npu_without_a_device_says_which_option_is_missing(lone_world):
    report = mindspeed_fx.explain(model, *inputs(), options={"target": "npu", "codegen": "eager"})
    assert {
        "no cost model" in s.reason and 'options={"hardware"' in s.reason for s in report.skipped("overlap.schedule")
    } == {True}


def test_blocking_communication_is_named(lone_world, plain_costs):
    def f(x):
        dist.all_reduce(x)
        return x + 1

    gm = torch.fx.experimental.proxy_tensor.make_fx(f, tracing_mode="fake")(torch.randn(4))
    from mindspeed_fx.passes.base import Context
    from mindspeed_fx.passes.overlap.schedule import overlap_schedule

    if any("c10d." in str(n.target) for n in gm.graph.nodes):
        report = overlap_schedule(gm, Context(Options().resolve("cpu"), "inference"))
        assert "only functional collectives" in report.skipped[0].reason


def test_orders_that_differ_are_named():
    compare("tp", {0: ["a", "b"], 1: ["a", "b"]})
    with pytest.raises(OrderMismatch, match=r'group "tp": ranks 0 and 2 .* number 2 of 3: rank 0 has b, rank 2 has c'):
        compare("tp", {0: ["a", "b", "c"], 2: ["a", "c", "b"], 1: ["a", "b", "c"]})
    with pytest.raises(PassError, match="rank 1 has nothing more"):
        compare("dp", {0: ["a", "b"], 1: ["a"]})


class Ranks:
    """Several ranks that compile, one after the other, in this process; a store between them."""

    def __init__(self, monkeypatch, ranks=2):
        from mindspeed_fx.passes.overlap.scheduler import rank_agreement

        self.rank, self.order = 0, rank_agreement
        store = dist.HashStore()
        monkeypatch.setattr(rank_agreement.distributed, "default_store", lambda: store)
        monkeypatch.setattr(rank_agreement.distributed, "ranks_of", lambda group: list(range(ranks)))
        monkeypatch.setattr(rank_agreement.distributed, "rank", lambda: self.rank)
        monkeypatch.setattr(rank_agreement, "orders", lambda gm: {"tp": gm})

    def compiles(self, rank, order, settings="eager"):
        self.rank = rank
        return self.order.check_across_ranks(list(order), "forward", settings)


def test_one_program_may_have_an_order_for_each_of_its_settings(monkeypatch):
    ranks = Ranks(monkeypatch)
    for rank in (0, 1):  # rank 0 is done with both before rank 1 begins
        ranks.compiles(rank, "ab")
        ranks.compiles(rank, "ba", "inductor")
    for rank in (1, 0):
        assert ranks.compiles(rank, "ab")["tp"] == ranks.order.digest("ab")  # compiled again
    ranks.compiles(0, "cab")
    ranks.compiles(0, "bca", "inductor")
    with pytest.raises(OrderMismatch, match="rank 0 has b, rank 1 has c"):  # an order that rank 0 has too, but not so
        ranks.compiles(1, "cab", "inductor")


def test_ranks_with_other_options_are_told_so(monkeypatch):
    ranks = Ranks(monkeypatch, 3)
    ranks.compiles(2, "ab")
    with pytest.raises(
        OrderMismatch, match="ranks 1 and 2 .*compiled with different options: rank 1 inductor, rank 2 eager"
    ):
        ranks.compiles(1, "ba", "inductor")


def test_two_codegens_in_one_group(fake_world, plain_costs, monkeypatch):
    """The order of the second codegen differs from the first's: rank 0 compiles both, then rank 1."""
    store, rank = dist.HashStore(), [0]
    from mindspeed_fx.passes.overlap.scheduler import rank_agreement

    monkeypatch.setattr(rank_agreement.distributed, "default_store", lambda: store)
    monkeypatch.setattr(rank_agreement.distributed, "rank", lambda: rank[0])

    def costs(gm, hardware, fused):
        """What reads the gathered weight takes long in generated code, what reads the reduced gradient elsewhere."""
        return lambda node: (
            (1.5e-3, "wire")
            if is_start(node)
            else (5e-3 if ("sum" if fused else "cos") in str(node.target) else 0.0, "")
        )

    for module in ("schedule", "bucket", "chunking.chunk_search"):  # whichever asks first hands its tasks on
        monkeypatch.setattr(f"mindspeed_fx.passes.overlap.{module}.cost_of", costs)
    found = []
    for rank[0] in (0, 1):
        for codegen in ("eager", "inductor"):
            torch._dynamo.reset()
            report = mindspeed_fx.explain(lambda x, w, v, g: model(x, w, v, g), *inputs(), options={"codegen": codegen})
            found.append(re.search(r"order of collectives (\w+)", str(report))[1])
    assert found[:2] == found[2:] and found[0] != found[1]


def test_large_graphs_are_worked_out_once(lone_world, monkeypatch):
    """Tasks, prices and the order found go from pass to pass; what comes out is the same."""
    from mindspeed_fx.passes.overlap.model import task_graph

    def f(x, w, v):
        y = torch.nn.functional.linear(functional.wait_tensor(functional.all_reduce(x @ w, "sum", dist.group.WORLD)), v)
        return functional.wait_tensor(functional.all_reduce(y.tanh() @ v, "sum", dist.group.WORLD)).square().sum()

    options = {"codegen": "eager", "hardware": "h100", "target": "cpu"}
    results = []
    for large in (False, True):
        if large:
            monkeypatch.setattr("mindspeed_fx.passes.overlap.schedule.LARGE", 0)
            monkeypatch.setattr("mindspeed_fx.passes.overlap.chunking.chunk_search.GAIN", 1.0)
            made, whole = [], task_graph.tasks_of
            monkeypatch.setattr(task_graph, "tasks_of", lambda gm, *a, **k: made.append(gm) or whole(gm, *a, **k))
        torch._dynamo.reset()
        leaves = [t.double().requires_grad_() for t in inputs()[:3]]
        torch.compile(f, backend="mindspeed", options=options)(*leaves).backward()
        results.append([t.grad for t in leaves])
    assert len(made) == len({id(gm) for gm in made}) and made, "once for each graph"
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert not any(key.startswith("mindspeed_fx") for gm in made for key in gm.meta), (
        "what passes tell one another is in their context"
    )


def test_a_known_order_is_taken_for_the_same_nodes_alone(lone_world, monkeypatch):
    from mindspeed_fx.options import Options
    from mindspeed_fx.passes.base import Context
    from mindspeed_fx.passes.overlap import schedule as module
    from mindspeed_fx.passes.overlap.model.task_graph import tasks_of

    gm = torch.fx.experimental.proxy_tensor.make_fx(model, tracing_mode="fake")(*inputs())
    work = tasks_of(gm, milliseconds(gm, None, False))
    monkeypatch.setattr(module, "LARGE", 0)
    order = list(range(len(work.tasks)))
    for nodes, limit, taken in (
        (list(work.nodes), 1 << 30, True),
        (list(work.nodes), 0, False),
        (work.nodes[:-1], 1 << 30, False),
    ):
        context = Context(Options(), "forward")
        context.overlap.order = (nodes, order)
        assert (module._cached_schedule(context, gm, work, limit) is not None) is taken and context.overlap.order == (
            (),
            (),
        )
