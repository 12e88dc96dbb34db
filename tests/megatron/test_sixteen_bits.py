"""Gradients in 16 bits: as vectors they are no farther from float32 than eager Megatron's."""

from __future__ import annotations

import pytest
import torch

SCALE = 1024.0
"""Of the loss, which keeps small gradients in float16's range."""


def gradients(model, call, scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, 255, (2, 64), generator=generator) for _ in range(2))
    model.zero_grad()
    positions = torch.arange(64).expand(2, 64)
    loss = call(input_ids=ids, position_ids=positions, attention_mask=None, labels=labels).float().mean()
    (loss * scale).backward()
    return {name: p.grad.double() / scale for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_are_as_near_to_float32_as_eager(dtype):
    """A norm of them says less: its distance is that of one number, and one run's may be small by chance."""
    from megatron.core.activations import squared_relu

    from tests.megatron.gpt_models import tiny_gpt

    def build(**settings):
        torch.manual_seed(0)
        sizes = dict(hidden=64, ffn=256, heads=4, kv_heads=4, seq=64, vocab=255, add_bias_linear=True)
        kinds = dict(normalization="LayerNorm", gated_linear_unit=False, activation_func=squared_relu)
        return tiny_gpt(**sizes, **kinds, **settings)

    narrow = build(params_dtype=dtype, fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16).to(dtype)
    exact = build()
    exact.load_state_dict({k: v.float() for k, v in narrow.state_dict().items() if torch.is_tensor(v)}, strict=False)
    expected = gradients(exact, exact, 1.0)
    eager = gradients(narrow, narrow, SCALE)
    compiled = torch.compile(narrow, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    ours = gradients(narrow, compiled, SCALE)

    def distance(some: dict[str, torch.Tensor], names) -> float:
        squares = [((some[n] - expected[n]) ** 2).sum() / (expected[n] ** 2).sum() for n in names]
        return (sum(squares) / len(squares)).sqrt().item()

    norms = [n for n in expected if "norm" in n]
    assert ours.keys() == expected.keys() and all(expected[n].norm() > 0 for n in expected)
    assert distance(ours, expected) <= distance(eager, expected)
    assert distance(ours, norms) <= 0.75 * distance(eager, norms)  # their gradients are summed in float32
