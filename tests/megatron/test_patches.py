"""Patches reach names that were copied before, and undo reaches names that were copied since."""

import sys
import types

import pytest
import torch

import mindspeed_fx.megatron
from mindspeed_fx.megatron import patches


@pytest.fixture
def module(monkeypatch):
    def make(name, **names):
        made = types.ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


def test_copies_made_before_are_replaced_and_copies_made_since_are_restored(module):
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region as ours

    mindspeed_fx.megatron.undo()
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region as megatrons

    assert megatrons is not ours and megatrons.__module__ == "megatron.core.tensor_parallel.mappings"
    early = module("user_script_early", copied=megatrons)
    mindspeed_fx.megatron.apply()
    assert early.copied is not megatrons
    late = module("user_script_late", copied=early.copied)
    mindspeed_fx.megatron.undo()
    assert early.copied is megatrons and late.copied is megatrons


def snapshot():
    """Every name of every loaded Megatron module and class, by identity; what caches hold aside."""
    found = {}
    for module_name, loaded in list(sys.modules.items()):
        if module_name.startswith("megatron.core"):
            for name, value in vars(loaded).items():
                found[module_name, name] = value
                if isinstance(value, type) and value.__module__ == module_name:
                    found.update(
                        {
                            (module_name, f"{name}.{member}"): inner
                            for member, inner in vars(value).items()
                            if callable(inner) or isinstance(inner, classmethod)
                        }
                    )
    return found


def test_undo_restores_every_name():
    import megatron.core.models.gpt  # noqa: F401

    mindspeed_fx.megatron.undo()
    current_device = torch.cuda.current_device
    before = snapshot()
    mindspeed_fx.megatron.apply()
    changed = {key for key, value in snapshot().items() if key in before and before[key] is not value}
    assert len(changed) > 100 and torch.cuda.current_device is not current_device
    mindspeed_fx.megatron.undo()
    after = snapshot()
    assert not [key for key in before if after[key] is not before[key]]
    assert torch.cuda.current_device is current_device


def test_a_name_megatron_does_not_have_changes_nothing():
    from megatron.core import utils

    before = utils.divide
    with pytest.raises(ImportError, match=r"this megatron-core has no utils:missing"):
        patches.apply([patches.Patch("utils:divide", None, "test"), patches.Patch("utils:missing", None, "test")])
    assert utils.divide is before


def test_functions_compiled_at_import_are_plain_and_compiled_again():
    from megatron.core.fusions import fused_bias_dropout

    assert not hasattr(fused_bias_dropout.bias_dropout_add_fused_train, "_torchdynamo_orig_callable")
    mindspeed_fx.megatron.undo()
    assert hasattr(fused_bias_dropout.bias_dropout_add_fused_train, "_torchdynamo_orig_callable")
    mindspeed_fx.megatron.apply()
    assert not hasattr(fused_bias_dropout.bias_dropout_add_fused_train, "_torchdynamo_orig_callable")


def test_each_patch_says_why_and_where():
    places = (patches.IN_GRAPH, patches.WITHOUT_CUDA, patches.WITHOUT_ACCELERATOR, patches.EVERYWHERE)
    for patch in patches.applied():
        assert patch.reason and patch.where in places
    assert len({p.target for p in patches.applied()}) == len(patches.applied())
    assert all(limit.endswith(".") for limit in mindspeed_fx.megatron.known_limits())


def test_eager_mode_is_megatrons_own_code(monkeypatch):
    """A patch for graphs does nothing outside one."""
    from megatron.core.fusions import fused_bias_swiglu

    calls = []
    own = fused_bias_swiglu.SwiGLUFunction.apply
    monkeypatch.setattr(fused_bias_swiglu.SwiGLUFunction, "apply", lambda *args: (calls.append(1), own(*args))[1])
    fused_bias_swiglu.bias_swiglu_impl(torch.randn(2, 3, 8), None)
    assert calls == [1]


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_on_an_accelerator_nothing_is_done_for_want_of_one(monkeypatch, kind):
    from mindspeed_fx.megatron import groups, table

    for module in (table, groups):
        monkeypatch.setattr(module, "has_accelerator", lambda: True)
    monkeypatch.setattr(groups, "kind", lambda: kind)
    npu = types.SimpleNamespace(synchronize=lambda: "waited", Stream=type("Stream", (), {}))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    found = table.table()
    assert not [p for p in found if p.where == patches.WITHOUT_ACCELERATOR]
    assert "tensor_parallel.random:CudaRNGStatesTracker.fork" in {
        p.target for p in found if p.where == patches.IN_GRAPH
    }
    elsewhere = {p.target: p for p in found if p.where == patches.WITHOUT_CUDA}
    assert bool(elsewhere) == (kind == "npu"), "an NPU without transfer_to_npu has no device that is called cuda"
    if elsewhere:
        assert elsewhere["torch.cuda:synchronize"].replacement() == "waited"
        assert elsewhere["torch.cuda:Stream"].replacement is npu.Stream
        assert elsewhere["torch.cuda.nvtx:range_push"].replacement("a range") is None, "it has none"
        mask = elsewhere["transformer.utils:get_default_causal_mask"].replacement
        assert mask.keywords == {"device": "npu"}
        with torch.device("meta"):
            assert elsewhere["torch.cuda:current_device"].replacement().type == "meta", (
                "a model built without weights stays so"
            )
