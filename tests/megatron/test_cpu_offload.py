"""``--optimizer-cpu-offload`` where the device is the CPU: the step of AdamW without it."""

import copy

import pytest
import torch


def optimizer_of(parameters, fraction, in_float32=False):
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from mindspeed_fx.megatron.optimizer import Adam

    return HybridDeviceOptimizer(
        list(parameters),
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=Adam,
        param_update_in_fp32=in_float32,
        lr=0.1,
        weight_decay=0.01,
    )


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12.0).view(3, 4).to(model[0].weight.dtype)).float().square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_steps_are_those_without_offload(fraction):
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    reference = copy.deepcopy(model)
    train(model, optimizer_of(model.parameters(), fraction))
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.01))
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert p.requires_grad


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_bfloat16_parameters_are_stepped_in_float32(fraction):
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2)).bfloat16()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = optimizer_of(model.parameters(), fraction, in_float32=True)
    reference = torch.optim.AdamW(masters, lr=0.1, weight_decay=0.01)
    for _ in range(3):
        train(model, optimizer, steps=1)
        for p, master in zip(model.parameters(), masters):
            master.grad = p.grad.float()
        reference.step()
        for p, master in zip(model.parameters(), masters):
            torch.testing.assert_close(p, master.bfloat16(), rtol=0, atol=0)


def test_a_checkpoint_goes_on():
    model = torch.nn.Sequential(torch.nn.Linear(4, 5))
    optimizer = optimizer_of(model.parameters(), 1.0)
    train(model, optimizer)
    other = copy.deepcopy(model)
    loaded = optimizer_of(other.parameters(), 1.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    train(other, loaded)
    torch.testing.assert_close(other[0].weight, model[0].weight, rtol=0, atol=0)
