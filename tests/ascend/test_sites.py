"""Passes find on npu what they find on cpu, although torch_npu's graphs differ before they are normalized."""

import importlib.util

import pytest

from tests.ascend.npu_process import needs_npu, worker

EXPECTED = {"norms": 3, "hf_qwen3": 6, "hf_mixtral": 8}
"""At least so many different passes rewrite something: equal counts of nothing would prove nothing."""

SLOW = {"llama": 6, "gpt2": 2, "hf_gpt2": 3, "hf_llama": 6, "hf_llama_eager": 6}


def assert_equal_sites(name, names, passes):
    if name.startswith("hf_") and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    names = tuple(n for n in names if not n.startswith("hf_") or importlib.util.find_spec("transformers"))
    found = worker("sites", *names)[name]
    npu, cpu = found["npu:0"], found["cpu"]
    assert npu["counts"] == cpu["counts"] and len(npu["counts"]) >= passes
    assert npu["products"] == cpu["products"] and npu["products"]["backward"] == 2 * npu["products"]["forward"]
    assert not [n for n in npu["opaque"] if n.startswith("aten")]
    assert npu["graphs"] == cpu["graphs"] and npu["without_gradient"] == []
    assert npu["unlowered"] == []


@needs_npu
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_equal_sites_and_products(name):
    assert_equal_sites(name, EXPECTED, EXPECTED[name])


@pytest.mark.slow
@needs_npu
@pytest.mark.parametrize("name", SLOW)
def test_equal_sites_and_products_of_more_models(name):
    assert_equal_sites(name, SLOW, SLOW[name])
