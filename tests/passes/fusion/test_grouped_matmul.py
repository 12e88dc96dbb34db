import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import double, explain, function_agrees
from tests.transformers_parts import need_grouped_products

NAME = "fusion.grouped_matmul"


def ends(*counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def reasons(report):
    return [s.reason for s in report.skipped(NAME)]


def grouped(x, w, o):
    """The call that a graph may hold: ATen's for bfloat16 (its fake kernel knows no other type), else Hugging
    Face's.
    """
    return (
        F.grouped_mm(x, w, offs=o) if x.dtype == torch.bfloat16 else torch.ops.transformers.grouped_mm_fallback(x, w, o)
    )


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("transposed", [True, False])
def test_one_call(dtype, tolerance, transposed):
    if dtype != torch.bfloat16:
        need_grouped_products()
    x, w = (
        torch.randn(24, 16).to(dtype).requires_grad_(),
        torch.randn(4, *((32, 16) if transposed else (16, 32))).to(dtype).requires_grad_(),
    )
    f = lambda x, w, o: grouped(x, w.transpose(1, 2) if transposed else w, o)  # noqa: E731
    assert function_agrees(f, x, w, ends(8, 0, 10, 6), tolerance=tolerance).counts[NAME] == 1


def test_rows_without_a_group_are_zero_where_aten_leaves_them_undefined():
    x, w = torch.randn(8, 16).bfloat16().requires_grad_(), torch.randn(2, 16, 8).bfloat16()
    y = torch.compile(lambda x, w, o: F.grouped_mm(x, w, offs=o), backend="mindspeed", options={"codegen": "eager"})(
        x, w, ends(3, 2)
    )
    y.sum().backward()
    assert y[5:].eq(0).all() and x.grad[5:].eq(0).all() and x.grad[:5].ne(0).any()


def test_the_tail_is_promised_where_the_call_promises_it():
    need_grouped_products()
    for dtype, is_promised in ((torch.bfloat16, False), (torch.float32, True)):
        torch._dynamo.reset()
        report = explain(grouped, torch.randn(8, 16).to(dtype), torch.randn(2, 16, 8).to(dtype), ends(3, 5))
        text = next(r.after for r in report.graphs[0].runs if r.report.name == NAME)
        call = next(line for line in text.splitlines() if "mindspeed.grouped_matmul" in line)
        assert call.endswith(", False)") != is_promised, call


def test_inductor_generates_code_around_it():
    x, w = torch.randn(24, 16).bfloat16().requires_grad_(), torch.randn(4, 32, 16).bfloat16().requires_grad_()
    f = lambda x, w, o: F.relu(F.grouped_mm(x * 2, w.transpose(1, 2), offs=o))  # noqa: E731
    assert function_agrees(f, x, w, ends(8, 0, 10, 6), tolerance=2e-2, codegen="inductor").counts[NAME] == 1


@pytest.mark.parametrize("shapes, offs, why", [
    (((4, 8, 16), (4, 16, 8)), None, "not groups of rows"),
    (((16, 24), (24, 8)), ends(8, 16), "not groups of rows"),
])  # fmt: skip
def test_other_grouped_products_are_skipped_with_the_reason(shapes, offs, why):
    x, w = (torch.randn(*s).bfloat16() for s in shapes)
    x = x if x.dim() == 3 else torch.randn(24, 16).bfloat16().t()
    report = explain(lambda x, w, o: F.grouped_mm(x, w, offs=o), x, w, offs)
    assert report.counts.get(NAME, 0) == 0 and why in reasons(report)[0]


def test_on_cuda_the_call_stays():
    report = explain(
        lambda x, w, o: F.grouped_mm(x, w, offs=o),
        torch.randn(24, 16).bfloat16(),
        torch.randn(2, 16, 8).bfloat16(),
        ends(8, 16),
        target="cuda",
    )
    assert report.counts.get(NAME, 0) == 0 and "itself the kernel on cuda" in reasons(report)[0]


# --------------------------------------------------------------------------- loops


def loop(x, w, sizes, spelling):
    matrices = w.unbind(0) if spelling == "unbind" else [w[i] for i in range(len(sizes))]
    return torch.cat(
        [F.linear(rows, m) if spelling == "linear" else rows @ m for rows, m in zip(x.split(sizes), matrices)]
    )


@pytest.mark.parametrize("spelling", ["linear", "select", "unbind"])
def test_a_loop_over_slices_on_request(spelling):
    w = double(3, 6, 5) if spelling == "linear" else double(3, 5, 6)
    f = lambda x, w: loop(x, w, [2, 0, 4], spelling)  # noqa: E731
    assert function_agrees(f, double(6, 5), w, enable=[NAME]).counts[NAME] == 1


def test_a_loop_over_slices_stays_where_it_is_as_fast():
    report = function_agrees(lambda x, w: loop(x, w, [2, 0, 4], "select"), double(6, 5), double(3, 5, 6))
    assert report.counts.get(NAME, 0) == 0 and "as fast on cpu" in reasons(report)[0]


@pytest.mark.parametrize("f, why", [
    (lambda x, w: torch.cat([x[:2] @ w[0], x[3:] @ w[1]]), "do not cover"),
    (lambda x, w: torch.cat([x[:2] @ w[1], x[2:] @ w[0]]), "in order"),
    (lambda x, w: torch.cat([x[:2] @ w[0], x[2:] @ (w[1] + 1)]), "in order"),
    (lambda x, w: torch.cat([x[:2] @ w[0], x[2:] @ w[1].t()]), "some weights are transposed"),
])  # fmt: skip
def test_other_loops_are_skipped_with_the_reason(f, why):
    report = function_agrees(f, double(6, 5), double(2, 5, 5), enable=[NAME])
    assert report.counts.get(NAME, 0) == 0 and why in reasons(report)[0]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=5).filter(any),
    st.sampled_from(["linear", "select", "unbind"]),
    st.booleans(),
)
def test_any_sizes(sizes, spelling, frozen):
    torch._dynamo.reset()
    x, w = double(sum(sizes), 3), double(len(sizes), 3, 3)
    assert (
        function_agrees(lambda x, w: loop(x, w, sizes, spelling), x, w.detach() if frozen else w, enable=[NAME]).counts[
            NAME
        ]
        == 1
    )
