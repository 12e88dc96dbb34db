"""Linear and cross-entropy fused where the vocabulary is divided: a rank's logits exist a chunk at a time, and the loss
and every gradient are those of one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_fx.kernels import linear_logsumexp
from mindspeed_fx.planning.simulate import simulate
from tests.sharding.llama import Llama

OPTIONS = {"codegen": "eager", "strict": True, "enable": ["fusion.linear_cross_entropy"]}
ops = torch.ops.mindspeed


@pytest.fixture(autouse=True)
def two_tokens(monkeypatch):
    """Chunks of two tokens of 32 classes in float64."""
    for name in ("CHUNK", "BLOCK"):
        monkeypatch.setattr(linear_logsumexp, name, 2 * 32 * 8)


def alike(model, mesh, plan, *args, tolerance=1e-10):
    loss = model(*args)
    loss.backward()
    result = simulate(model, mesh, plan, *args, options=OPTIONS)
    assert (result.outputs[0] if isinstance(result.outputs, tuple) else result.outputs).sub(
        loss
    ).abs() <= tolerance * loss.abs()
    expected = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert result.gradients.keys() == expected.keys(), "a gradient appeared or disappeared"
    for name, gradient in expected.items():
        assert (
            gradient.abs().max() > 0
            and (result.gradients[name] - gradient).abs().max() <= tolerance * gradient.abs().max()
        ), name
    return result


class Head(nn.Module):
    """An embedding and a head of as many classes, and all that a loss can have."""

    def __init__(self, bias=True, reduction="mean", smoothing=0.0, z=0.0, softcap=0.0, frozen=False):
        super().__init__()
        self.embed, self.q_proj, self.o_proj, self.head = (
            nn.Embedding(64, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 64, bias=bias),
        )
        self.settings, self.z, self.softcap = {"reduction": reduction, "label_smoothing": smoothing}, z, softcap
        self.head.weight.requires_grad_(not frozen)

    def forward(self, ids, labels):
        logits = self.head(self.o_proj(self.q_proj(self.embed(ids)).tanh())).flatten(0, 1)
        logits = self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits
        loss = F.cross_entropy(logits, labels.flatten(), **self.settings)
        if not self.z:
            return loss
        counts = (labels.flatten() != -100).to(logits.dtype)
        return loss + self.z * (logits.logsumexp(-1).square() * counts).sum() / counts.sum()


def batch(rows=2, seq=5, ignored=True):
    ids, labels = torch.randint(0, 64, (rows, seq)), torch.randint(0, 64, (rows, seq))
    labels[0, :2] = -100 if ignored else 3
    return ids, labels


@pytest.mark.parametrize(
    "settings, dtype, mesh",
    [
        ({"smoothing": 0.1, "softcap": 2.0, "z": 0.1}, torch.double, {"tp": 2}),
        pytest.param({"bias": False}, torch.double, {"tp": 4}, marks=pytest.mark.slow),
        pytest.param({"reduction": "sum", "smoothing": 0.1}, torch.double, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"z": 0.1, "frozen": True}, torch.double, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"smoothing": 0.2, "z": 0.01}, torch.float32, {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients(settings, dtype, mesh):
    alike(Head(**settings).to(dtype), mesh, "tp", *batch(), tolerance=1e-10 if dtype == torch.double else 1e-5)


def test_a_llama_divided_by_sequence_too():
    result = alike(Llama(layers=1).double(), {"tp": 2}, "tp_sp", *batch(4, 6))
    # as with whole logits: two reductions of numbers a token, and one gradient of the head's input, scattered
    assert (
        result.forward["all_reduce"] == 2
        and result.backward["reduce_scatter_tensor"] == 3
        and result.backward["all_reduce"] == 3
    )


def test_a_llama_divided_by_width_too():
    """Its norms are of rows of which a rank has a part."""
    alike(Llama(layers=1).double(), {"tp_x": 2, "tp_y": 2}, "tp_2d", *batch(4, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, mesh",
    [("zero2+tp", {"dp": 2, "tp": 2}), ("zero3+tp_sp", {"dp": 2, "tp": 2}), ("tp_2d", {"tp_x": 2, "tp_y": 2})],
)
def test_beside_other_dimensions(plan, mesh):
    alike(Llama(layers=1).double(), mesh, plan, *batch(4, 6))


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))]
        )
        return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_never_exist_whole(dtype):
    """40 tokens of 32 classes: never more than a chunk, or a gradient of an input, and the values of whole logits."""
    x, w, b = (torch.randn(*s, dtype=torch.float64).to(dtype).requires_grad_() for s in ((40, 8), (32, 8), (32,)))
    target = torch.randint(-2, 32, (40,))
    with Largest() as seen:
        lse, picked, sums = ops.linear_logsumexp(x, w, b, target, 0.0, True)
        grads = torch.autograd.grad((lse * 0.3 - picked + 0.1 * sums).sum(), (x, w, b))
    assert 2 * 32 <= seen.elements <= max(40 * 8, 4 * 32) < 40 * 32
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    logits = F.linear(*wide)
    own, counts = (target >= 0).double(), (target != -2).double()
    want = (
        0.3 * logits.logsumexp(-1) * counts
        - logits.gather(1, target.clamp(min=0)[:, None])[:, 0] * own
        + 0.1 * logits.sum(-1) * counts
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for have, truth in zip(
        (0.3 * lse - picked + 0.1 * sums, *grads), (want, *torch.autograd.grad(want.sum(), wide)), strict=True
    ):
        assert (have.double() - truth).abs().max() <= tolerance * truth.abs().max()


@pytest.mark.parametrize("target", [32, -3])
def test_targets_that_are_no_class(target):
    with pytest.raises(IndexError, match="out of bounds"):
        ops.linear_logsumexp(torch.randn(2, 8), torch.randn(32, 8), None, torch.tensor([1, target]), 0.0, False)


def test_a_target_that_no_rank_has():
    ids, labels = batch()
    labels[1, 1] = 64
    with pytest.raises(Exception, match="out of bounds"):
        simulate(Head().double(), {"tp": 2}, "tp", ids, labels, options=OPTIONS)
