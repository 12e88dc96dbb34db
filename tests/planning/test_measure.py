"""A step measured: its rounds by a clock that the test moves, kernels from events that the test makes, and one step in
earnest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx import cli
from mindspeed_fx.arguments import ArgumentError
from mindspeed_fx.cost.read import Call, Calls
from mindspeed_fx.passes import manager
from mindspeed_fx.planning import measure
from mindspeed_fx.planning.measure.kernels import (
    Entry,
    Event,
    Profile,
    expected_entries,
    match_events,
    walk,
)
from mindspeed_fx.planning.measure.rounds import FEWEST, MOST, WARMUP, interleave
from mindspeed_fx.report.families import FAMILIES, SUPPORTING, active_families
from mindspeed_fx.report.records import GraphRecord, PassReport, PassRun
from tests import models


class Clock:
    """A clock that only what runs moves on."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def forms(clock, durations, calls):
    def run(name):
        def step():
            calls.append(name)
            clock.seconds += next(durations[name])

        return step

    return {name: run(name) for name in durations}


def repeat(*values):
    while True:
        yield from values


def test_forms_take_turns_and_each_comes_after_each_other():
    clock, calls, dropped = Clock(), [], []
    runs = forms(clock, {"a": repeat(1.0), "b": repeat(2.0, 4.0)}, calls)
    samples = interleave(runs, 1.0, prepare=lambda: dropped.append(clock()), now=clock)
    assert samples == {"a": [1.0] * FEWEST, "b": [2.0, 4.0, 2.0, 4.0, 2.0]}
    assert calls[: 2 * WARMUP] == ["a", "b"] * WARMUP
    assert len(dropped) == len(calls)
    calls.clear()
    interleave(forms(clock, {n: repeat(1.0) for n in "abc"}, calls), 1.0, prepare=lambda: None, now=clock, rounds=20)
    turns = [tuple(calls[i : i + 3]) for i in range(3 * WARMUP, len(calls), 3)]
    assert {tuple(sorted(turn)) for turn in turns} == {("a", "b", "c")} and len(set(turns)) == 6
    again = []
    interleave(forms(clock, {n: repeat(1.0) for n in "abc"}, again), 1.0, prepare=lambda: None, now=clock, rounds=20)
    assert again == calls  # ranks take turns alike


@pytest.mark.parametrize("seconds, rounds, count", [(30.0, None, 10), (1e9, None, MOST), (1e9, 3, 3)])
def test_rounds_fit_into_the_time_and_ranks_have_as_many(seconds, rounds, count):
    clock = Clock()
    runs = forms(clock, {"a": repeat(1.0), "b": repeat(2.0)}, [])
    assert len(interleave(runs, seconds, prepare=lambda: None, now=clock, rounds=rounds)["a"]) == count


def test_every_pass_is_of_one_family_or_buys_nothing_by_itself():
    named = [*SUPPORTING, *(name for passes in FAMILIES.values() for name in passes)]
    assert sorted(named) == sorted(row.name for row in manager.PASSES)


def test_families_that_rewrote_something():
    counts = {"fusion.rms_norm": 2, "fusion.rope": 0, "canonicalize.softmax": 3, "mine.name": 1}
    families = active_families(counts)
    assert list(families) == ["norms", "mine.name"] and "fusion.add_rms_norm" in families["norms"]


def event(name, start, *children, seconds=1.0):
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start), cpu_children=children, cpu_time_total=seconds * 1e6
    )


