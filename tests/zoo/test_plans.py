"""Cells of the table of architectures under plans; ``python -m tests.zoo.plans`` runs them all."""

import pytest

pytest.importorskip("transformers", reason="needs Hugging Face transformers")
from tests.zoo import plans

QUICK = [("deepseek_v3", "zero1"), ("opt", "hybrid"), ("gpt2", "kv_allgather")]


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
    assert word == "equal", text


@pytest.mark.slow
@pytest.mark.parametrize("name", plans.ARCHITECTURES)
def test_equals_one_device_or_is_refused(name):
    found = {column: plans.cell(name, column) for column in plans.columns(name)}
    assert all(word in ("equal", "refused") for word, _ in found.values()), found
    assert sum(word == "equal" for word, _ in found.values()) >= 4, found
