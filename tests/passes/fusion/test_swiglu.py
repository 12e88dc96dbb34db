import pytest
import torch
import torch.nn.functional as F

from tests.models import double, function_agrees

NAME = "fusion.swiglu"


TWO = {
    "silu": lambda g, u: F.silu(g) * u,
    "reversed": lambda g, u: u * F.silu(g),
    "sigmoid": lambda g, u: g * torch.sigmoid(g) * u,
    "exponential": lambda g, u: g / (1 + torch.exp(-g)) * u,
    "strided": lambda g, u: F.silu(g.transpose(0, 1)) * u.transpose(0, 1),
}
IN_ONE_GRAPH = {
    "one over": lambda g, u: g * (1 / (torch.exp(-g) + 1)) * u,
    "tanh": lambda g, u: 0.5 * g * (1 + torch.tanh(0.5 * g)) * u,
    "tanh, the half inside": lambda g, u: u * (g * (0.5 * torch.tanh(g / 2) + 0.5)),
    "up in the middle": lambda g, u: g * u * torch.sigmoid(g),
    "up beside sigmoid": lambda g, u: u * torch.sigmoid(g) * g,
    "up over": lambda g, u: g * u / (1 + torch.exp(-g)),
    "1 - sigmoid": lambda g, u: g * (1 - torch.sigmoid(-g)) * u,
    "logarithm": lambda g, u: g * torch.exp(F.logsigmoid(g)) * u,
    "scaled": lambda g, u: 2.0 * F.silu(g) * u,
}
PACKED = {
    "chunk": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "split": lambda x: F.silu(x.split(4, -1)[0]) * x.split(4, -1)[1],
    "slices": lambda x: F.silu(x[..., :4]) * x[..., 4:],
    "narrow": lambda x: F.silu(x.narrow(-1, 0, 4)) * x.narrow(-1, 4, 4),
}


@pytest.mark.parametrize("name", TWO)
def test_two_tensors(name):
    assert function_agrees(TWO[name], double(2, 3, 8), double(2, 3, 8)).counts[NAME] == 1


def test_more_spellings():
    report = function_agrees(
        lambda g, u: tuple(f(g, u) for f in IN_ONE_GRAPH.values()), double(2, 3, 8), double(2, 3, 8)
    )
    assert (
        report.counts[NAME] == len(IN_ONE_GRAPH)
        and report.counts["canonicalize.silu"] == len(IN_ONE_GRAPH) - 1
        and not report.skipped(NAME)
    )


def test_a_silu_by_itself_is_one_operator():
    report = function_agrees(lambda x: x / (1 + torch.exp(-x)) + 1, double(3, 8))
    assert report.counts["canonicalize.silu"] == 1 and report.counts[NAME] == 0


def test_a_sigmoid_cut_off_from_the_gradient_is_no_silu():
    report = function_agrees(lambda x: x * torch.sigmoid(x.detach()), double(3, 8))
    assert report.counts["canonicalize.silu"] == 0


@pytest.mark.parametrize("name", PACKED)
def test_halves_of_one_tensor_use_the_packed_form(name):
    report = function_agrees(PACKED[name], double(3, 8))
    assert report.counts[NAME] == 1
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    call = next(line for line in run.after.splitlines() if "mindspeed.swiglu" in line)
    assert call.count(",") == 1, call  # the type's comma only: one argument


def test_up_before_gate_is_not_packed():
    report = function_agrees(lambda x: x[..., :4] * F.silu(x[..., 4:]), double(3, 8))
    assert report.counts[NAME] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    g, u = (torch.randn(3, 8).to(dtype).requires_grad_() for _ in range(2))
    assert function_agrees(lambda g, u: F.silu(g) * u, g, u, tolerance=2e-2).counts[NAME] == 1
    torch._dynamo.reset()
    assert function_agrees(lambda g, u: F.silu(g.float()).to(g.dtype) * u, g, u, tolerance=2e-2).counts[NAME] == 1


def test_frozen_gate():
    g, u = double(3, 8), double(3, 8)
    assert function_agrees(lambda g, u: F.silu(g) * u, g.detach(), u).counts[NAME] == 1


def test_an_extra_user_of_the_activation():
    assert function_agrees(lambda g, u: (F.silu(g) * u, F.silu(g).sum()), double(3, 8), double(3, 8)).counts[NAME] == 1


@pytest.mark.parametrize(
    "f, reason",
    [
        (lambda g, u: F.silu(g) * u[:1], "different shapes"),
        (lambda g, u: F.silu(g) * u.float(), "goes on in torch.float64"),
    ],
)
def test_near_misses_say_why(f, reason):
    report = function_agrees(f, double(3, 8), double(3, 8), tolerance=1e-6)
    assert report.counts[NAME] == (0 if "shapes" in reason else report.counts[NAME])
    assert report.counts[NAME] == 1 or any(reason in s.reason for s in report.skipped(NAME))


def test_a_gate_alone_is_left():
    assert function_agrees(lambda x, y: F.silu(x) + y, double(3, 8), double(3, 8)).counts[NAME] == 0


def test_pieces_whose_sizes_the_graph_computes():
    def f(x, like):
        gate, up = torch.split(x, [like.shape[0], x.shape[-1] - like.shape[0]], -1)
        return F.silu(gate) * up

    compiled = torch.compile(f, backend="mindspeed", dynamic=True, options={"codegen": "eager"})
    for size in (4, 6):
        x, like = torch.randn(3, 2 * size, dtype=torch.double), torch.randn(size)
        torch.testing.assert_close(compiled(x, like), f(x, like))
