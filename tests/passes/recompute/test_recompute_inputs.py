"""The wish "offload_input": what enters a module waits in host memory, and nothing else does."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from mindspeed_fx.report import recorder
from tests.passes.recompute.moved_bytes import MovedBytes

TOKENS, HIDDEN, LAYERS = 24, 16, 3
BYTES = TOKENS * HIDDEN * 4
"""Of one layer's input."""
SLOW = pytest.mark.slow
MOVED = dict(memory_budget=1.0, offload=True, codegen="eager")


class Layer(nn.Module):
    """Pre-norm, with a table that all layers read and that has no gradient, as rotary embedding has one."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x, table):
        return x + self.down(torch.tanh(self.up(self.norm(x) * table.cos())))


class Model(nn.Module):
    def __init__(self, how, has_embedding=True):
        super().__init__()
        self.embedding = nn.Embedding(11, HIDDEN) if has_embedding else None
        self.layers, self.how = nn.ModuleList(Layer() for _ in range(LAYERS)), how
        self.register_buffer("frequencies", torch.linspace(0.1, 1, HIDDEN))

    def forward(self, x):
        table = torch.arange(TOKENS)[:, None] * self.frequencies
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers:
            x = checkpoint(layer, x, table, use_reentrant=False) if self.how == "checkpointed" else layer(x, table)
        return x.square().mean()


def run(how, recompute, has_embedding=True, **options):
    """(loss and gradients of a step, the report of whoever decided, bytes that went to the host)."""
    torch.manual_seed(0)
    model = Model(how, has_embedding)
    x = torch.arange(TOKENS) % 11 if has_embedding else torch.randn(TOKENS, HIDDEN, requires_grad=True)
    torch._dynamo.reset()
    with recorder.collecting() as graphs, MovedBytes() as moved:
        compiled = torch.compile(model, backend="mindspeed", options={**MOVED, **options, "recompute": recompute})
        loss = compiled(x)
        loss.backward()
    (report,) = [r.report for r in graphs[0].runs if r.report.saved is not None]
    return [loss.detach(), *(p.grad for p in model.parameters())], report, moved.bytes


@pytest.mark.parametrize(
    "how, level",
    [("plain", 2), ("checkpointed", 2), *(pytest.param(how, 0, marks=SLOW) for how in ("plain", "checkpointed"))],
)
def test_inputs_alone_are_moved_and_no_bit_changes(how, level):
    """Level 2 fuses the sum at the end of a layer with the norm of the next."""
    exact, _, nothing = run(how, None, level=level)
    values, report, moved = run(how, {"layers.*": "offload_input"}, level=level)
    assert nothing == 0 and moved == LAYERS * BYTES
    assert sum(s.operator == "offloaded" for s in report.rewrites) == len(report.moves) == LAYERS
    assert not [s for s in report.skipped if "offload" in s.reason]
    assert any(f"offload_input {LAYERS} values" in note for note in report.notes), report.notes
    assert all(torch.equal(a, b) for a, b in zip(values, exact, strict=True))
    assert all(g.abs().sum() > 0 for g in values[1:])


@pytest.mark.parametrize("level", [2, pytest.param(0, marks=SLOW)])
def test_of_some_layers_that_are_recomputed(level):
    """A fused sum and norm whose sum is moved is not run again, and the report says so."""
    wishes = {"layers.*": "recompute", "layers.0": "offload_input", "layers.2": "offload_input"}
    exact, *_ = run("plain", None, level=level)
    values, report, moved = run("plain", wishes, level=level)
    again = {s.module for s in report.rewrites if s.operator == "recomputed"}
    assert moved == 2 * BYTES and "layers.1.norm" in again and "layers.1.down" not in again
    kept = [s.reason for s in report.skipped if "the call that makes them makes what is moved" in s.reason]
    assert len(kept) == (level == 2) and ("layers.2.norm" in again) == (level == 0)
    assert all(torch.equal(a, b) for a, b in zip(values, exact, strict=True))


def test_the_caller_s_own_input_stays_and_the_report_says_so():
    """As the first layer of a later pipeline stage has it: whoever called the graph holds it."""
    _, report, moved = run("checkpointed", {"layers.*": "offload_input"}, has_embedding=False)
    assert moved == (LAYERS - 1) * BYTES
    (reason,) = [s.reason for s in report.skipped if "offload_input" in s.reason]
    assert "layers.0" in reason and "whoever calls the graph holds it" in reason


def test_what_a_region_makes_again_is_not_moved_and_the_report_says_so():
    """Two layers in one checkpointed region: the second's input is made in it."""

    class Pairs(Model):
        def forward(self, x):
            table = torch.arange(TOKENS)[:, None] * self.frequencies
            x = self.embedding(x)
            two = lambda x, table: self.layers[1](self.layers[0](x, table), table)  # noqa: E731
            x = checkpoint(two, x, table, use_reentrant=False)
            return checkpoint(self.layers[2], x, table, use_reentrant=False).square().mean()

    torch.manual_seed(0)
    torch._dynamo.reset()
    with recorder.collecting() as graphs, MovedBytes() as moved:
        options = {**MOVED, "recompute": {"layers.*": "offload_input"}}
        torch.compile(Pairs("pairs"), backend="mindspeed", options=options)(torch.arange(TOKENS) % 11).backward()
    (report,) = [r.report for r in graphs[0].runs if r.report.saved is not None]
    assert moved.bytes == 2 * BYTES
    assert any("1 values are recomputed: a checkpointed region makes them again" in s.reason for s in report.skipped)


def test_a_glob_that_nothing_enters_is_named():
    _, report, moved = run("plain", {"layer.*": "offload_input"})
    assert moved == 0 and any('"layer.*" matches no module' in s.reason for s in report.skipped)
    with pytest.raises(Exception, match='did you mean "layers.*"'):
        run("plain", {"layer.*": "offload_input"}, strict=True)


def test_it_needs_offload():
    with pytest.raises(OptionError, match='maps "layers.*" to "offload_input", but option "offload" is False'):
        Options(recompute={"layers.*": "offload_input"}, memory_budget=1.0)
    with pytest.raises(OptionError, match='did you mean "offload_input"'):
        Options(recompute={"layers.*": "offload_inputs"}, memory_budget=1.0, offload=True)
