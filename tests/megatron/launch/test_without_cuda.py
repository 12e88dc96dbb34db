"""What stands for CUDA, Apex and TransformerEngine where there are none: words in Megatron's functions, calls of
torch.cuda, an Adam, defaults of arguments, modules that need Triton."""

from __future__ import annotations

import argparse
import importlib
import sys

import pytest
import torch

from mindspeed_fx.megatron import cuda_calls, device_words, missing
from mindspeed_fx.megatron.optimizer import Adam
from mindspeed_fx.megatron.training import habits

MODULE = """
def make(size, device="cuda", *, other="cuda"):
    def inner():
        return "cuda" if size else "cuda:"
    return device, other, inner(), "cudart"

class Kinds:
    def is_half(self, kind):
        return kind in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]

    @property
    def place(self):
        return f"cuda:{3}"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module that says cuda, in a package that stands for Megatron."""
    (tmp_path / "megatronlike").mkdir()
    (tmp_path / "megatronlike" / "layers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "megatronlike"
    for name in [n for n in sys.modules if n.startswith("megatronlike")]:
        del sys.modules[name]


@pytest.mark.parametrize("is_loaded_before", [True, False])
def test_the_word_is_exchanged_in_functions_and_restored(package, is_loaded_before):
    words = device_words.Words("npu", "torch.", package)
    if is_loaded_before:
        importlib.import_module("megatronlike.layers")
    words.install()
    called = []
    words.when_imported("megatronlike.layers", lambda: called.append(1))
    layers = importlib.import_module("megatronlike.layers")
    assert called == [1]
    assert layers.make(1) == ("npu", "npu", "npu", "cudart") and layers.make(0)[2] == "npu:"
    assert layers.Kinds().is_half("torch.HalfTensor") and not layers.Kinds().is_half("torch.cuda.HalfTensor")
    assert layers.Kinds().place == "npu:3"
    words.remove()
    assert layers.make(1) == ("cuda", "cuda", "cuda", "cudart")
    assert layers.Kinds().is_half("torch.cuda.HalfTensor") and layers.Kinds().place == "cuda:3"
    assert words not in sys.meta_path


def test_what_waits_is_not_called_after_removal(package):
    words = device_words.Words("cpu", "torch.", package)
    words.install()
    called = []
    words.when_imported("megatronlike.layers", lambda: called.append(1))
    words.remove()
    importlib.import_module("megatronlike.layers")
    assert not called


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs_with_the_number_of_steps_in_the_group(decoupled):
    torch.manual_seed(0)
    start = [torch.randn(3, 4), torch.randn(5)]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = Adam([{"params": ours}, {"params": []}], adam_w_mode=decoupled, **settings)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **settings)
    for _ in range(3):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert [g.get("step") for g in optimizer.param_groups] == [3, None]
    again = Adam([{"params": ours}, {"params": []}], adam_w_mode=decoupled, **settings)
    again.load_state_dict(optimizer.state_dict())
    for p, q in zip(ours, theirs):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    again.step()
    reference.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_an_adam_without_gradients_steps_nothing():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Adam([parameter])
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2)) and not optimizer.state


def test_defaults_that_need_an_extension_are_switched_off_with_a_line(monkeypatch):
    monkeypatch.setattr(habits.importlib.util, "find_spec", lambda name: None)
    args = argparse.Namespace(transformer_impl="transformer_engine", apply_rope_fusion=True, moe_permute_fusion=False)
    lines = habits.settle(args)
    assert args == argparse.Namespace(transformer_impl="local", apply_rope_fusion=False, moe_permute_fusion=False)
    assert [line.partition(":")[0] for line in lines] == ["transformer_impl=local", "apply_rope_fusion=False"]
    monkeypatch.setattr(habits.importlib.util, "find_spec", lambda name: object())
    assert not habits.settle(argparse.Namespace(transformer_impl="transformer_engine", apply_rope_fusion=True))


def test_kernels_of_triton_are_refused_when_they_are_called(monkeypatch):
    monkeypatch.delitem(sys.modules, missing.BATCH_INVARIANT, raising=False)
    monkeypatch.setattr(missing.importlib.util, "find_spec", lambda name: None)
    take_back = missing.answer_for_triton()
    module = sys.modules[missing.BATCH_INVARIANT]
    assert not module.is_batch_invariant_mode_enabled()
    with pytest.raises(ImportError, match="--batch-invariant-mode needs Triton"):
        module.enable_batch_invariant_mode()
    take_back()
    assert missing.BATCH_INVARIANT not in sys.modules


def test_a_cpu_has_one_stream_and_the_memory_of_the_process():
    first, second = cuda_calls.Event(), cuda_calls.Event()
    cuda_calls.current_stream().record_event(first)
    second.record()
    assert first.elapsed_time(second) >= 0 and first.query()
    assert 0 < cuda_calls.resident_bytes() <= 2 * cuda_calls.max_resident_bytes()
    assert cuda_calls.memory_stats()["allocated_bytes.all.peak"] >= cuda_calls.resident_bytes() // 2
    with cuda_calls.one_device():
        assert torch.cuda.device_count() == 1
    assert torch.cuda.device_count() == 0 or torch.cuda.is_available()
