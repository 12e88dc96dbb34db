"""What must never be called proved, a fault of the prover itself, and normal forms against their numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx import passes
from mindspeed_fx.passes.prove import functions as f
from mindspeed_fx.passes.prove import sites
from mindspeed_fx.passes.prove.numeric import _Numbers
from mindspeed_fx.passes.prove.obligations import Diff, NotComparable, signature
from mindspeed_fx.passes.prove.terms import add, const, mul, of, scale, variable
from tests.models import captured_records

aten = torch.ops.aten
PLACE = variable("i0", 8)
NUMBERS = _Numbers(1.0, {PLACE: np.arange(8.0)}, 1, np.arange(3.0))
ONE = {
    "exp": (f.exponential, np.exp),
    "tanh": (f.tanh, np.tanh),
    "square": (lambda p: f.power(p, 2), np.square),
    "abs": (f.absolute, np.abs),
    "relu": (lambda p: f.maximum(p, const(0)), lambda x: np.maximum(x, 0)),
    "negative": (lambda p: scale(p, -1), np.negative),
    "root": (lambda p: f.power(add(const(1), f.power(p, 2)), -0.5), lambda x: (1 + x**2) ** -0.5),
}
TWO = {"add": (add, np.add), "mul": (mul, np.multiply)}


def loaded(name):
    term = f.load(name, (of(PLACE),), "real")
    return term, NUMBERS.of(term)


TREES = st.recursive(
    st.sampled_from(["x", "y", 0.5, 3]),
    lambda t: st.one_of(st.tuples(st.sampled_from(sorted(ONE)), t), st.tuples(st.sampled_from(sorted(TWO)), t, t)),
    max_leaves=6,
)


def both(tree):
    """(term, numbers by numpy) of a tree."""
    if not isinstance(tree, tuple):
        return loaded(tree) if isinstance(tree, str) else (const(tree), np.full(8, float(tree)))
    term, number = {**ONE, **TWO}[tree[0]]
    parts = [both(t) for t in tree[1:]]
    return term(*[p for p, _ in parts]), number(*[x for _, x in parts])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TREES)
def test_a_normal_form_has_the_numbers_of_its_expression(tree):
    with np.errstate(all="ignore"):
        term, wanted = both(tree)
        got = np.broadcast_to(NUMBERS.of(term), (8,))
    known = np.isfinite(wanted) & np.isfinite(got) & (np.abs(wanted) < 1e12)
    np.testing.assert_allclose(got[known], np.broadcast_to(wanted, (8,))[known], rtol=1e-8, atol=1e-8)


def graph(build, **attributes):
    root = torch.nn.Module()
    for name, value in attributes.items():
        root.register_buffer(name, value)
    g = torch.fx.Graph()
    x = g.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    g.output(build(g, x))
    for n in g.nodes:
        n.meta.setdefault("val", torch.empty(4, device="meta"))
    return torch.fx.GraphModule(root, g)


def scaled(g, x):
    return g.call_function(aten.mul.Tensor, (x, g.get_attr("c")))


def test_a_constant_that_changed_under_its_name_is_not_the_same():
    with pytest.raises(NotComparable, match="attribute c is not known to be the same tensor"):
        Diff(graph(scaled, c=torch.ones(4)), graph(scaled, c=torch.zeros(4)))
    assert not Diff(graph(scaled, c=torch.ones(4)), graph(scaled, c=torch.ones(4))).owed


def test_outcomes_of_other_numbers_are_not_reused():
    def doubled(g, x):
        return g.call_function(aten.add.Tensor, (x, x))

    def key(c):
        diff = Diff(graph(scaled, c=torch.tensor(c)), graph(doubled))
        return [signature(diff.obligation(a, b)) for a, b in diff.in_order()]

    assert key(2.0) == key(2.0) and len(key(2.0)) == 1
    assert key(2.0) != key(3.0)


def test_an_effect_that_is_dropped_has_no_proof():
    def asserted(g, x):
        g.call_function(aten._assert_async.msg, (x, "no"))
        return x

    with pytest.raises(NotComparable, match="has effects, and is only in the graph before"):
        Diff(graph(asserted), graph(lambda g, x: x))


@pytest.fixture
def halves():
    """A pass that reports the one of its two rewrites that is right."""

    @passes.register("test.fault", stage="captured", level=0, replace=True)
    def plant(gm, context):
        report = passes.PassReport("test.fault")
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and node.target in (aten.exp.default, aten.sin.default):
                new_target = aten.exp.default if node.target is aten.exp.default else aten.cos.default
                with gm.graph.inserting_before(node):
                    new = gm.graph.call_function(new_target, node.args)
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                gm.graph.erase_node(node)
                if new_target is aten.exp.default:
                    report.rewrites.append(passes.site("half", new))
        gm.recompile()
        return report

    yield
    passes.unregister("test.fault")


PROVE = {"codegen": "eager", "check": "prove", "target": "cpu", "disable": ["fusion.*"]}


def run():
    return captured_records(lambda x: (x.exp(), x.sin()), {"x": torch.randn(3, 7, requires_grad=True)}, PROVE)


def test_what_was_rewritten_and_not_reported_is_compared_too(halves):
    with pytest.raises(Exception, match='pass "test.fault" changed what is computed'):
        run()


def test_a_fault_of_the_prover_is_no_error_of_the_compilation(halves, monkeypatch):
    def broken(*_):
        raise KeyError("a rule")

    monkeypatch.setattr(sites, "_KNOWN", {})
    monkeypatch.setattr(sites, "Diff", broken)
    monkeypatch.setattr(sites, "MOST_BYTES", 0)
    proofs = [p for g in run() for r in g.runs for p in r.proofs]
    assert {p.status for p in proofs} == {"unknown"}
    assert all("the proof failed with KeyError" in p.reason for p in proofs)
