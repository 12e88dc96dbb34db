"""The backend as a user meets it."""

import copy
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import mindspeed_fx
from tests.models import LLAMA_COUNTS, Llama, assert_same_training, explain, fusion_counts, gradients, tokens


def test_trains_like_eager_in_float64():
    assert_same_training(Llama().double(), *tokens(), tolerance=2e-6)  # the loss itself is taken in float32


def test_trains_like_eager_within_twice_the_rounding_of_bfloat16():
    exact = Llama().double()
    args = tokens()
    _, truth = gradients(exact, *args)
    eager = copy.deepcopy(exact).bfloat16()
    _, unfused = gradients(eager, *args)
    fused_model = copy.deepcopy(exact).bfloat16()
    compiled = torch.compile(fused_model, backend="mindspeed", options={"codegen": "eager"})
    compiled(*args).backward()
    for name, p in fused_model.named_parameters():
        own, other = ((g.double() - truth[name]).norm() for g in (p.grad, unfused[name]))
        assert own <= 2 * other + 1e-3 * truth[name].norm(), name


def test_exact_counts_on_a_plain_llama():
    assert fusion_counts(explain(Llama(), *tokens())) == LLAMA_COUNTS


@pytest.mark.parametrize("level", [0, 1, 2])
def test_levels_train(level):
    assert_same_training(Llama(), *tokens(), tolerance=2e-5, level=level)


def test_inductor_end_to_end():
    assert_same_training(Llama(layers=1), *tokens(), tolerance=5e-5, codegen="inductor")


def test_disabled_passes_do_not_run():
    report = explain(Llama(), *tokens(), disable=["fusion.r*"])
    assert "fusion.rope" not in report.counts and report.counts["fusion.swiglu"] == 2


def test_frozen_parameters():
    model = Llama()
    for name, p in model.named_parameters():
        p.requires_grad = "norm" not in name and "gate_up" not in name
    assert_same_training(model, *tokens(), tolerance=2e-5)


def test_all_frozen_but_the_norms():
    model = Llama()
    for name, p in model.named_parameters():
        p.requires_grad = "norm" in name
    assert_same_training(model, *tokens(), tolerance=2e-5)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_no_grad_and_inference_mode(codegen):
    model, args = Llama(layers=1), tokens()
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": codegen})
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = compiled(*args)
            assert not out.requires_grad
            torch.testing.assert_close(out, model(*args), rtol=1e-5, atol=1e-5)


def test_training_after_inference_and_back():
    model, args = Llama(layers=1), tokens()
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"})
    with torch.no_grad():
        compiled(*args)
    compiled(*args).backward()
    _, expected = gradients(copy.deepcopy(model), *args)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside):
    model, args = Llama(layers=1), tokens()

    def step(m, *a):
        with torch.autocast("cpu", torch.bfloat16):
            return m(*a)

    def run(m):
        loss = (
            torch.compile(step, backend="mindspeed", options={"codegen": "eager"})(m, *args)
            if inside
            else step(torch.compile(m, backend="mindspeed", options={"codegen": "eager"}), *args)
        )
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in m.named_parameters()}

    loss, grads = run(model)
    other = copy.deepcopy(model)
    other.zero_grad()
    expected = step(other, *args)
    expected.backward()
    assert loss.dtype == expected.dtype and (loss - expected).abs() < 2e-2
    for name, p in other.named_parameters():
        assert grads[name].dtype == p.grad.dtype == torch.float32
        assert (grads[name] - p.grad).norm() <= 5e-2 * p.grad.norm(), name


def test_dynamic_batch_and_sequence_is_one_graph():
    model = Llama(layers=1)
    from mindspeed_fx.report import recorder

    with recorder.collecting() as graphs:
        compiled = torch.compile(model, backend="mindspeed", dynamic=True, options={"codegen": "eager"})
        for shape in ((2, 16), (3, 16), (3, 24), (5, 9)):
            args = tokens(*shape)
            model.zero_grad()
            loss = compiled(*args)
            loss.backward()
            expected, grads = gradients(copy.deepcopy(model), *args)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
            for name, p in model.named_parameters():
                torch.testing.assert_close(
                    p.grad, grads[name], rtol=1e-3, atol=1e-6, msg=lambda m: f"{name} {shape}: {m}"
                )
    assert len(graphs) == 1
    found = {n: c for n, c in graphs[0].counts.items() if n.startswith("fusion.") and c}
    assert found == {
        "fusion.add_rms_norm": 2,
        "fusion.attention": 1,
        "fusion.cross_entropy": 1,
        "fusion.rms_norm": 3,
        "fusion.rope": 2,
        "fusion.swiglu": 1,
    }


def test_several_graphs():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Llama(layers=1), Llama(layers=1)

        def forward(self, ids, labels):
            loss = self.a(ids, labels)
            torch._dynamo.graph_break()
            return loss + self.b(ids, labels)

    report = explain(Broken(), *tokens())
    assert report.graph_count == 2 and len(report.break_reasons) == 1 and "graph_break" in report.break_reasons[0]
    assert report.counts["fusion.attention"] == 2


@pytest.mark.parametrize("codegen", [pytest.param("eager", marks=pytest.mark.slow), "inductor"])
def test_checkpointed_regions_are_fused_and_recomputed(codegen):
    model = Llama(layers=2 if codegen == "eager" else 1)
    model.checkpointed = True
    assert_same_training(model, *tokens(), tolerance=5e-5, codegen=codegen)
    if codegen == "eager":
        torch._dynamo.reset()
        # The last sum of each block leaves its region before the next norm reads it.
        assert fusion_counts(explain(model, *tokens())) == {**LLAMA_COUNTS, "fusion.add_rms_norm": 2}


