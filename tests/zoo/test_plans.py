"""Cells of the table of architectures under plans; ``python -m tests.zoo.plans`` runs them all."""

import pytest

pytest.importorskip("transformers", reason="needs Hugging Face transformers")
from tests.zoo import plans

QUICK = [("deepseek_v3", "zero2"), ("opt", "hybrid"), ("gpt2", "tp_sp"), ("falcon", "ulysses"), ("vit", "tp_sp")]
WHOLE = {
    ("falcon", "ulysses"): "dimension 1 has 1 elements",
    ("vit", "tp_sp"): "dimension 1 has 17 elements",
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
