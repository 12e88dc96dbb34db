"""``--moe-zero-memory``: the same loss and gradients, and bytes kept for the backward as the closed form has them."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

import pytest
import torch

from mindspeed_fx.megatron import zero_memory
from tests.megatron.gpt_models import batch, tiny_gpt, train
from tests.megatron.kept_bytes import bytes_kept

HIDDEN, WIDTH, ROWS = 64, 512, 4 * 16 * 2
PLAIN = {"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
MODELS = {
    "plain": {},
    "shared": {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
    "shared-overlap": {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True},
    "capacity": {"moe_expert_capacity_factor": 0.8},
    "probs-on-input": {"moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_pre_softmax": True},
}


def ask(model, level: str, **more) -> None:
    zero_memory.set_levels(model, Namespace(moe_zero_memory=level, **more))


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})


@pytest.mark.parametrize("way", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", MODELS)
def test_values(case, way):
    model, inputs = tiny_gpt(experts=4, layers=1, **PLAIN | MODELS[case]), batch()
    loss, gradients = train(model, inputs)
    for level in ("level0", "level1"):
        ask(model, level)
        new_loss, new_gradients = train(model, inputs, model if way == "eager" else compiled(model))
        torch.testing.assert_close(new_loss, loss)
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 0 or "mlp" in name
            torch.testing.assert_close(new_gradients[name], gradient, rtol=1e-4, atol=1e-6)


MEGATRON, GRAPH = 4, 1
"""What an activation of width F keeps in rows of F beside the first product: silu, its product with the other half, the
row times its share and what silu reads in Megatron; what the second product reads in a graph."""


def saved_bytes(way: str) -> list[int]:
    """What the layer keeps less than without the flag, at level 0 and at level 1."""
    inputs, kept = batch(4), []
    model = tiny_gpt(experts=4, layers=1, hidden=HIDDEN, ffn=WIDTH, **PLAIN)
    for level in (None, "level0", "level1"):
        if level:
            ask(model, level)
        call = model if way == "eager" else compiled(model)
        if way == "graph":
            train(model, inputs, call)
        kept.append(bytes_kept(call, model, inputs))
    return [kept[0] - level for level in kept[1:]]


def closed_forms(way: str) -> list[int]:
    """Level 0 keeps the first product alone, of 2 F; level 1 nothing. H are the rows that it reads."""
    products = MEGATRON if way == "eager" else GRAPH
    return [4 * ROWS * (HIDDEN + (products + more) * WIDTH) for more in (0, 2)]


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_bytes(way):
    for saved, closed_form in zip(saved_bytes(way), closed_forms(way), strict=True):
        assert saved == pytest.approx(closed_form, rel=0.02)


def test_layers_of_level_1_are_counted_by_stage():
    """Every second layer of level 1 is of the other virtual stage; those beyond the number are of level 0."""

    def levels(model, **more):
        ask(model, "level1", virtual_pipeline_model_parallel_size=2, **more)
        return [getattr(layer.mlp, "zero_memory", None) for layer in model.decoder.layers]

    model = tiny_gpt(experts=4, layers=3, **PLAIN)
    assert levels(model, moe_zero_memory_num_layers=3) == ["level1", "level1", "level0"]
    model.vp_stage = 1
    assert levels(model, moe_zero_memory_num_layers=3) == ["level1", "level0", "level0"]
    assert levels(model, moe_zero_memory_num_layers=0) == ["level1"] * 3
    for layer in model.decoder.layers:
        del layer.mlp.zero_memory
    whole = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    model.config = dataclasses.replace(model.config, **whole)
    assert levels(model) == [None, None, "level1"]
