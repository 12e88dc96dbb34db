"""No gradient disappears on npu: in no lowering of a backward operator, on fake npu tensors; and the helper finds lost ones."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gradients import lost, lost_by_lowering
from npu_process import needs_npu, worker


def backward(grad, x):
    return grad * x, grad.sum()


def test_a_lost_gradient_is_found():
    def loses(grad, x):
        return torch.zeros_like(x) * 2, grad.sum()

    def widens(grad, x):
        return (grad * x).double(), grad.sum()

    args = (torch.ones(3), torch.ones(3))
    assert lost_by_lowering(backward, backward, args) == []
    assert lost_by_lowering(loses, backward, args) == ["result 0 does not depend on the incoming gradient"]
    assert "torch.float64" in lost_by_lowering(widens, backward, args)[0]
    gm = make_fx(lambda tangents, x: (x * 2, tangents + x))(*args)
    assert lost(gm, ["tangents"]) == [0]


@needs_npu
def test_every_backward_lowering_keeps_its_gradients():
    found = worker("gradients")
    assert found["problems"] == {}
    assert found["checked"] >= 100 and not found["unchecked"], found
