"""Functions of Megatron's training module ask for the arguments where that module's own code does."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.training import compile_chunks, fixed_documents, optimizer_memory, tools


@pytest.fixture
def exchanged(monkeypatch):
    """The arguments that a caller puts into Megatron's training module; there are no global ones."""
    package, module = ModuleType("megatron.training"), ModuleType("megatron.training.training")
    args = Namespace(curr_iteration=0, fix_sub_seq_length=2, reset_attention_mask=True)
    module.get_args, package.training, package.get_args = lambda: args, module, _not_initialized
    for found in (package, module):
        monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)
    return args


def _not_initialized():
    raise AssertionError("args is not initialized.")


def test_a_model_is_built_and_stepped_by_a_caller_with_arguments_of_its_own(exchanged, monkeypatch):
    monkeypatch.setenv(compile_chunks.SWITCH, "0")
    monkeypatch.setattr(patches, "original", lambda target: lambda *args, **kwargs: ["made"])
    assert compile_chunks.get_model(None) == ["made"]
    assert tools.train_step(None, None, [], None) == ["made"]
    assert tools.train(None, model=[]) == ["made"]
    monkeypatch.setattr(patches, "original", lambda target: lambda *args, **kwargs: "optimizer")
    assert optimizer_memory.get_megatron_optimizer(None) == "optimizer"


def test_a_dataset_without_a_training_script_has_its_own_masks(exchanged, monkeypatch):
    own = torch.ones(1, 4, 4, dtype=torch.bool), torch.ones(4), torch.arange(4)
    monkeypatch.setattr(patches, "original", lambda target: lambda *args: own)
    assert fixed_documents.masks_and_position_ids(torch.arange(4), 0)[0] is own[0]
