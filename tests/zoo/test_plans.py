"""Cells of the table of architectures under plans; ``python -m tests.zoo.plans`` runs them all."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs Hugging Face transformers")
from tests.zoo import planned_uses, plans

QUICK = [("deepseek_v3", "zero2"), ("opt", "hybrid"), ("gpt2", "tp_sp"), ("falcon", "ulysses"), ("vit", "tp_sp")]
WHOLE = {
    ("falcon", "ulysses"): "dimension 1 has 1 elements",
}
"""What stays whole in these cells."""


def test_the_table_is_read_as_it_is_written():
    found = {
        ("gpt2", "tp"): ("refused", "no a|b"),
        ("gpt2", "ring"): ("equal", "1e-15"),
        ("opt", "tp_2d"): ("wrong", "9e-01 (w)"),
    }
    assert plans.read(plans.markdown(found)) == found


@pytest.mark.parametrize("name, column", QUICK)
def test_equals_one_device(name, column):
    word, text = plans.cell(name, column)
    whole = WHOLE.get((name, column), "")
    assert word == ("whole" if whole else "equal") and whole in text, text


@pytest.mark.slow
@pytest.mark.parametrize("name", plans.ARCHITECTURES)
def test_equals_one_device_or_is_refused(name):
    found = {column: plans.cell(name, column) for column in plans.columns(name)}
    assert all(word in ("equal", "whole", "refused") for word, _ in found.values()), found
    assert sum(word in ("equal", "whole") for word, _ in found.values()) >= 8, found


checks_tensors = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch's Dynamo loses the number that torch._check_tensor_all reads in one graph"
)


# what scales tokens by their router's scores, tensors without elements, products of matrices for every token, views of
# what a tensor parallel plan divides, experts of an activation of their own, images of which data say whether they are
# padding, and numbers that are read from tensors
@pytest.mark.parametrize("name, plan", [
    ("llama4_text", "tp_sp"),
    ("deepseek_v4", "hybrid"),
    pytest.param("multimodal/paligemma", "search", marks=checks_tensors),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("llama4_text", "ulysses"),
        ("deepseek_v4", "search"),
        ("deepseek_v32", "hybrid"),
        ("mvp", "tp_sp"),
        ("inkling2_text", "search"),
        ("multimodal/smolvlm", "tp_sp"),
    )),
    pytest.param("multimodal/llama4", "search", marks=[pytest.mark.slow, checks_tensors]),
])  # fmt: skip
def test_architectures_that_are_not_in_the_table(name, plan):
    word, text = planned_uses.compared(name, "plain", plan)
    assert word in ("equal", "whole"), text


@pytest.mark.parametrize("use", ["padded_left+dropping", "embedded+unlabelled"])
def test_uses_under_a_plan(use):
    assert planned_uses.compared("llama", use, "hybrid")[0] == "equal"
