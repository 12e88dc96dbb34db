"""Causal models called as people call them give what they give eager; ``python -m tests.zoo.uses`` tries them all."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs Hugging Face transformers")
from tests.zoo import uses

QUICK = {
    "llama": "embedded+adapted",
    "gpt2": "padded_left+cached+counted",
    "gemma3_text": "packed+frozen",
    "mamba": "evaluated+cached",
    "qwen2": "marked+unlabelled",
}
EMULATED = {
    "cpmant": "padded",  # rows that minus infinity hides whole
    "gpt2": "padded_left+told_all",
    "qwen3_moe": "packed+frozen",
}
READ_ONCE = ("deepseek_v3", "gemma2", "qwen3_next")
MORE = ("bloom", "cohere2", "deepseek_v3", "falcon_h1", "gpt_oss", "lfm2", "mixtral", "qwen3_next", "xglm")
TOGETHER = (
    "padded+cached+told_all",
    "packed+frozen",
    "unlabelled+checkpointed",
    "embedded+counted+adapted",
    "shortened",
    "regrouped",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_use_gives_what_it_gives_eager(name):
    kind, text = uses.compared(name, QUICK[name])
    assert kind == "equal" and len(text) == len("1e-07"), text


@pytest.mark.parametrize("name", EMULATED)
def test_a_use_gives_on_an_emulated_npu_what_it_gives_eager(name):
    kind, text = uses.compared(name, EMULATED[name], {"target": "npu"})
    assert kind == "equal" and len(text) == len("1e-07"), text


@pytest.mark.parametrize("name", READ_ONCE)
def test_layers_that_are_read_once_give_what_they_give_eager(name):
    kind, text = uses.compared(name, f"dropping+{uses.READ_ONCE}")
    assert kind == "equal" and len(text) == len("1e-07"), text


@pytest.mark.slow
@pytest.mark.parametrize("use", TOGETHER)
@pytest.mark.parametrize("name", MORE)
def test_more_uses_of_more_models(name, use):
    kind, text = uses.compared(name, use)
    assert kind in ("equal", "unbuilt"), text


def test_what_differs_is_seen():
    """A gradient that is lost, one that is a little off, and a value that is no number."""
    found = {"0: result 0": torch.tensor([1.0, 2.0]), "0: a": torch.ones(3), "0: b": torch.zeros(3)}
    assert uses.difference(found, dict(found))[0] == 0
    assert uses.difference(found, {n: v for n, v in found.items() if n != "0: b"})[0] == 0  # zeros are no gradient
    assert uses.difference(found, {n: v for n, v in found.items() if n != "0: a"})[0] == float("inf")
    far, what = uses.difference(found, found | {"0: a": torch.tensor([1.0, 1.0, 1.01])})
    assert what == "0: a" and far == pytest.approx(0.01, rel=1e-4)
    assert uses.difference(found, found | {"0: a": torch.tensor([1.0, 1.0, torch.nan])})[0] == float("inf")


@pytest.mark.parametrize("theirs", ["right", "raises"])
def test_what_ours_alone_gives_is_seen(theirs, monkeypatch):
    """Nor does it excuse anything that torch's own backends fail."""

    def compiled(model, backend, **settings):
        def run(**given):
            if backend != "mindspeed" and theirs == "raises":
                raise RuntimeError("theirs")
            result = model(**given)
            result.logits = result.logits * (1.001 if backend == "mindspeed" else 1)
            return result

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    kind, text = uses.compared("gpt2", "evaluated")
    assert kind == "differs" and text.startswith("1e-03 ")
    assert ("aot_eager 0e+00" if theirs == "right" else "aot_eager inf") in text
