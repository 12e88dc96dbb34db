"""Mixture of experts on one process: one graph, and the loss and gradients of Megatron's own eager layers."""

import pytest
import torch
from torch.nn import functional as F

from mindspeed_fx.megatron import dispatch, experts
from tests.megatron.gpt_models import batch, tiny_gpt, train

CASES = {
    "alltoall": {},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "capacity": {"moe_expert_capacity_factor": 0.8},
    "capacity-padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "aux-and-z-loss": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01,
    },
    "shared-expert": {"moe_shared_expert_intermediate_size": 48},
    "sigmoid-bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "router-fp64": {"moe_router_dtype": "fp64"},
    "unfused": {"bias_activation_fusion": False},
    "top-1-input": {"moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_pre_softmax": True},
}


@pytest.mark.parametrize("case", CASES)
def test_one_graph_as_eager(case):
    settings = {
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "bias_activation_fusion": True,
    } | CASES[case]
    model, inputs = tiny_gpt(experts=4, layers=1, **settings), batch()
    expected = train(model, inputs)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        loss, grads = train(model, inputs, compiled)
        torch.testing.assert_close(loss, expected[0])
        for name, grad in expected[1].items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_biases_in_sixteen_bits(dtype):
    """Megatron's router turns them back to float32 at its first call, which a graph cannot."""
    settings = {**CASES["sigmoid-bias"], "moe_router_load_balancing_type": "none", "params_dtype": dtype}
    model, inputs = tiny_gpt(experts=4, layers=1, moe_token_dispatcher_type="alltoall", **settings), batch()
    router = model.decoder.layers[0].mlp.router
    router.expert_bias.copy_(bias := torch.tensor([0.125, 0.0, -0.125, 0.0]))
    model = model.to(dtype)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss, grads = train(model, inputs, compiled)  # before the eager call, which would turn them
    expected = train(model, inputs)
    assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, bias)
    torch.testing.assert_close(loss, expected[0], rtol=1e-3, atol=0)
    assert expected[1]["decoder.layers.0.mlp.router.weight"].abs().sum() > 0
    for name, grad in expected[1].items():
        torch.testing.assert_close(grads[name], grad, rtol=0.05, atol=1e-2 * grad.abs().max().item())


def test_scale_of_the_auxiliary_loss_is_read_in_the_backward():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    model, inputs = (
        tiny_gpt(
            experts=4,
            layers=1,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.5,
        ),
        batch(),
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    router = model.decoder.layers[0].mlp.router.weight
    grads = []
    for call in (model, compiled):
        for scale in (None, 3.0):
            MoEAuxLossAutoScaler.main_loss_backward_scale = None
            model.zero_grad()
            loss = call(**inputs).mean()
            if scale:
                MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))
            loss.backward()
            grads.append(router.grad.clone())
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    torch.testing.assert_close(grads[2:], grads[:2], rtol=1e-4, atol=1e-7)
    assert not torch.allclose(grads[0], grads[1])


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0], [7, 0, 0], [1, 2, 2]])
def test_grouped_linear(counts):
    x, weights, counts = (
        torch.randn(7, 5, dtype=torch.float64, requires_grad=True),
        [torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)],
        torch.tensor(counts),
    )
    torch.library.opcheck(experts.grouped_linear, (x, weights, counts))
    assert torch.autograd.gradcheck(lambda x, *w: experts.grouped_linear(x, list(w), counts), (x, *weights))
    parts = [rows @ w.T for rows, w in zip(x[: counts.sum()].split(counts.tolist()), weights)]
    expected = F.pad(torch.cat(parts), (0, 0, 0, 7 - int(counts.sum())))
    torch.testing.assert_close(experts.grouped_linear(x, weights, counts), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_wide_gradients_of_experts_are_added_to_buffers(dtype):
    x, counts = torch.randn(7, 5, dtype=dtype, requires_grad=True), torch.tensor([3, 0, 2])
    weights = [torch.randn(4, 5, dtype=dtype, requires_grad=True) for _ in range(3)]
    wide = torch.promote_types(dtype, torch.float32)
    buffers, grad = [torch.ones(4, 5, dtype=wide) for _ in weights], torch.randn(7, 4, dtype=dtype)
    torch.library.opcheck(
        experts.grouped_linear_main_grad,
        (x, weights, counts, [b.clone() for b in buffers], False, [-1] * 3),
        test_utils=("test_schema", "test_faketensor"),
    )
    out = experts.grouped_linear_main_grad(x, weights, counts, buffers, True, [-1] * 3)
    expected = experts.grouped_linear(x, weights, counts)
    assert torch.equal(out, expected)
    (to_x,) = torch.autograd.grad(expected, x, grad)
    out.backward(grad)
    assert torch.equal(x.grad, to_x) and not any(w.grad.any() for w in weights)
    for buffer, rows in zip(buffers, (slice(0, 3), slice(3, 3), slice(3, 5))):
        torch.testing.assert_close(buffer, 1 + grad[rows].T.to(wide) @ x[rows].detach().to(wide))


def test_sort_by_expert_is_megatrons_order():
    from megatron.core.transformer.moe.moe_utils import permute

    chosen = torch.rand(9, 4).argsort(-1) < 2
    probs = torch.rand(9, 4) * chosen
    tokens = torch.randn(9, 3)
    expected, share, order = permute(tokens, chosen, probs=probs, num_out_tokens=18)
    token_of_row, share_of_row = dispatch.sort_by_expert(chosen, probs, 20)
    assert torch.equal(token_of_row[:18], order) and torch.equal(share_of_row[:18], share)
    assert torch.equal(tokens[token_of_row[:18]], expected) and (share_of_row[18:] == 0).all()
