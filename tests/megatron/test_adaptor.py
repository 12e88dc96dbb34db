"""Megatron-core GPT: runs without CUDA, is captured whole, and trains as an independent implementation does."""

import io
import signal
import sys
import warnings

import pytest
import torch
import torch._dynamo

import mindspeed_fx.megatron
from tests import ranks
from tests.megatron.gpt_models import COUNTS, batch, start, tiny_gpt, train
from tests.megatron.reference import loss_per_token
from tests.models import fusion_counts


def assert_close(actual, expected, tolerance=2e-5):
    assert (actual[0] - expected[0]).abs() <= tolerance * expected[0].abs()
    assert actual[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (actual[1][name] - grad).abs().max() <= tolerance * grad.abs().max() + 1e-9, name


def oracle(model, inputs, layers=2):
    state = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    loss = loss_per_token(state, inputs, layers, 4, 2).mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in state.items()}


@pytest.mark.parametrize(
    "config",
    [
        {"tie": True},
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"},
        {"bias_activation_fusion": True},
        *(
            pytest.param(c, marks=pytest.mark.slow)
            for c in ({}, {"bias_activation_fusion": False}, {"attention_softmax_in_fp32": True})
        ),
    ],
)
def test_one_graph_right_gradients_exact_counts(config):
    model, inputs = tiny_gpt(**config), batch()
    expected = oracle(model, inputs)
    assert_close(train(model, inputs), expected)
    compiled = torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    assert_close(train(model, inputs, compiled), expected)
    torch._dynamo.reset()
    report = mindspeed_fx.explain(model, options={"codegen": "eager"}, **inputs)
    assert report.graph_count == 1 and report.break_reasons == []
    assert fusion_counts(report) == COUNTS
    assert {s.module for s in report.sites("fusion.attention")} == {
        f"decoder.layers.{i}.self_attention.core_attention" for i in range(2)
    }


def test_dynamic_sequence_is_one_graph():
    from mindspeed_fx.report import recorder

    model = tiny_gpt(seq=64)
    with recorder.collecting() as graphs:
        compiled = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=True, options={"codegen": "eager"})
        for size, seq in ((2, 16), (3, 16), (2, 24), (4, 33)):
            assert_close(train(model, batch(size, seq), compiled), oracle(model, batch(size, seq)))
    assert len(graphs) == 1 and graphs[0].counts["fusion.attention"] == 2


def test_dropout_runs_and_is_fused():
    model = tiny_gpt(dropout=0.1)
    report = mindspeed_fx.explain(model, options={"codegen": "eager"}, **batch())
    assert report.graph_count == 1 and report.counts["fusion.attention"] == 2 and not report.skipped("fusion.attention")
    model.eval()
    torch._dynamo.reset()
    assert mindspeed_fx.explain(model, options={"codegen": "eager"}, **batch()).counts["fusion.attention"] == 2


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_is_megatrons(smoothing):
    import torch.distributed as dist
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy, vocab_parallel_cross_entropy

    assert dist.get_world_size() == 1
    logits, target = torch.randn(5, 2, 11, requires_grad=True), torch.randint(0, 11, (5, 2))
    loss = vocab_parallel_cross_entropy(logits, target, smoothing)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    # Megatron's own autograd.Function, which the adaptor does not touch.
    from megatron.core.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy

    expected = _VocabParallelCrossEntropy.apply(logits, target, smoothing)
    (expected_grad,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)
    assert VocabParallelCrossEntropy is not None


def test_moe_runs_and_what_breaks_is_said():
    model, inputs = tiny_gpt(experts=4), batch()
    report = mindspeed_fx.explain(model, options={"codegen": "eager"}, **inputs)
    assert report.graph_count >= 1
    if report.break_reasons:
        assert any("MoE" in limit for limit in mindspeed_fx.megatron.known_limits())
    torch._dynamo.reset()
    expected = train(model, inputs)
    assert_close(
        train(model, inputs, torch.compile(model, backend="mindspeed", options={"codegen": "eager"})), expected
    )


def test_undo_restores_everything_and_apply_is_idempotent():
    import megatron.core.tensor_parallel as tp
    from megatron.core import jit

    applied = mindspeed_fx.megatron.applied()
    mindspeed_fx.megatron.apply()
    assert mindspeed_fx.megatron.applied() == applied and all(reason for _, reason in applied)
    ours = tp.layers.linear_with_grad_accumulation_and_async_allreduce
    current_device = torch.cuda.current_device
    mindspeed_fx.megatron.undo()
    assert tp.layers.linear_with_grad_accumulation_and_async_allreduce is not ours
    assert tp.layers.copy_to_tensor_model_parallel_region.__module__ == "megatron.core.tensor_parallel.mappings"
    assert tp.copy_to_tensor_model_parallel_region.__module__ == "megatron.core.tensor_parallel.mappings"
    assert torch.cuda.current_device is not current_device and jit.jit_fuser is torch.compile
    assert mindspeed_fx.megatron.applied() == []


def import_adaptor_late(rank):
    """Megatron refuses to build a model without CUDA until the adaptor is imported."""
    import megatron.core.models.gpt  # noqa: F401

    assert not mindspeed_fx.megatron.applied() and "mindspeed_fx.megatron_adaptor" not in sys.modules
    start()
    with pytest.raises(Exception, match="CUDA|NVIDIA"):
        train(tiny_gpt(), batch())
    from mindspeed_fx import megatron_adaptor

    train(tiny_gpt(), batch())
    assert megatron_adaptor.applied()


def test_the_adaptor_works_after_megatron_was_imported():
    ranks.spawn(import_adaptor_late, nprocs=1)


def test_an_unsupported_version_is_one_clear_error(monkeypatch):
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    mindspeed_fx.megatron.undo()
    with pytest.raises(ImportError, match=r"supports megatron-core 0\.16\.x; 0\.9\.0 is installed"):
        mindspeed_fx.megatron.apply()


def test_a_warning_is_given_and_breaks_no_graph():
    """As Megatron's multi-token prediction gives one in every forward with --recompute-method block."""

    class Warns(torch.nn.Module):
        def forward(self, x):
            warnings.warn("not recomputed", stacklevel=2)
            return x * 2

    model = Warns()
    model.compile(backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    with pytest.warns(UserWarning, match="not recomputed"):
        assert torch.equal(model(torch.ones(3)), torch.full((3,), 2.0))


def test_a_checkpoint_with_a_signal_is_read():
    """``args.exit_signal``, which Python 3.10 writes by another name than later ones."""
    file = io.BytesIO()
    torch.save({"exit_signal": signal.SIGTERM}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"exit_signal": signal.SIGTERM}
