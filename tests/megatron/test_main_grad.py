"""Gradient accumulation fusion in one graph: weight gradients are added to ``main_grad``."""

import types

import pytest
import torch

from mindspeed_fx.megatron import linear as adapted
from mindspeed_fx.megatron import main_grad, patches
from mindspeed_fx.training import gradient_ready
from tests.kernels.npu import npu_graphs
from tests.megatron.gpt_models import batch, tiny_gpt


def prepared(dtype, parts_of_one):
    """A model whose weights have main_grad buffers, filled with 1; Megatron's own are parts of one flat buffer."""
    torch.manual_seed(0)
    model = tiny_gpt(layers=1, gradient_accumulation_fusion=True).to(dtype)
    weights = list(model.parameters())
    flat = torch.ones(sum(p.numel() for p in weights))
    for p, part in zip(weights, flat.split([p.numel() for p in weights])):
        p.main_grad = part.view(p.shape) if parts_of_one else torch.ones(p.shape)
    return model


def step(run, model, times=2):
    for _i in range(times):
        run(**batch()).mean().backward()
    return {n: p.main_grad.clone() for n, p in model.named_parameters()}, {
        n: p.grad for n, p in model.named_parameters()
    }


def megatrons(model):
    """Megatron's own function, its extension emulated."""
    import megatron.core.tensor_parallel.layers as layers

    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda x, grad, into: into.addmm_(grad.t().float(), x.float())
    )
    own, ours = patches.original(adapted.LINEAR), layers.linear_with_grad_accumulation_and_async_allreduce
    layers.linear_with_grad_accumulation_and_async_allreduce = own
    for module in model.modules():
        if hasattr(module, "_forward_impl"):
            module._forward_impl = own
    try:
        return step(model, model)
    finally:
        layers.linear_with_grad_accumulation_and_async_allreduce = ours
        del layers.fused_weight_gradient_mlp_cuda


def lowered_to(graphs):
    return {
        (row["operator"].removeprefix("mindspeed."), row["kernel"])
        for row in graphs.rows()
        if "main_grad" in row["operator"]
    }


@pytest.mark.parametrize(
    "dtype, parts_of_one, codegen, target",
    [
        (torch.bfloat16, True, "eager", "npu"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (torch.bfloat16, True, "eager", "cpu"),
                (torch.float32, False, "eager", "npu"),
                (torch.float32, False, "inductor", "cpu"),
                (torch.float32, True, "inductor", "cpu"),
            )
        ),
    ],
)
def test_weight_gradients_are_added_to_main_grad(dtype, parts_of_one, codegen, target):
    model = prepared(dtype, parts_of_one)
    reference = prepared(dtype, parts_of_one)
    reference.load_state_dict(model.state_dict())
    expected, expected_grads = megatrons(reference)
    torch._dynamo.reset()
    with npu_graphs.lowered() as graphs:
        found, grads = step(
            torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": codegen, "target": target}),
            model,
        )
    if target == "npu":
        kernel = "npu_grouped_matmul_add_" if dtype == torch.bfloat16 else "aten addmm_"
        assert lowered_to(graphs) == {("linear_main_grad", "aten linear"), ("add_to_main_grad", kernel)}
    copies = [
        name
        for side, calls, _ in graphs
        for name in calls
        if side == "backward" and name in ("aten.copy_", "aten.clone")
    ]
    assert codegen == "inductor" or "aten.copy_" not in copies, "main_grad is copied"
    linear = {n for n in expected if "linear" in n and "norm" not in n} | {"output_layer.weight"}
    for name in expected:
        assert (grads[name] is None) == (expected_grads[name] is None) == (name in linear), name
        assert ((found[name] != 1).any().item()) == (name in linear), name
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2
        assert (found[name] - expected[name]).abs().max() <= tolerance * (expected[name] - 1).abs().max() + 5e-7, name


def test_a_weight_of_more_rows_than_the_operator_takes(monkeypatch):
    from mindspeed_fx.kernels.npu.emulation import registry
    from mindspeed_fx.megatron import main_grad_npu

    registry.define()
    monkeypatch.setattr(main_grad_npu, "INNER", 4)
    calls, whole = [], torch.ops.npu.npu_grouped_matmul_add_
    monkeypatch.setattr(
        main_grad_npu,
        "npu",
        types.SimpleNamespace(npu_grouped_matmul_add_=lambda *args: calls.append(args[0].shape[1]) or whole(*args)),
    )
    into, grad, x = torch.ones(10, 3), torch.randn(7, 10).bfloat16(), torch.randn(7, 3).bfloat16()
    main_grad_npu._add(into, grad, x, -1)
    torch.testing.assert_close(into, 1 + grad.float().t() @ x.float())
    assert calls == [4, 4, 2] and "columns of the weight is 5; valid: 1 to 4" in main_grad_npu._supports(
        into, grad, torch.randn(7, 5).bfloat16(), -1
    )


def test_a_result_may_be_changed_in_place():
    weight = torch.nn.Parameter(torch.randn(3, 4))
    weight.main_grad = torch.zeros(3, 4)
    x = torch.randn(2, 5, 4)
    out = main_grad.linear(x, weight, None)
    out += 1
    out.square().sum().backward()
    expected = torch.autograd.grad((torch.nn.functional.linear(x, weight) + 1).square().sum(), weight)[0]
    torch.testing.assert_close(weight.main_grad, expected)


def test_a_weight_without_main_grad_is_named():
    model = tiny_gpt(layers=1, gradient_accumulation_fusion=True)
    with torch.no_grad():
        model(**batch())  # nothing is accumulated
    with pytest.raises(RuntimeError, match="has no main_grad"):
        model(**batch())


def test_a_product_is_the_same_whether_its_weight_requires_a_gradient():
    """AOTAutograd gives a graph detached weights in some calls and the parameters in others."""
    x, weight = torch.randn(32 * 32).as_strided((32, 1, 32), (32, 1024, 1)), torch.nn.Parameter(torch.randn(64, 32))
    with torch.no_grad():
        for product in (
            lambda w: torch.ops.mindspeed.linear_main_grad(x, w, torch.zeros(64, 32), True, -1),
            lambda w: torch.ops.mindspeed.linear(x, w),
        ):
            assert torch.equal(product(weight), product(weight.detach()))


def test_who_listens_finds_the_gradients_of_all_uses():
    """A weight that is used twice (tied, or in pieces): the buffer holds both gradients when the last is announced."""
    weight = torch.nn.Parameter(torch.randn(6, 4))
    weight.main_grad, seen = torch.zeros(6, 4), []
    gradient_ready.listen(weight, lambda: seen.append(weight.main_grad.clone()))

    def use_twice(x):
        return main_grad.linear(main_grad.linear(x, weight, None)[:, :4].sin(), weight, None)

    x = torch.randn(5, 4, requires_grad=True)
    compiled = torch.compile(use_twice, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    compiled(x).sum().backward()
    plain = weight.detach().clone().requires_grad_()
    ((x @ plain.t())[:, :4].sin() @ plain.t()).sum().backward()
    assert len(seen) == 2 and torch.equal(seen[-1], weight.main_grad)
    torch.testing.assert_close(weight.main_grad, plain.grad)