def test_events_are_the_topmost_kernels_of_compiled_graphs():
    inside = event("mindspeed::rope", 2, event("aten::mul", 2))
    generated = event("graph_0_cpp_fused_add_0", 3)
    graph = event("## Call CompiledFxGraph None ##", 1, inside, generated)
    backward = event("CompiledFunctionBackward", 5, event("aten::mm", 6))
    roots = [
        event("aten::randint", 0),
        event("Torch-Compiled Region: 0/0", 1, event("Pregraph bytecode", 1), event("CompiledFunction", 1, graph)),
        event("autograd::engine::evaluate_function: CompiledFunctionBackward", 5, backward),
        event("Torch-Compiled Region: 1/0", 7, event("aten::add", 7)),
    ]
    events = [(e.name, e.side, e.start) for root in roots for e in walk(root, "cpu_time_total")]
    assert events == [
        ("mindspeed::rope", "forward", 2),
        ("cpp_fused_add_0", "forward", 3),
        ("aten::mm", "backward", 6),
        ("aten::add", "inference", 7),
    ]


def record(index, codegen, **values):
    return GraphRecord(index, 0, {}, {"codegen": codegen, "hardware": "none: a test"}, **values)


def test_kernels_of_graphs_in_the_order_in_which_they_run():
    """Backwards run from the last graph to the first; numbers, not the order of the mapping, count the kernels."""
    kernels = {
        "forward": {"extern_kernels.mm:10": ["mm_1"], "extern_kernels.mm:9": ["mm"], "cpp_fused_add_0:1": ["a", "b"]},
        "backward": {"torch.ops.mindspeed.attention_flash_backward.default:1": ["attention"]},
    }
    call = Call("mm", "aten.mm", "matmul", None, (), {})
    eager = {side: Calls([call]) for side in ("captured", "forward", "backward")}
    entries = expected_entries([record(0, "inductor", kernels=kernels), record(1, "eager", calls=eager)])
    assert [(e.graph, e.nodes) for e in entries["forward", "aten::mm"]] == [(0, ("mm",)), (0, ("mm_1",)), (1, ("mm",))]
    assert [e.nodes for e in entries["forward", "cpp_fused_add_0"]] == [("a", "b")]
    assert ("backward", "mindspeed::attention_flash_backward") in entries and ("captured", "aten::mm") not in entries
    both = expected_entries([record(i, "eager", calls=eager) for i in (0, 1)])
    assert [e.graph for e in both["backward", "aten::mm"]] == [1, 0]


def test_kernels_of_a_graph_that_layers_share_run_once_for_each():
    """Their nodes are those of the layer that calls them; what a kernel only reads of the first is not."""
    kernels = {
        "cpp_fused_0:1": ["x"],
        "cpp_fused_1:2": ["invoke_subgraph", "x", "b0", "a0"],
        "extern_kernels.mm:3": ["c0"],
    }
    kernels |= {"extern_kernels.mm:4": ["head"]}
    run = PassRun(PassReport("lowering.repeated_layers"), "forward", 0.0, 0, 0)
    run.report.layers.append((("a0", "b0", "c0"), ("a1", "b1", "c1"), ("a2", "b2", "c2")))
    graph = record(0, "inductor", kernels={"forward": kernels, "backward": kernels}, runs=[run])
    entries = expected_entries([graph])
    assert [e.nodes for e in entries["forward", "cpp_fused_1"]] == [("b0", "a0"), ("b1", "a1"), ("b2", "a2")]
    assert [e.nodes for e in entries["forward", "aten::mm"]] == [("c0",), ("c1",), ("c2",), ("head",)]
    assert [e.nodes for e in entries["forward", "cpp_fused_0"]] == [("x",)]
    assert [e.nodes for e in entries["backward", "aten::mm"]] == [("c0",), ("head",)]


