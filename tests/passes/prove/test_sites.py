"""check="prove": what passes do is proved, and planted faults are refused, with the pass, the place and the term."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx import passes
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from mindspeed_fx.passes.check import CheckError
from mindspeed_fx.passes.prove import numeric
from mindspeed_fx.passes.prove.sites import ProofError
from tests.models import Llama, captured_records, tokens

aten = torch.ops.aten
PROVE = {"codegen": "eager", "check": "prove", "target": "cpu"}


def proofs(function, inputs, **options):
    graphs = captured_records(function, inputs, {**PROVE, **options})
    return [(run.report.name, proof) for g in graphs for run in g.runs for proof in run.proofs]


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def normed(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def causal(q, k, v):
    i = torch.arange(q.shape[2])
    scores = (q @ k.transpose(-1, -2)) * 0.25
    return F.softmax(scores.masked_fill(i[None, :] > i[:, None], float("-inf")), -1) @ v


def tensors(*shapes):
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def experts(x, p, e):
    order = e.flatten().argsort(stable=True)
    y = torch.tanh(x[order // 2]) * p.flatten()[order, None]
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))
    return y[inverse].view(-1, 2, y.shape[1]).sum(1)


def counted(x, e):
    ordered, order = e.flatten().sort(stable=True)
    return x[order // 2], torch.histc(ordered.float(), 3, 0, 2).cumsum(0)


def convolved(x, w):
    return F.silu(F.conv1d(x, w, padding=3, groups=6)[..., : x.shape[-1]])


CASES = {
    "norm": (normed, dict(zip("xw", tensors((2, 6, 16), (16,))))),
    "rope": (rotated, dict(zip(("x", "cos", "sin"), tensors((2, 6, 16), (6, 16), (6, 16))))),
    "attention": (causal, dict(zip("qkv", tensors(*[(2, 3, 8, 16)] * 3)))),
    "gate": (lambda x, y: F.silu(x) * y, dict(zip("xy", tensors((4, 8), (4, 8))))),
    "convolution": (convolved, dict(zip("xw", tensors((2, 6, 10), (6, 1, 4))))),
    "experts": (experts, {**dict(zip("xp", tensors((5, 4), (5, 2)))), "e": torch.tensor([[1, 0]] * 3 + [[2, 1]] * 2)}),
    "counts": (counted, {"x": tensors((5, 4))[0], "e": torch.tensor([[1, 0]] * 3 + [[2, 1]] * 2)}),
    "loss": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=3),
        {"x": tensors((6, 11))[0], "t": torch.tensor([1, 3, 0, 10, 3, 5])},
    ),
}
SITES = {
    "convolution": "fusion.causal_conv1d",
    "experts": "fusion.moe_permute",
    "counts": "fusion.moe_permute",
    "norm": "fusion.rms_norm",
    "rope": "fusion.rope",
    "attention": "fusion.attention",
    "gate": "fusion.swiglu",
    "loss": "fusion.cross_entropy",
}


@pytest.mark.parametrize("name", CASES)
def test_a_rewrite_is_proved(name):
    assert (SITES[name], "proved") in [(p, proof.status) for p, proof in proofs(*CASES[name])]


def test_every_site_of_a_model_is_proved_and_reported():
    ids, labels = tokens()
    graphs = captured_records(Llama(layers=2), {"ids": ids, "labels": labels}, PROVE)
    runs = [run for g in graphs for run in g.runs if run.report.rewrites]
    assert sum(len(run.proofs) for run in runs) >= 14
    assert all(len(run.proofs) == len(run.report.rewrites) for run in runs)
    assert {proof.status for run in runs for proof in run.proofs} == {"proved"}
    assert all(run.check == f"{len(run.proofs)} proved" for run in runs)


def with_argument(target, place, new):
    def edit(node):
        if node.target is not target:
            return False
        node.args = (*node.args[:place], new(node.args[place]) if callable(new) else new, *node.args[place + 1 :])
        return True

    return edit


def with_target(old, new):
    def edit(node):
        if node.target is not old:
            return False
        node.target = new
        return True

    return edit


def swap(node):
    if node.target is not torch.ops.mindspeed.swiglu.default or len(node.args) < 2:
        return False
    node.args = (node.args[1], node.args[0], *node.args[2:])
    return True


FAULTS = {
    "eps": ("norm", torch.ops.mindspeed.rms_norm.default, 2, 1e-6),
    "axis": ("norm-unfused", aten.mean.dim, 1, [-2]),
    "scale": ("attention", torch.ops.mindspeed.attention.default, 5, 0.2501),
    "window": ("attention", torch.ops.mindspeed.attention.default, 6, 7),
    "not causal": ("attention", torch.ops.mindspeed.attention.default, 4, False),
    "pairs": ("rope", torch.ops.mindspeed.rope.default, 3, True),
    "ignored target": ("loss", torch.ops.mindspeed.cross_entropy.default, 2, 4),
    "smoothing": ("loss", torch.ops.mindspeed.cross_entropy.default, 3, 0.1),
}
TARGETS = {
    "mask edge": ("attention-unfused", aten.gt.Tensor, aten.ge.Tensor),
    "sign": ("rope-unfused", aten.add.Tensor, aten.sub.Tensor),
    "offset": ("rope-unfused", aten.neg.default, aten.abs.default),
}


@pytest.fixture
def fault(request):
    """A pass that plants a fault after fusion and reports it as a rewrite."""
    edit = request.param

    @passes.register("test.fault", stage="captured", level=0, replace=True)
    def plant(gm, context):
        report = passes.PassReport("test.fault")
        for node in gm.graph.nodes:
            if node.op == "call_function" and edit(node):
                report.rewrites.append(passes.site("a fault", node))
                break
        gm.recompile()
        return report

    yield
    passes.unregister("test.fault")


EDITS = [pytest.param(with_argument(*rest), case, id=name) for name, (case, *rest) in FAULTS.items()]
EDITS += [pytest.param(with_target(old, new), case, id=name) for name, (case, old, new) in TARGETS.items()]
EDITS += [pytest.param(swap, "gate", id="swapped")]


@pytest.mark.parametrize("fault, case", EDITS, indirect=["fault"])
def test_a_planted_fault_is_refused(fault, case):
    name, _, unfused = case.partition("-")
    with pytest.raises(Exception) as error:
        proofs(*CASES[name], disable=["fusion.*"] if unfused else [])
    text = str(error.value)
    assert 'check: pass "test.fault" changed what is computed at a fault' in text
    assert "before - after = " in text and "element [" in text
    assert issubclass(ProofError, CheckError)


def opaque(node):
    """The same numbers by another operator: no term tells that they are equal."""
    if node.target is not aten.kthvalue.default:
        return False
    node.target, node.args = aten.min.dim, (node.args[0], -1)
    return True


@pytest.mark.parametrize("fault", [opaque], indirect=True)
def test_what_has_no_proof_is_checked_on_values_with_the_reason(fault):
    ((name, proof),) = proofs(lambda x: x.kthvalue(1)[0] + 1, {"x": torch.randn(3, 7)}, disable=["fusion.*"])
    assert (name, proof.status) == ("test.fault", "checked") and "kthvalue" in proof.reason


@pytest.mark.parametrize("fault", [opaque], indirect=True)
def test_without_values_nothing_is_known(fault, monkeypatch):
    from mindspeed_fx.passes.prove import sites

    monkeypatch.setattr(sites, "MOST_BYTES", 0)
    ((_, proof),) = proofs(lambda x: x.kthvalue(1)[0] + 1, {"x": torch.randn(3, 7)}, disable=["fusion.*"])
    assert proof.status == "unknown" and "no values were compared" in proof.reason


@pytest.mark.parametrize("fault", [with_target(aten.exp.default, aten.expm1.default)], indirect=True)
def test_a_witness_needs_numbers(fault, monkeypatch):
    """Where no number shows it the values do."""

    def no_number(*_):
        raise numeric.NoNumber("none")

    monkeypatch.setattr("mindspeed_fx.passes.prove.sites.witness", no_number)
    with pytest.raises(Exception, match='check: pass "test.fault" may be off by'):
        proofs(lambda x: x.exp() * 3, {"x": torch.randn(3, 7)}, disable=["fusion.*"])


def test_equal_layers_are_proved_once(monkeypatch):
    from mindspeed_fx.passes.prove import sites

    calls = []
    original = sites._examined
    monkeypatch.setattr(sites, "_KNOWN", {})
    monkeypatch.setattr(sites, "_examined", lambda *args: calls.append(1) or original(*args))
    ids, labels = tokens()
    counts = []
    for layers in (2, 6):
        calls.clear()
        sites._KNOWN.clear()
        captured_records(Llama(layers=layers), {"ids": ids, "labels": labels}, PROVE)
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_the_option_is_one_of_three():
    with pytest.raises(OptionError, match=r'"off", "each", "prove" \(did you mean "prove"\?\)'):
        Options(check="proof")


def masked_twice(x):
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return x.masked_fill(mask.logical_not(), 0.0), mask


def cut_to_a_triangle(x):
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return x.tril(), mask


@pytest.mark.parametrize("rounds, is_proved", [(1, False), (6, True)])
def test_a_mask_that_was_not_looked_into_refutes_nothing(rounds, is_proved):
    """Numbers for a mask's elements need be none that the graph has."""
    from mindspeed_fx.compat import tracing
    from mindspeed_fx.passes.prove import sites
    from mindspeed_fx.passes.prove.obligations import Diff

    before, after = (
        tracing.make_fx_decomposed(f, [torch.randn(4, 4)], None) for f in (masked_twice, cut_to_a_triangle)
    )
    diff = Diff(before, after)
    for a, b in diff.in_order():
        outcome = sites._examined(diff, diff.obligation(a, b), rounds)
        assert not outcome.witness and (not outcome.reason) == is_proved, outcome


def filled(x, y):
    buffer = torch.empty(4, 6)
    buffer[:, :2] = x
    buffer[:, 2:] = y
    return buffer * 2


def test_a_buffer_that_slices_fill_is_proved_to_be_their_cat():
    x, y = torch.randn(4, 2), torch.randn(4, 4)
    assert ("canonicalize.filled_buffers", "proved") in {
        (name, p.status) for name, p in proofs(filled, {"x": x, "y": y})
    }