def test_memory_budget_recomputes():
    model, args = Llama(layers=1), tokens(4, 32)

    def backward_inputs(**options):
        graph = explain(model, *args, **options).graphs[0]
        return graph.stages["backward"].splitlines()[0].count(",")

    assert backward_inputs(memory_budget=0.1) < backward_inputs()


def test_accumulates_over_repeated_calls():
    model, args = Llama(layers=1), tokens()
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"})
    for _ in range(3):
        compiled(*args).backward()
    _, once = gradients(copy.deepcopy(model), *args)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 3 * once[name], rtol=1e-3, atol=1e-6)


def test_a_trace_that_fails_is_hidden_from_nobody_who_asks(monkeypatch):
    """It runs as Dynamo made it, with the reason in the report; under strict and check="each" it is an error."""
    from mindspeed_fx import backend

    def fail(gm):
        raise IndexError("a defect of ours")

    monkeypatch.setattr(backend, "capture", fail)
    x = torch.randn(3)
    for asked in ({}, {"strict": True}, {"check": "each"}):
        torch._dynamo.reset()
        step = torch.compile(torch.sin, backend="mindspeed", options={"codegen": "eager", **asked})
        if not asked:
            assert torch.equal(step(x), x.sin())
            continue
        with pytest.raises(Exception, match=r"the graph cannot be traced .*\(IndexError: a defect of ours\)"):
            step(x)


def test_strict_names_the_reason():
    from mindspeed_fx.passes import PassError

    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8))
    with pytest.raises(
        Exception, match='"fusion.swiglu" was enabled by name and rewrote nothing.*no subgraph looked like it'
    ) as e:
        torch.compile(
            model, backend="mindspeed", options={"codegen": "eager", "strict": True, "enable": ["fusion.swiglu"]}
        )(torch.randn(2, 8))
    assert PassError.__name__ in str(e.value) or isinstance(e.value.__cause__, PassError)
    torch._dynamo.reset()
    torch.compile(model, backend="mindspeed", options={"codegen": "eager", "strict": True, "enable": ["fusion.*"]})(
        torch.randn(2, 8)
    )


def run_python(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env={**os.environ, **env}
    )


def test_the_string_works_without_an_import():
    done = run_python("""
        import sys, torch
        assert "mindspeed_fx" not in sys.modules
        f = torch.compile(lambda x: x * 2, backend="mindspeed", options={"codegen": "eager"})
        assert f(torch.ones(2)).tolist() == [2, 2] and "mindspeed" in torch._dynamo.list_backends()
    """)
    assert done.returncode == 0, done.stderr


REPLACE = """
    import torch
    def dummy_compile(*args, **kwargs):
        return args[0] if args and callable(args[0]) else lambda f: f
    torch.compile = dummy_compile
"""


def test_a_replaced_torch_compile_is_a_loud_error_with_a_way_out():
    done = run_python(REPLACE + "    import mindspeed_fx")
    assert done.returncode == 1
    for words in ("dummy_compile", "silently do nothing", "mindspeed_fx.compile", "MINDSPEED_FX_RESTORE_COMPILE=1"):
        assert words in done.stderr


@pytest.mark.parametrize(
    "way", ["environment", *(pytest.param(way, marks=pytest.mark.slow) for way in ("imported_first", "restored"))]
)
def test_the_ways_out_compile(way):
    check = """
    from mindspeed_fx.report import recorder
    with recorder.collecting() as graphs:
        out = compile(torch.nn.RMSNorm(8), options={"codegen": "eager"})(torch.randn(2, 8))
    assert len(graphs) == 1 and graphs[0].counts["fusion.rms_norm"] == 1
    """
    code = {
        "environment": REPLACE
        + "    import mindspeed_fx\n    compile = lambda m, options: torch.compile(m, backend='mindspeed', "
        "options=options)\n" + check,
        "imported_first": "    import mindspeed_fx\n" + REPLACE + "    compile = mindspeed_fx.compile\n" + check,
        "restored": "    import mindspeed_fx\n"
        + REPLACE
        + "    mindspeed_fx.restore_torch_compile()\n    compile = lambda m, options: torch.compile(model=m, "
        "backend='mindspeed', options=options)\n" + check,
    }[way]
    done = run_python(code, MINDSPEED_FX_RESTORE_COMPILE="1" if way == "environment" else "0")
    assert done.returncode == 0, done.stderr


def test_version_and_lazy_names():
    assert mindspeed_fx.__version__ and mindspeed_fx.passes.registered()
    with pytest.raises(AttributeError, match="no attribute 'pases'"):
        _ = mindspeed_fx.pases


def test_a_step_on_the_meta_device_is_modelled_as_generated_code():
    with torch.device("meta"):
        model = Llama()
    args = [t.to("meta") for t in tokens()]
    report = mindspeed_fx.explain(model, *args, options={"codegen": "inductor", "hardware": "cpu"})
    # generated code on cpu keeps sums apart from their norms
    assert fusion_counts(report) == {k: v for k, v in LLAMA_COUNTS.items() if k != "fusion.add_rms_norm"}
    assert report.effective_options["caches"] == "off: explain is collecting, nothing is generated for the meta device"
