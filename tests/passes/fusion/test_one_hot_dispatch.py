"""GShard's products with one-hot masks become scatters and gathers of rows, with gradients to the gate."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.models import double, explain, function_agrees

NAME = "fusion.one_hot_dispatch"
TOKENS, EXPERTS, CAPACITY, HIDDEN = 12, 3, 6, 5


def places(mask, before=0):
    """Where in its expert each token stands, [tokens], and which tokens still fit."""
    order = torch.cumsum(mask, 0) - 1 + before
    kept = mask * (order < CAPACITY)
    return (order * kept).sum(1), kept


def top1(gates):
    mask = F.one_hot(gates.argmax(1), EXPERTS)
    where, kept = places(mask)
    gate = (gates * kept).sum(1)
    combine = (
        gate[:, None, None]
        * kept.to(gates.dtype).unsqueeze(-1)
        * F.one_hot(where, CAPACITY).to(gates.dtype).unsqueeze(1)
    )
    return combine


def top2(gates):
    """GShard and DeepSpeed."""
    mask1 = F.one_hot(gates.argmax(1), num_classes=EXPERTS)
    mask2 = F.one_hot(gates.masked_fill(mask1.bool(), float("-inf")).argmax(1), num_classes=EXPERTS)
    where1, kept1 = places(mask1)
    where2, kept2 = places(mask2, mask1.sum(0, keepdim=True))
    k1, k2 = kept1.to(gates.dtype), kept2.to(gates.dtype)
    g1, g2 = torch.einsum("se,se->s", gates, k1), torch.einsum("se,se->s", gates, k2)
    total = torch.clamp(g1 + g2, min=1e-9)
    c1, c2 = (F.one_hot(w, num_classes=CAPACITY).to(gates.dtype) for w in (where1, where2))
    first = torch.einsum("se,sc->sec", torch.einsum("s,se->se", g1 / total, k1), c1)
    return first + torch.einsum("se,sc->sec", torch.einsum("s,se->se", g2 / total, k2), c2)


def by_choices(gates):
    """As an outside user may write it: all choices at once, places by comparison, so that what does not fit is
    nowhere.
    """
    weight, chosen = gates.topk(2, -1)
    experts = (chosen[..., None] == torch.arange(EXPERTS)).to(gates.dtype)
    order = (experts.flatten(0, 1).cumsum(0).view_as(experts) * experts).sum(-1).long() - 1
    return torch.einsum(
        "sk,ske,skc->sec", weight, experts, (order.unsqueeze(-1) == torch.arange(CAPACITY)).to(gates.dtype)
    )


def summed_choices(gates):
    weight, chosen = gates.topk(2, -1)
    where = torch.arange(TOKENS * 2).view(TOKENS, 2) % CAPACITY
    each = F.one_hot(chosen, EXPERTS).unsqueeze(-1) * F.one_hot(where, CAPACITY).unsqueeze(-2) * weight[..., None, None]
    return each.sum(1)


def kept_by_and(gates):
    """A switch as outside users write it: a token is kept where it has a place *and* that place is in the capacity."""
    gate, chosen = gates.max(-1)
    mask = F.one_hot(chosen, EXPERTS)
    order = (torch.cumsum(mask, 0) - 1) * mask
    kept = (order < CAPACITY) & mask.bool()
    where = (order * kept).sum(-1)
    dispatch = F.one_hot(where, CAPACITY).to(gates.dtype)[:, None, :] * kept[..., None].to(gates.dtype)
    return dispatch * (gate * kept.any(-1))[:, None, None]


GATES = (top1, top2, by_choices, summed_choices, kept_by_and)


def layer(gate, dispatch="sec,sm->ecm", combine="sec,ecm->sm"):
    def run(x, router, experts):
        weights = gate((x @ router).softmax(-1))
        there = torch.einsum(dispatch, weights.bool().to(x.dtype), x)
        return torch.einsum(combine, weights, torch.bmm(there, experts))

    return run


def inputs():
    torch.manual_seed(0)  # were one choice of every token dropped, the gate's gradient would be rounding alone
    return double(TOKENS, HIDDEN), double(HIDDEN, EXPERTS), double(EXPERTS, HIDDEN, HIDDEN)


def products(report):
    return report.counts[NAME], [s.reason for s in report.skipped(NAME)]


@pytest.mark.parametrize(
    "gate", [pytest.param(g, id=g.__name__, marks=() if g in (top2, kept_by_and) else pytest.mark.slow) for g in GATES]
)
def test_dispatch_and_combine(gate):
    report = function_agrees(layer(gate), *inputs())
    assert products(report) == (2, [])


@pytest.mark.parametrize(
    "gate", [pytest.param(g, id=g.__name__, marks=() if g is summed_choices else pytest.mark.slow) for g in GATES]
)
def test_as_matrix_products(gate):
    """As DeepSpeed writes both."""

    def f(x, router, experts):
        weights = gate((x @ router).softmax(-1))
        mask = weights.bool().to(x.dtype)
        there = (mask.reshape(TOKENS, -1).t() @ x).reshape(EXPERTS, CAPACITY, HIDDEN)
        return weights.reshape(TOKENS, -1) @ torch.bmm(there, experts).reshape(-1, HIDDEN)

    assert products(function_agrees(f, *inputs())) == (2, [])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_two_choices_that_meet_in_one_place_are_one(dtype):
    def f(x, first, second, place):
        masks = [F.one_hot(c, EXPERTS).unsqueeze(-1) * F.one_hot(place, CAPACITY).unsqueeze(1) for c in (first, second)]
        return torch.einsum("sec,sm->ecm", (masks[0] + masks[1]).to(dtype).bool().to(x.dtype), x)

    first, place = torch.arange(TOKENS) % EXPERTS, torch.arange(TOKENS) % CAPACITY
    second = first.where(place > 2, (first + 1) % EXPERTS)
    assert products(function_agrees(f, double(TOKENS, HIDDEN), first, second, place)) == (1, [])


def test_matrix_products_with_other_views_stay():
    def f(x, w):
        mask = F.one_hot(torch.arange(TOKENS) % EXPERTS, EXPERTS).to(x.dtype).unsqueeze(-1) * w
        return mask.reshape(TOKENS * EXPERTS // 2, -1) @ x[:4], torch.arange(6.0, dtype=x.dtype).view(2, 3) @ x[:3]

    assert products(function_agrees(f, double(TOKENS, HIDDEN), double(1, 1, 2))) == (0, [])


@pytest.mark.slow
def test_in_generated_code():
    assert products(function_agrees(layer(top2), *inputs(), codegen="inductor")) == (2, [])


def test_terms_that_meet_in_one_place_count_once():
    def f(x, w):
        place, other = torch.arange(TOKENS) % EXPERTS, torch.arange(TOKENS) // 2 % EXPERTS
        mask = sum(
            torch.einsum(
                "se,sc->sec", F.one_hot(e, EXPERTS) * w[:, i : i + 1], F.one_hot(torch.zeros_like(e), 2).to(w.dtype)
            )
            for i, e in enumerate((place, other))
        )
        return torch.einsum("sec,sm->ecm", mask.bool().to(x.dtype), x), torch.einsum("sm,sec->cem", x, mask)

    w = double(TOKENS, 2)
    w.data[3] = torch.tensor([1.0, -1.0])
    assert products(function_agrees(f, double(TOKENS, HIDDEN), w)) == (2, [])


@pytest.mark.slow
def test_groups_and_other_letters():
    def f(x, w, y):
        e, c = torch.arange(TOKENS).view(2, -1) % EXPERTS, torch.arange(TOKENS).view(2, -1) % CAPACITY
        mask = F.one_hot(e, EXPERTS)[..., :, None] * F.one_hot(c, CAPACITY)[..., None, :] * w[..., None, None]
        return (
            torch.einsum("bij,btij->btj", torch.zeros(2, 1, 1, dtype=x.dtype), mask),
            torch.einsum("gsd,gsec->egcd", x, mask),
            torch.einsum("gsec,egcd->gsd", mask, y),
        )

    report = function_agrees(
        f, double(2, TOKENS // 2, HIDDEN), double(2, TOKENS // 2), double(EXPERTS, 2, CAPACITY, HIDDEN)
    )
    assert products(report) == (2, [])


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.sampled_from(GATES),
    st.permutations("ecm"),
    st.booleans(),
    st.sampled_from(["plain", "frozen", "read again"]),
    st.booleans(),
)
def test_variants(gate, order, turned, kind, narrow):
    def f(x, router, experts):
        weights = gate((x @ router).softmax(-1))
        mask = weights.bool().to(x.dtype)
        there = (
            torch.einsum("sm,sec->" + "".join(order), x, mask)
            if turned
            else torch.einsum("sec,sm->" + "".join(order), mask, x)
        )
        there = torch.einsum("".join(order) + "->ecm", there)
        back = torch.einsum(
            "ecm,sec->sm" if turned else "sec,ecm->sm",
            *((there @ experts, weights) if turned else (weights, there @ experts)),
        )
        return (back, weights * 2) if kind == "read again" else back

    x, router, experts = inputs()
    if narrow:
        x, router, experts = (t.detach().bfloat16().requires_grad_() for t in (x, router, experts))
        ours, own = (
            torch.compile(f, backend="mindspeed", options={"codegen": "eager"})(x, router, experts),
            f(x, router, experts),
        )
        for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (ours, own))):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)
        torch._dynamo.reset()
        report = explain(f, x, router, experts)
    else:
        report = function_agrees(f, x if kind != "frozen" else x.detach(), router, experts)
    assert products(report) == (2, [])


def test_what_is_not_read_says_so():
    def f(x, w):
        mask = (F.one_hot(torch.arange(TOKENS) % EXPERTS, EXPERTS).to(x.dtype) + w).unsqueeze(-1) * w.new_ones(
            1, 1, CAPACITY
        )
        return torch.einsum("sec,sm->ecm", mask, x), torch.einsum("sec,sm->ecm", w[..., None] * w[:, None], x)

    count, reasons = products(function_agrees(f, double(TOKENS, HIDDEN), double(TOKENS, EXPERTS)))
    assert count == 0 and len(reasons) == 1 and "made of one-hot vectors" in reasons[0]
