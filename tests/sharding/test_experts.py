"""Plan ``ep``: mixtures of experts written for one device, with experts divided over ranks."""

from __future__ import annotations

import pytest
import torch

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.presets import named_plan

SMALL = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
    max_position_embeddings=64,
    num_experts_per_tok=2,
)


def hugging_face(kind, implementation):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config, model = {
        "Mixtral": ("MixtralConfig", "MixtralForCausalLM"),
        "Qwen3Moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        "GptOss": ("GptOssConfig", "GptOssForCausalLM"),
    }[kind]
    more = {
        "Mixtral": dict(num_local_experts=4),
        "Qwen3Moe": dict(num_experts=4, moe_intermediate_size=8, head_dim=8),
        "GptOss": dict(num_local_experts=4, head_dim=8),
    }[kind]
    made = getattr(transformers, model)(getattr(transformers, config)(**SMALL, **more, use_cache=False)).double()
    return Loss(made, implementation)


class Loss(torch.nn.Module):
    """On one device by batched products, which PyTorch has in float64 too."""

    def __init__(self, model, implementation):
        super().__init__()
        self.model, self.implementation = model, implementation

    def forward(self, ids):
        self.model.config._experts_implementation = (
            self.implementation if torch.compiler.is_compiling() else "batched_mm"
        )
        return self.model(input_ids=ids, labels=ids).loss


def checked(model, mesh, plan, ids):
    model.zero_grad()
    loss = model(ids)
    loss.backward()
    result = simulate(model, mesh, plan, ids)
    assert (
        result.outputs[0] - loss
    ).abs() <= 2**-22 * loss.abs()  # two last places: Hugging Face routes and normalizes in float32
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0, name
        assert (result.gradients[name] - p.grad).abs().max() <= 1e-6 * p.grad.abs().max(), name
    return result


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = (
            torch.nn.Parameter(torch.randn(shape, dtype=torch.float64) / 4) for shape in ((4, 16, 8), (4, 8, 8))
        )

    def forward(self, x, chosen, weights):
        rows, flat = x.repeat_interleave(2, 0), chosen.reshape(-1)
        gate, up = torch.bmm(self.gate_up[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        out = torch.bmm(self.down[flat], (torch.nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * weights.reshape(-1, 1)).view(-1, 2, 8).sum(1)


class Mixture(torch.nn.Module):
    """Rows of weights gathered by expert, which fusion makes grouped products."""

    def __init__(self):
        super().__init__()
        self.embed, self.router, self.experts = (
            torch.nn.Embedding(32, 8).double(),
            torch.nn.Linear(8, 4).double(),
            Experts(),
        )

    def forward(self, ids):
        x = self.embed(ids)
        weights, chosen = self.router(x.view(-1, 8)).softmax(-1).topk(2)
        return (x + self.experts(x.view(-1, 8), chosen, weights).view(x.shape)).square().mean()


def test_plain_model():
    """Gathered rows go back to the order of tokens between the two products, so that each product has an exchange of
    its own.
    """
    ids = torch.randint(0, 32, (4, 6))
    result = checked(Mixture(), {"ep": 2}, "ep", ids)
    assert result.forward["reduce_scatter_tensor"] == 2 and result.forward["all_gather_into_tensor"] == 4, (
        result.forward
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind, implementation, mesh, plan", [
    ("Mixtral", "grouped_mm", {"ep": 2}, "ep"),
    pytest.param("Qwen3Moe", "batched_mm", {"ep": 4}, "ep"),
    pytest.param("Mixtral", "batched_mm", {"dp": 2, "ep": 2}, "zero2+ep"),
    pytest.param("Mixtral", "batched_mm", {"ep": 2, "tp": 2}, "ep+tp"),
    pytest.param("Mixtral", "batched_mm", {"ep": 2, "tp": 2}, "ep+tp_sp"),
])  # fmt: skip
def test_equals_one_device(kind, implementation, mesh, plan):
    ids = torch.randint(0, 32, (4, 8))
    result = checked(hugging_face(kind, implementation), mesh, plan, ids)
    if implementation == "grouped_mm":  # tokens, their choices and weights; the results; two numbers for the loss
        assert dict(result.forward) == {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 1, "all_reduce": 2}


def test_a_model_without_experts():
    with pytest.raises(ShardingError, match='plan "ep" found no experts'):
        named_plan("ep", torch.nn.Linear(2, 2))
