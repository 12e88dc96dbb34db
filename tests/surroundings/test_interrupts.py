"""Compilations that are interrupted, that fail in the middle, or that run beside one another: what comes after them is
as if nothing had been."""

from __future__ import annotations

import _thread
import signal
import threading

import pytest
import torch
import torch._functorch.partitioners
from torch import nn

import mindspeed_fx
from mindspeed_fx.passes.runner import Pipeline
from tests.models import Llama, tokens

OPTIONS = {"codegen": "eager", "memory_budget": 0.5}


def train(model, inputs, options=OPTIONS):
    """(loss, gradients) of a compiled step; of an eager one without options."""
    model.zero_grad(set_to_none=True)
    run = model if options is None else torch.compile(model, backend="mindspeed", options=options)
    loss = run(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def small(seed=0):
    torch.manual_seed(seed)
    return Llama(layers=1), tokens()


def agree(values, expected):
    for value, want in zip(values, expected, strict=True):
        torch.testing.assert_close(value, want, rtol=2e-4, atol=2e-5)


STAGES = ["captured", "joint", "partitioned"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError], ids=lambda e: e.__name__)
def test_what_is_compiled_after_an_interrupt_is_whole(stage, error, monkeypatch):
    """The interrupt comes out as itself or as torch's error that names it; grad mode, patches and the next compilation
    are as before."""
    model, inputs = small()
    expected = train(model, inputs, None)
    run, interrupts = Pipeline.run, []

    def stop(self, at, *args, **kwargs):
        if at == stage and not interrupts:
            interrupts.append(at)
            raise error("in the middle")
        return run(self, at, *args, **kwargs)

    monkeypatch.setattr(Pipeline, "run", stop)
    torch._dynamo.reset()
    choose = torch._functorch.partitioners.choose_saved_values_set
    with pytest.raises((error, torch._dynamo.exc.BackendCompilerFailed), match="in the middle"):
        train(model, inputs)
    assert interrupts == [stage] and torch.is_grad_enabled()
    assert torch._functorch.partitioners.choose_saved_values_set is choose
    torch._dynamo.reset()
    agree(train(model, inputs), expected)
    report = mindspeed_fx.explain(model, *inputs, options=OPTIONS)
    assert report.graph_count == 1 and report.counts["fusion.attention"] == 1


def test_an_interrupt_from_a_terminal_ends_a_compilation(monkeypatch):
    """A signal arrives while passes run: the user's Ctrl-C is no error of a pass."""
    model, inputs = small()
    run = Pipeline.run

    def stop(self, at, *args, **kwargs):
        monkeypatch.setattr(Pipeline, "run", run)
        _thread.interrupt_main()
        for _ in range(10**6):
            pass
        return run(self, at, *args, **kwargs)

    monkeypatch.setattr(Pipeline, "run", stop)
    torch._dynamo.reset()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever a test before put there
    try:
        with pytest.raises(KeyboardInterrupt):
            train(model, inputs)
    finally:
        signal.signal(signal.SIGINT, handler)
    torch._dynamo.reset()
    agree(train(model, inputs), train(model, inputs, None))


def test_threads_that_compile_models_at_once():
    """Each thread has its own model and inputs; every one's step is that of the eager model. The backend is looked up
    before: torch (2.13) loads one that is no part of it in each thread that asks first, and refuses the second."""
    torch._dynamo.reset()
    torch._dynamo.lookup_backend("mindspeed")
    models = [small(seed) for seed in range(3)]
    expected = [train(*pair, None) for pair in models]
    results, start = {}, threading.Barrier(len(models))

    def work(n):
        start.wait()
        try:
            results[n] = train(*models[n])
        except BaseException as failure:
            results[n] = failure

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    for n, want in enumerate(expected):
        if isinstance(results[n], BaseException):
            raise results[n]
        agree(results[n], want)


class Deep(nn.Module):
    """A residual stream through many small layers."""

    def __init__(self, depth, width=8):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(depth)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.slow
def test_two_hundred_layers_and_ten_thousand_nodes():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = Deep(200), (torch.randn(2, 8),)
    agree(train(model, inputs, {"codegen": "eager"}), train(model, inputs, None))
    torch._dynamo.reset()
    model = Deep(1250)
    report = mindspeed_fx.explain(model, *inputs, options={"codegen": "eager"})
    captured = next(run.nodes_before for run in report.graphs[0].runs if run.stage == "captured")
    assert captured >= 10_000 and report.counts["fusion.rms_norm"] + report.counts["fusion.add_rms_norm"] == 1250
