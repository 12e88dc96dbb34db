"""No gradient disappears on npu: in no lowering of a backward operator, on fake npu tensors; and the helper finds lost
ones.
"""

import pathlib
import re

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mindspeed_fx
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.kernels.base import ADOPTED
from mindspeed_fx.kernels.npu.emulation import registry
from tests.ascend.gradients import lost, lost_by_lowering, without_gradient
from tests.ascend.npu_process import needs_npu, worker


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


def test_an_operator_that_gives_no_gradient_is_found():
    ops = torch.ops.mindspeed
    with FakeTensorMode():
        x, rows, classes = torch.randn(2, 4), torch.randn(2), torch.zeros(2, dtype=torch.int64)
        assert without_gradient(ops.rms_norm.default, (x, torch.ones(4), 1e-5, True)) == []
        assert without_gradient(ops.cross_entropy_backward.default, (rows, x, classes, rows, -100, 0.0)) == [
            "grad",
            "logits",
            "lse",
        ]


ON_PURPOSE = {
    "mindspeed.linear_main_grad": ["main_grad", "weight"],  # the weight's gradient is added to main_grad
    "mindspeed.grouped_linear_main_grad": ["main_grads", "weights"],
    "mindspeed.add_to_main_grad": ["grad", "main_grad", "x"],  # which this does
}
"""Operators of Megatron's gradient accumulation: what they give a gradient, they write."""

RAISES_OR_UNUSED = [
    "_npu_moe_token_unpermute",
    "npu_add_layer_norm",
    "npu_add_rms_norm",
    "npu_moe_token_permute_with_routing_map",
]
"""Operators of torch_npu with an autograd kernel that only raises, or whose derivative no lowering needs: they serve
graphs after autograd.
"""


@needs_npu
def test_no_lowering_loses_a_gradient():
    """Every operator with an npu kernel has a case here: of a backward, what its kernel loses; of any other, what
    autograd does not give.
    """
    found = worker("gradients")
    assert found["problems"] == {} and found["none"] == ON_PURPOSE
    assert found["checked"] >= 350 and not found["unchecked"], found
    assert found["derivatives"] == {"only emulated": [], "only torch_npu's": RAISES_OR_UNUSED}


CALLS = re.compile(r"(?:torch\.ops\.|\b)npu\.(_?npu_\w+)")


def test_operators_without_a_derivative_come_after_autograd():
    """What is put into a graph before autograd, by passes or by Megatron's functions, calls torch_npu's operators with
    a derivative alone.
    """
    root, seen = pathlib.Path(mindspeed_fx.__file__).parent, set()
    registry.define()
    for path in (
        *(root / "passes").rglob("*.py"),
        *(root / "capture").rglob("*.py"),
        *(root / "megatron").glob("*.py"),
    ):
        text = path.read_text()
        if re.search(r'stage="(partitioned|cut)"', text) or path.stem.endswith("_npu"):
            continue
        found = set(CALLS.findall(text)) - {"npu_fusion_attention_v2"}
        assert all(registry.EMULATIONS[name].backward is not None for name in found), (path, found)
        seen |= found
    assert "npu_fusion_attention_v3" in seen


def test_every_operator_with_an_npu_kernel_has_a_case():
    """A new kernel without one would be checked by nothing."""
    from mindspeed_fx.planning.verify_device import calls as npu_cases

    seen = {op.default for family in npu_cases.FAMILIES for _, op, *_ in npu_cases.cases(family, torch.bfloat16)}
    missing = [
        o.name for o in (*REGISTRY.values(), *ADOPTED.values()) if "npu" in o.lowerings and o.overload not in seen
    ]
    assert not missing and len(seen) > 50
