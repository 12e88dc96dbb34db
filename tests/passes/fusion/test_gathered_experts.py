import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import double, function_agrees
from tests.zoo import architectures

NAME = "fusion.gathered_experts"


SPELLINGS = {
    "column": lambda x, w, e: torch.bmm(w.transpose(1, 2)[e], x.unsqueeze(-1)).squeeze(-1),
    "row": lambda x, w, e: torch.bmm(x.unsqueeze(1), w[e]).squeeze(1),
    "matmul": lambda x, w, e: (x[:, None] @ w.index_select(0, e))[:, 0],
    "view": lambda x, w, e: torch.bmm(x.view(x.shape[0], 1, -1), w[e]).flatten(1),
}


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(SPELLINGS)),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(3, 7),
    st.booleans(),
    st.booleans(),
)
def test_every_spelling(spelling, tokens, k, experts, need_x, need_weight):
    torch._dynamo.reset()
    x, w = (
        double(tokens * k, 4).detach().requires_grad_(need_x),
        double(experts, 4, 3).detach().requires_grad_(need_weight),
    )
    f = lambda x, w, scores: SPELLINGS[spelling](x, w, scores.topk(k)[1].reshape(-1))  # noqa: E731
    assert function_agrees(f, x, w, torch.rand(tokens, experts)).counts[NAME] == 1


@pytest.mark.parametrize("numbers", ["argmax", "clamp", "max", "cat", "concat"])
def test_other_numbers_that_are_never_negative(numbers):
    choose = {
        "argmax": lambda scores: scores.argmax(1),
        "max": lambda scores: scores.max(1)[1],
        "concat": lambda scores: torch.concat((scores[:2].argmax(1), scores[2:].min(1)[1])),
        "cat": lambda scores: torch.cat((scores[:2].max(1, keepdim=True)[1], scores[2:].argmax(1, True)))[:, 0],
        "clamp": lambda scores: (scores * 9).long().sum(1).clamp(0, 3),
    }[numbers]
    f = lambda x, w, scores: SPELLINGS["row"](x, w, choose(scores))  # noqa: E731
    # as many experts as a row has neither elements nor results
    assert function_agrees(f, double(6, 5), double(4, 5, 3), torch.rand(6, 4)).counts[NAME] == 1


def test_numbers_that_may_be_negative_are_skipped_with_the_reason():
    report = function_agrees(SPELLINGS["row"], double(6, 4), double(4, 4, 3), torch.tensor([0, -1, 3, 2, -4, 0]))
    assert report.counts.get(NAME, 0) == 0 and "may be negative" in report.skipped(NAME)[0].reason


def test_other_batched_products_are_left_alone():
    f = lambda x, w, scores: torch.bmm(x, w[scores.topk(2)[1].reshape(-1)])  # noqa: E731
    report = function_agrees(f, double(6, 5, 4), double(4, 4, 3), torch.rand(3, 4))
    assert report.counts.get(NAME, 0) == 0 and not report.skipped(NAME)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_model_trains_as_in_eager_mode_and_gathers_no_weight(name):
    pytest.importorskip("transformers", reason="needs Hugging Face transformers")
    import mindspeed_fx

    model, inputs = architectures.build(name)
    model = model.double()
    model.set_experts_implementation("batched_mm")
    runs = []
    for call in (model, torch.compile(model, backend="mindspeed", options={"codegen": "eager"})):
        model.zero_grad(set_to_none=True)
        loss = call(**inputs)["loss"]
        loss.backward()
        runs.append({"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    assert runs[0].keys() == runs[1].keys()
    for n, expected in runs[0].items():
        assert (runs[1][n] - expected).abs().max() <= 1e-6 * expected.abs().max(), (
            n
        )  # the model's norms compute in float32
    torch._dynamo.reset()
    assert (
        mindspeed_fx.explain(model, **inputs, options={"codegen": "eager"}).counts[NAME] == 4
    )  # two in each of two layers


def test_sizes_that_change_compile_once():
    def f(x, w, scores):
        experts = scores.topk(2)[1].reshape(-1)
        return (
            torch.bmm(w.transpose(1, 2)[experts], x.repeat_interleave(2, 0).unsqueeze(-1))
            .view(x.shape[0], 2, -1)
            .sum(1)
        )

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(
        f,
        backend="mindspeed",
        fullgraph=True,
        dynamic=True,
        options={"codegen": "eager", "enable": [NAME], "strict": True},
    )
    w = double(4, 4, 3)
    for tokens in (6, 5, 9):
        x, scores = double(tokens, 4), torch.rand(tokens, 4)
        grads = [torch.autograd.grad(g(x, w, scores).pow(2).sum(), (x, w)) for g in (f, compiled)]
        torch.testing.assert_close(*grads)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