def test_calls_that_do_not_add_up_are_not_mapped():
    entries = {
        ("forward", "aten::mm"): [Entry(0, "forward", n, (name,)) for n, name in enumerate(("mm", "mm_1"))],
        ("forward", "aten::add"): [Entry(0, "forward", 2, ("add",))],
    }
    times = [("aten::mm", 4, 4.0), ("aten::mm", 1, 1.0), ("aten::mm", 2, 2.0), ("aten::mm", 3, 3.0)]
    events = [Event(name, "forward", start, seconds) for name, start, seconds in times]
    events += [Event("aten::add", "forward", n, 1.0) for n in range(3)] + [Event("aten::t", "backward", 9, 8.0)]
    pairs, unmapped = match_events(Profile(events, 2, 1.0), entries)
    assert [(e.nodes[0], seconds) for _, e, seconds in pairs] == [
        ("mm", 1.0),
        ("mm_1", 2.0),
        ("mm", 3.0),
        ("mm_1", 4.0),
    ]
    assert list(unmapped.items()) == [("aten::t", 4.0), ("aten::add", 1.5)]


class Small(nn.Module):
    """Two families of rewrites, dropout and a buffer that every step changes."""

    def __init__(self):
        super().__init__()
        self.bn, self.norm, self.dropout = nn.BatchNorm1d(8), nn.RMSNorm(8), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x):
        gate, up = self.up(self.norm(self.bn(x))).chunk(2, -1)
        return self.down(self.dropout(nn.functional.silu(gate) * up)).sum()


@pytest.fixture
def few_rounds(monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 1e-9)


def test_a_measured_step_has_every_family_and_changes_nothing(few_rounds):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Small(), torch.randn(4, 8, requires_grad=True)
    model.up.weight.grad, x.grad = torch.full((32, 8), 7.0), torch.ones(4, 8)
    before = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    state = torch.get_rng_state()
    report = mindspeed_fx.explain(
        model, x, options={"codegen": "eager", "hardware": "cpu", "dump": None, "strict": True}, measure=True
    )
    assert torch.equal(torch.get_rng_state(), state) and x.grad.eq(1).all()
    assert all(torch.equal(t, before[n]) for n, t in (*model.named_parameters(), *model.named_buffers()))
    assert model.up.weight.grad.eq(7).all() and model.down.weight.grad is None
    measured = report.measured
    assert {f.family: f.sites for f in measured.families} == {"norms": 1, "gates": 1}
    assert [s.name for s in measured.steps] == ["eager", "level 0", "compiled"]
    assert measured.has_backward and measured.rounds == FEWEST and measured.device == measured.hardware == "cpu"
    assert all(f.without_seconds > 0 and f.spread > 0 and not f.error for f in measured.families)
    modelled = {f.family: f.modelled_gain_seconds for f in measured.families}
    assert modelled["norms"] > 0 and modelled["gates"] > 0
    kernels = {(k.kernel, k.graph): k for k in measured.kernels}
    for name in ("mindspeed::rms_norm", "mindspeed::swiglu", "mindspeed::swiglu_backward"):
        kernel = kernels[name, "backward" if name.endswith("backward") else "forward"]
        assert kernel.calls == 1 and kernel.seconds > 0 and kernel.modelled_seconds > 0
    assert kernels["mindspeed::rms_norm", "forward"].module == "norm"
    assert "aten::native_batch_norm_backward" not in measured.unmapped
    assert report.to_dict()["measured"]["families"][0]["family"] == "norms"


