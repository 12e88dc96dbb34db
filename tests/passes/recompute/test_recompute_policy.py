"""Option recompute: what each policy and glob makes again, and that no bit of loss or gradient changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.compat import partitioner
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from mindspeed_fx.passes.recompute.problem.policies import matcher
from mindspeed_fx.passes.runner import Pipeline
from mindspeed_fx.report import recorder


class Layer(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.act, self.down = nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.1)
        x = x + self.out(weights @ v)
        return x + F.dropout(self.down(self.act(self.up(x))), 0.2)


class Model(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(Layer() for _ in range(2)), checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x.square().mean()


def run(recompute, checkpointed=False, codegen="eager", **options):
    """(loss and gradients of a step, the report of whoever decided)."""
    torch.manual_seed(0)
    model, x = Model(checkpointed), torch.randn(3, 8, 16)
    torch._dynamo.reset()
    with recorder.collecting() as graphs:
        loss = torch.compile(
            model, backend="mindspeed", options={"codegen": codegen, "recompute": recompute, **options}
        )(x)
        loss.backward()
    (report,) = [r.report for r in graphs[0].runs if r.report.saved is not None]
    return [loss.detach(), *(p.grad for p in model.parameters())], report


@pytest.fixture(scope="module")
def exact():
    return run("none")


def sites(report):
    return {(s.module, s.nodes[0].rstrip("_0123456789")) for s in report.rewrites}


POLICIES = {
    "full": (lambda m: m.startswith("layers."), None),
    "block:1": (lambda m: m.startswith("layers.0"), "layers.0"),
    "selective": (lambda m: m in ("layers.0", "layers.1"), "layers.1"),
    "activation_function": (lambda m: m.endswith(".act") or m.split(".")[-1].isdigit(), None),
    "norm": (lambda m: m.endswith(".norm"), "layers.1.norm"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_makes_its_own_again_and_changes_no_bit(policy, exact):
    values, report = run(policy)
    within, at = POLICIES[policy]
    modules = {s.module for s in report.rewrites}
    assert modules and all(within(m) for m in modules), modules
    assert at is None or any(m.startswith(at) for m in modules)
    assert all(torch.equal(a, b) for a, b in zip(values, exact[0], strict=True))
    assert all(g.abs().sum() > 0 for g in values[1:])
    assert any(policy in n and "values of" in n for n in report.notes)


def test_none_makes_nothing_again_and_says_what_is_saved(exact):
    _, report = exact
    assert not report.rewrites
    table = report.files["activations.md"]
    assert "no policy or glob names it" in table and "layers.1.up" in table and "test_recompute_policy.py" in table
    (before, after) = report.curves.values()
    assert before.peak == after.peak and len(after.bytes) == len(after.labels) > after.forward > 0
    assert report.files["memory.svg"].startswith("<svg")


def test_draws_stay_saved_and_the_report_says_so():
    _, report = run("full")
    assert [s.reason for s in report.skipped if "random numbers are not drawn again" in s.reason]


def test_globs_override_a_policy_and_the_planner(exact):
    values, report = run({"policy": "activation_function", "layers.0.act": "save"})
    assert {s.module for s in report.rewrites} == {"layers.1.act"} or all(
        m.startswith("layers.1") for m, _ in sites(report)
    )
    assert all(torch.equal(a, b) for a, b in zip(values, exact[0], strict=True))
    values, report = run({"layers.*.up": "recompute"}, memory_budget="1GiB")
    assert {s.module for s in report.rewrites} == {"layers.0.up", "layers.1.up"}
    assert "layers.*.up: recompute" in report.files["activations.md"]
    assert all(torch.equal(a, b) for a, b in zip(values, exact[0], strict=True))
    values, report = run({"layers": "save"}, memory_budget="min")
    assert not any(s.module.startswith("layers") for s in report.rewrites)


def test_a_glob_without_a_match_is_named():
    _, report = run({"layers.*.atc": "recompute"})
    (skip,) = report.skipped
    assert '"layers.*.atc" matches no module' in skip.reason and 'did you mean "layers.*.act"' in skip.reason
    with pytest.raises(Exception, match="matches no module"):
        run({"layers.*.atc": "recompute"}, strict=True)


def test_checkpointed_regions_are_honored():
    plain, report = run("none", checkpointed=True)
    assert {s.module.split(".")[1] for s in report.rewrites} == {"0", "1"}
    named, more = run("norm", checkpointed=True)
    assert len(more.rewrites) >= len(report.rewrites)
    assert all(torch.equal(a, b) for a, b in zip(plain, named, strict=True))


@pytest.mark.parametrize("wish, glob", [("save", "layers.*"), ("offload", "layers.*"), ("offload", "layers.*.qkv")])
def test_what_a_checkpointed_region_makes_again_is_neither_kept_nor_moved(wish, glob):
    """As Megatron's --recompute-granularity full beside MindSpeed's --swap-attention asks for."""
    plain, report = run("none", checkpointed=True)
    wished, more = run({glob: wish}, checkpointed=True, memory_budget=1.0, offload=wish == "offload")
    assert all(torch.equal(a, b) for a, b in zip(plain, wished, strict=True))
    assert sites(more) == sites(report) and not more.moves
    (skip,) = more.skipped
    assert skip.reason.startswith(f"{glob}: {wish}: ") and "a checkpointed region makes them again" in skip.reason


@pytest.mark.parametrize("wish", ["save", "offload"])
def test_wishes_hold_outside_a_checkpointed_region(wish):
    """Only the first layer is in one."""

    class Half(Model):
        def forward(self, x):
            return self.layers[1](checkpoint(self.layers[0], x, use_reentrant=False)).square().mean()

    def step(**options):
        torch.manual_seed(0)
        model, x = Half(), torch.randn(3, 8, 16)
        torch._dynamo.reset()
        with recorder.collecting() as graphs:
            compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager", **options})
            loss = compiled(x)
            loss.backward()
        (report,) = [r.report for r in graphs[0].runs if r.report.saved is not None]
        return [loss.detach(), *(p.grad for p in model.parameters())], report

    plain, _ = step(recompute="none")
    wished, report = step(recompute={"layers.*.qkv": wish}, memory_budget=1.0, offload=wish == "offload")
    assert all(torch.equal(a, b) for a, b in zip(plain, wished, strict=True))
    assert not any(s.module.startswith("layers.1.qkv") for s in report.rewrites if s.operator == "recomputed")
    assert any(s.module.startswith("layers.0.") for s in report.rewrites)
    assert len(report.moves or ()) == (wish == "offload")


@pytest.mark.parametrize(
    "recompute, words",
    [
        ("selectiv", ['did you mean "selective"', "block:N"]),
        ("block:0", ["block:N"]),
        ("block:N", ["block:N"]),
        (3, ["mapping of module globs"]),
        ({"layers.*": "recomputed"}, ['did you mean "recompute"', '"save"']),
        ({"policy": "fully"}, ['did you mean "full"']),
        ({"": "save"}, ["the key ''"]),
    ],
)
def test_bad_values(recompute, words):
    with pytest.raises(OptionError) as e:
        Options(recompute=recompute)
    for word in ("recompute", *words):
        assert word in str(e.value)


def test_a_policy_and_a_budget_are_one_too_many():
    with pytest.raises(OptionError, match="memory_budget"):
        Options(recompute="full", memory_budget=0.5)
    Options(recompute="auto", memory_budget=0.5)


@pytest.mark.parametrize(
    "glob, path, wanted",
    [
        ("layers.*.mlp.act", "model.layers.0.mlp.act", True),
        ("layers.*.mlp", "layers.11.mlp.act", True),
        ("layers.*.act", "layers.0.mlp.act", False),
        ("layers.**.act", "layers.0.mlp.act", True),
        ("mlp", "layers.0.mlp2", False),
        ("layers.?", "layers.10", False),
    ],
)
def test_globs(glob, path, wanted):
    assert matcher(glob)(path) is wanted


@pytest.mark.slow
def test_with_generated_code():
    values, report = run({"layers.*.act": "recompute"}, codegen="inductor")
    assert any(".act" in s.module for s in report.rewrites)
    for a, b in zip(values, run("none", codegen="inductor")[0], strict=True):
        torch.testing.assert_close(a, b)


class Decided(Exception):
    """Ends a compilation at what the forward saves, before any code is generated."""


@pytest.mark.parametrize("budget", (0.3, 1.0))
def test_under_a_budget_generated_code_keeps_nothing_that_a_checkpointed_region_makes_again(budget, monkeypatch):
    """Products of a checkpoint once had no finite price beside generated code: the cut kept them, and pairs of results,
    which no backward can be handed."""
    saved, decide = [], Pipeline.decide

    def stop(self, record, graph, nodes):
        saved.extend(decide(self, record, graph, nodes))
        raise Decided

    monkeypatch.setattr(Pipeline, "decide", stop)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Decided"):
        run(None, checkpointed=True, codegen="inductor", memory_budget=budget)
    kept = [n for n in saved if n.op != "placeholder"]
    assert saved and all(isinstance(n.meta["val"], torch.Tensor) for n in saved)
    assert not [n.name for n in kept if partitioner.must_recompute(n)]
