import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import double, explain, function_agrees
from tests.transformers_parts import need_grouped_products, need_whole_experts
from tests.zoo import architectures

NAME = "fusion.moe_permute"


def choices(tokens=6, k=2, experts=4):
    return torch.rand(tokens, experts).topk(k)[1]


def reasons(report):
    return [s.reason for s in report.skipped(NAME)]


THERE = {
    "divided": lambda x, order, k: x[order // k],
    "floor": lambda x, order, k: x.index_select(0, torch.div(order, k, rounding_mode="floor")),
    "repeated": lambda x, order, k: x.repeat_interleave(k, 0)[order],
    "torchtitan": lambda x, order, k: torch.gather(x, 0, (order // k).reshape(-1, 1).expand(-1, x.shape[1])),
    "expanded": lambda x, order, k: x.unsqueeze(1).expand(-1, k, -1).reshape(-1, x.shape[1])[order],
}
SORT = {
    "sort": lambda i: i.flatten().sort()[1],
    "argsort": lambda i: i.flatten().argsort(),
    "unstable": lambda i: i.flatten().argsort(stable=False),
    "stable": lambda i: i.flatten().argsort(stable=True),
}


def inverse(order):
    written = torch.empty_like(order)
    written[order] = torch.arange(order.shape[0])
    return written


def written(y, order):
    out = torch.empty_like(y)
    out[order] = y
    return out


BACK = {
    "before": lambda y, p, order, k: (
        (y * p.flatten()[order].unsqueeze(-1))[inverse(order)].view(-1, k, y.shape[1]).sum(1)
    ),
    "after": lambda y, p, order, k: (y[order.argsort()].view(-1, k, y.shape[1]) * p.unsqueeze(-1)).sum(dim=1),
    "scatter": lambda y, p, order, k: (
        (y * p.flatten()[order, None])[torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))]
        .view(-1, k, y.shape[1])
        .sum(-2)
    ),
    "written": lambda y, p, order, k: (p.unsqueeze(-1) * written(y, order).view(*p.shape, -1)).sum(1),
    "added": lambda y, p, order, k: y.new_zeros(p.shape[0], y.shape[1]).index_add(
        0, order // k, y * p.flatten()[order, None]
    ),
    "scattered": lambda y, p, order, k: torch.zeros(p.shape[0], y.shape[1], dtype=y.dtype).scatter_add(
        0, (order // k).unsqueeze(1).expand(-1, y.shape[1]), y * p.flatten()[order].view(-1, 1)
    ),
    "torchtitan": lambda y, p, order, k: (
        (y * p.flatten()[order].reshape(-1, 1))
        .new_zeros(p.shape[0], y.shape[1])
        .scatter_add(0, (order // k).reshape(-1, 1).expand(-1, y.shape[1]), y * p.flatten()[order].reshape(-1, 1))
    ),
    "torchtitan, product": lambda y, p, order, k: torch.bmm(
        p.reshape(-1, 1, k), written(y, order).reshape(-1, k, y.shape[1])
    ).squeeze(1),
    "einsum": lambda y, p, order, k: torch.einsum("tk,tkh->th", p, y[inverse(order)].view(-1, k, y.shape[1])),
    "accumulated": lambda y, p, order, k: torch.zeros(p.shape[0], y.shape[1], dtype=y.dtype).index_put(
        (order // k,), y * p.flatten()[order, None], accumulate=True
    ),
    "alone": lambda y, p, order, k: y[inverse(order)].view(-1, k, y.shape[1]).sum(1) * p.sum(1, keepdim=True),
}


SHARED = {
    "scatter_add": lambda base, y, order, k: base.scatter_add(0, (order // k).reshape(-1, 1).expand(-1, y.shape[1]), y),
    "index_add": lambda base, y, order, k: base.index_add(0, order // k, y),
    "torchtitan, product": lambda base, y, order, k: (
        base + torch.bmm(torch.ones(6, 1, k, dtype=y.dtype), written(y, order).reshape(-1, k, y.shape[1])).squeeze(1)
    ),
    "einsum": lambda base, y, order, k: (
        base + torch.einsum("tk,tkh->th", torch.ones(6, k, dtype=y.dtype), y[inverse(order)].view(-1, k, y.shape[1]))
    ),
    "accumulated": lambda base, y, order, k: base.index_put((order // k,), y, accumulate=True),
}


def test_rows_added_to_what_shared_experts_gave():
    indices = choices()

    def f(x, w):
        order = indices.flatten().argsort(stable=True)
        return tuple(add(x.cos(), THERE["torchtitan"](x, order, 2) @ w, order, 2) for add in SHARED.values())

    report = function_agrees(f, double(6, 3), double(3, 3))
    assert report.counts[NAME] == 2 * len(SHARED) and not report.skipped(NAME), report.skipped(NAME)


def test_zeros_that_are_written_to_are_no_zeros():
    indices = choices()

    def f(x, w):
        order = indices.flatten().argsort(stable=True)
        base = x.new_zeros(6, 3)
        base[0] = 5.0
        return base.index_add(0, order // 2, THERE["torchtitan"](x, order, 2) @ w)

    assert function_agrees(f, double(6, 3), double(3, 3)).counts[NAME] == 2


@pytest.mark.parametrize("order", [
    lambda i: i.argsort(), lambda i: i.argsort(stable=False), lambda i: i.sort(stable=False)[1],
    lambda i: i.sort(stable=None)[1],
])  # fmt: skip
def test_a_sort_that_orders_equal_experts_at_will_goes_with_the_operator(order):
    """Rows there are the operator's, experts' weights are picked by the model's own sort."""
    indices = torch.randint(0, 4, (100,), generator=torch.Generator().manual_seed(0))  # so many that order changes

    def f(x, w):
        by_expert = order(indices)
        rows = x.index_select(0, by_expert // 2) * w[indices[by_expert]]
        return rows[by_expert.argsort()].view(-1, 2, 3).amax(1)  # no sum: the way back stays

    assert function_agrees(f, double(50, 3), double(4, 3)).counts[NAME] == 1


def test_another_order_of_a_sort_says_why():
    report = function_agrees(lambda x: x[(torch.arange(12) * 7 % 5).argsort(stable=True) % 6], double(6, 3))
    assert report.counts[NAME] == 0 and "neither k of each token sorted by expert" in reasons(report)[0]


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(THERE)),
    st.sampled_from(sorted(SORT)),
    st.sampled_from(sorted(BACK)),
    st.integers(1, 3),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_spelling(there, sort, back, k, tokens, frozen):
    torch._dynamo.reset()
    w = double(3, 3)

    def f(x, p, w, indices):
        order = SORT[sort](indices)
        return BACK[back](THERE[there](x, order, k) @ w, p, order, k)

    # One token or one choice leaves nothing to repeat, to divide or to sort by; what is left is as right unfused.
    expected = 2 if k > 1 and tokens > 1 else None
    report = function_agrees(f, double(tokens, 3), double(tokens, k), w.detach() if frozen else w, choices(tokens, k))
    assert expected is None or report.counts[NAME] == expected


def after(report):
    return next(r.after for r in report.graphs[0].runs if r.report.name == NAME)


def test_nothing_is_left_of_the_sort():
    def f(x, p, indices):
        order = SORT["sort"](indices)
        return BACK["before"](THERE["divided"](x, order, 2).sin(), p, order, 2)

    text = after(explain(f, double(6, 3), double(6, 2), choices()))
    assert "mindspeed.moe_unpermute" in text and not any(
        name in text for name in ("aten.sort", "aten.index", "aten.sum")
    )
    assert (
        function_agrees(f, double(6, 3), double(6, 2), choices(), codegen="inductor", enable=[NAME]).counts[NAME] == 2
    )
    torch._dynamo.reset()
    report = function_agrees(f, double(6, 3), double(6, 2), choices(), codegen="inductor")
    assert report.counts[NAME] == 0 and "2 choices per token; on cpu" in report.skipped(NAME)[0].reason


def test_counts_of_a_sorted_list_read_the_list():
    def f(x, indices):
        experts, order = indices.flatten().sort()
        return x[order // 2], torch.histc(experts.float(), bins=3, min=0, max=2)

    x, indices = double(40, 3), torch.randint(0, 3, (40, 2))
    report = explain(f, x, indices)
    assert report.counts[NAME] == 1 and "aten.sort" not in after(report)
    torch._dynamo.reset()
    _, counts = torch.compile(f, backend="mindspeed", options={"codegen": "eager"})(x, indices)
    assert torch.equal(counts, f(x, indices)[1])


def test_an_order_that_is_used_elsewhere_too_is_made_stable():
    def f(x, indices):
        values, order = indices.flatten().sort()
        return x[order // 2], values, order

    x, indices = double(40, 3), torch.randint(0, 3, (40, 2))
    report = explain(f, x, indices)
    assert report.counts[NAME] == 1 and "aten.sort.stable" in after(report)
    torch._dynamo.reset()
    rows, values, order = torch.compile(f, backend="mindspeed", options={"codegen": "eager"})(x, indices)
    assert torch.equal(rows, x[order // 2]) and torch.equal(values, indices.flatten()[order])
    assert torch.equal(order, indices.flatten().sort(stable=True)[1])  # the eager model's may be another


def test_dropped_tokens_are_skipped_with_the_reason():
    report = function_agrees(lambda x, i: x[SORT["sort"](i)[:7] // 2], double(6, 3), choices())
    assert report.counts.get(NAME, 0) == 0 and "only rows 0 to 7" in reasons(report)[0]


def test_another_number_of_choices_is_skipped_with_the_reason():
    report = function_agrees(lambda x, i: x[SORT["sort"](i) // 4], double(6, 3), choices())
    assert report.counts.get(NAME, 0) == 0 and "12 sorted choices are not 4 for each of 6" in reasons(report)[0]


@pytest.mark.parametrize("f", [
    lambda x, i: x[i.flatten()],  # an embedding
    lambda x, i: x[i.flatten().sort(descending=True)[1] // 2],
    lambda x, i: x[i.flatten().sort()[0]],
    lambda x, i: x[i.flatten()].view(6, 2, -1).sum(1),
])  # fmt: skip
def test_other_gathers_are_left_alone(f):
    assert function_agrees(f, double(6, 3), choices()).counts.get(NAME, 0) == 0


def test_a_value_changed_in_place_is_skipped_with_the_reason():
    def f(x, i):
        y = x[SORT["sort"](i) // 2]
        z = y.view(-1)
        z.mul_(2)
        return y + z.view(y.shape)

    report = function_agrees(f, double(6, 3), choices())
    assert report.counts.get(NAME, 0) == 0 and "in place" in reasons(report)[0]


# --------------------------------------------------------------------------- models


def train(model, inputs, compiled=None):
    model.zero_grad(set_to_none=True)
    loss = (model if compiled is None else compiled)(**inputs)["loss"]
    loss.backward()
    return loss.detach().double(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def compiled_and_exact(name, dtype):
    """Loss and gradients of the model in ``dtype`` under mindspeed and eager, and eager in float64 with the same
    weights.
    """
    need_whole_experts()
    if dtype != torch.bfloat16:
        need_grouped_products()
    model, inputs = architectures.build(name)
    model = model.to(dtype)
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # ATen has no grouped product in float64
    ours = train(model, inputs, torch.compile(model, backend="mindspeed", options={"codegen": "eager"}))
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return ours, train(model, inputs), train(exact, inputs)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_model_trains_as_in_eager_mode(name, dtype):
    ours, _, (loss, grads) = compiled_and_exact(name, dtype)
    tolerance = 1e-6 if dtype == torch.float64 else 2e-4  # their norms compute in float32 in float64 models too
    assert (ours[0] - loss).abs() <= tolerance * loss and ours[1].keys() == grads.keys()
    for n, grad in grads.items():
        assert (ours[1][n] - grad).abs().max() <= tolerance * grad.abs().max(), n


def test_bfloat16_is_as_close_to_float64_as_the_unfused_model_is():
    ours, unfused, exact = compiled_and_exact("mixtral", torch.bfloat16)
    error = lambda run: torch.cat([(run[1][n] - g).flatten() for n, g in exact[1].items()]).norm()  # noqa: E731
    assert error(ours) <= 2 * error(unfused)


def test_exact_counts_on_mixtral():
    need_grouped_products()
    import mindspeed_fx

    model, inputs = architectures.build("mixtral")
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        report = mindspeed_fx.explain(model.to(dtype), **inputs, options={"codegen": "eager"})
        assert (report.counts["fusion.grouped_matmul"], report.counts[NAME]) == (4, 4)  # two layers
        assert not reasons(report) and not report.skipped("fusion.grouped_matmul")