@pytest.mark.slow
def test_generated_kernels_of_layers_are_mapped(few_rounds):
    """Layers that share their code are four calls of each kernel."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = models.Llama(layers=4)
    report = mindspeed_fx.explain(
        model, *models.tokens(), options={"enable": ["lowering.repeated_layers"]}, measure=True
    )
    assert report.counts["lowering.repeated_layers"] == 2
    assert set(report.measured.unmapped) <= {"aten::detach"}
    attention = {k.graph: k.calls for k in report.measured.kernels if k.kernel.startswith("mindspeed::attention_flash")}
    assert attention == {"forward": 4, "backward": 4}


def test_what_fails_without_a_family_is_told_and_the_rest_is_measured(few_rounds, monkeypatch):
    torch._dynamo.reset()
    compiled = measure._form

    def form(model, step, prepare, options):
        if "fusion.rms_norm" in options.get("disable", ()):
            raise MemoryError("out of it\nwith details")
        return compiled(model, step, prepare, options)

    monkeypatch.setattr(measure, "_form", form)
    report = mindspeed_fx.explain(nn.RMSNorm(8), torch.randn(2, 8), options={"codegen": "eager"}, measure=True)
    (family,) = report.measured.families
    assert family.error == "MemoryError: out of it" and family.sites == 1 and report.measured.kernels


@pytest.mark.parametrize("how", ["torch.compile", "compile in place"])
def test_a_compiled_model_is_measured_as_it_was_before(few_rounds, how):
    """Within a model's own compilation no other backend would be asked."""
    torch._dynamo.reset()
    model = nn.RMSNorm(8)
    if how == "torch.compile":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    x = torch.randn(2, 8)
    measured = mindspeed_fx.explain(model, x, options={"codegen": "eager", "hardware": "cpu"}, measure=True).measured
    assert [f.family for f in measured.families] == ["norms"]
    assert [s.modelled_seconds is not None for s in measured.steps] == [False, True, True]


def test_kernels_of_several_graphs_have_their_modules(few_rounds):
    torch._dynamo.reset()
    first, second = nn.RMSNorm(8), nn.RMSNorm(8)
    model = nn.ModuleList([first, second])

    def forward(x):
        y = model[0](x)
        torch._dynamo.graph_break()
        return model[1](y)

    model.forward = forward
    report = mindspeed_fx.explain(
        model, torch.randn(2, 8), options={"codegen": "eager", "hardware": "cpu"}, measure=True
    )
    assert report.graph_count == 2 and report.measured.families[0].sites == 2
    (kernel,) = [k for k in report.measured.kernels if k.kernel == "mindspeed::rms_norm_backward"]
    assert kernel.calls == 2 and kernel.modelled_seconds > 0


def test_a_forward_alone_is_measured(few_rounds):
    torch._dynamo.reset()
    report = mindspeed_fx.explain(lambda x: x.softmax(-1), torch.randn(3), options={"codegen": "eager"}, measure=True)
    assert not report.measured.has_backward and report.measured.families == []
    assert {k.graph for k in report.measured.kernels} == {"inference"}


@pytest.mark.parametrize(
    "tensor, options, words",
    [
        (
            lambda: torch.empty(2, 8, device="meta"),
            {},
            r"tensor of shape \(2, 8\) is on the meta device, where nothing",
        ),
        (lambda: fake(2, 8), {}, r"tensor of shape \(2, 8\) is fake, where nothing runs"),
        (lambda: torch.ones(2, 8), {"target": "npu"}, r'option "target" is "npu", while the step runs on cpu; valid'),
        (lambda: torch.ones(2, 8), {"optimizer": "backward"}, 'option "optimizer" is "backward", so that every step'),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(tensor, options, words):
    def model(x):
        raise AssertionError("it ran")

    with pytest.raises(ArgumentError, match=words):
        mindspeed_fx.explain(model, tensor(), options=options, measure=True)
    with pytest.raises(ArgumentError, match="measure is 3; True or False is expected"):
        mindspeed_fx.explain(model, torch.ones(2), measure=3)


def fake(*shape):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(*shape)


def test_the_command_measures_a_function_and_says_that_a_script_has_no_step(few_rounds, tmp_path, monkeypatch, capsys):
    torch._dynamo.reset()
    (tmp_path / "train.py").write_text(
        "import torch\ndef make():\n    return torch.nn.RMSNorm(8), (torch.randn(2, 8),)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["explain", "train.py:make", "--options", '{"codegen": "eager"}', "--measure"]) == 0
    out = capsys.readouterr().out
    assert "measured: forward and backward on cpu" in out and "    norms               1 sites" in out
    assert cli.main(["explain", "train.py", "--measure"]) == 2
    assert "--measure needs SCRIPT.py:FUNCTION" in capsys.readouterr().err
