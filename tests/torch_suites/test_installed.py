"""Operators and modules of torch's own databases that passes rewrite, compiled against eager; all of them:
``make test-suites``."""

from __future__ import annotations

import unittest

import pytest
import torch

from mindspeed_fx.backend import mindspeed
from tests.torch_suites.installed import comparing, modules, operators
from tests.torch_suites.suite import asks_inductor

OPERATORS = {i.name: i for i in operators.op_db if not i.variant_test_name}
MODULES = {i.module_cls.__name__: i for i in modules.module_db}


def backend(gm, inputs):
    return mindspeed(gm, inputs, options={"codegen": "eager"})


@pytest.mark.parametrize(
    "dtype, name",
    [
        *((torch.float32, f"nn.functional.{x}") for x in "rms_norm silu scaled_dot_product_attention linear".split()),
        *((torch.bfloat16, f"nn.functional.{x}") for x in "layer_norm gelu cross_entropy embedding".split()),
        *((torch.float64, x) for x in "softmax index_put cumsum roll".split()),
    ],
    ids=lambda x: str(x).rpartition(".")[2],
)
def test_operators(dtype, name):
    operators.check(OPERATORS[name], dtype, backend)


@pytest.mark.parametrize("name", "RMSNorm GroupNorm GRUCell MultiheadAttention Conv1d BatchNorm1d".split())
def test_modules(name):
    modules.check(MODULES[name], torch.float32, True, backend)


def test_databases_are_whole():
    count = sum(name.startswith("test_") for case in (operators.Operators, modules.Modules) for name in vars(case))
    assert count > 3000 and issubclass(operators.Operators, unittest.TestCase)


@pytest.mark.parametrize(
    "check, own",
    [
        ("self.assertEqual(\n    metrics.generated_kernel_count, 1)", True),
        ("_, (code,) = run_and_get_code(f)", True),
        ("self.assertEqual(f(x), y)", False),
        ("with self.assertRaises(RuntimeError):\n    f(code)", False),
    ],
)
@pytest.mark.parametrize("after, own_after", [("torch/testing/a.py", True), ("mindspeed_fx/backend.py", False)])
def test_a_check_of_generated_code_is_told_from_one_of_values(tmp_path, check, own, after, own_after):
    """By the statement that failed, whatever lines it has, and by what ran in it."""
    file = tmp_path / "test_x.py"
    file.write_text(f"import a\n{check}\n")
    text = f'  File "{file}", line 2, in test\n    ...\n  File "/lib/{after}", line 5, in f\nAssertionError: no'
    assert asks_inductor({"text": text}) == (own and own_after)


@pytest.mark.parametrize("spoil", [lambda x: x * 1.001, lambda x: x.detach() + 0 * x.sum().detach()])
def test_a_wrong_value_or_gradient_fails(spoil):
    """Values off by a thousandth; values right and no gradient."""

    def wrong(gm, inputs):
        return lambda *args: tuple(spoil(x) for x in gm(*args))

    with pytest.raises((AssertionError, RuntimeError)):
        operators.check(OPERATORS["nn.functional.linear"], torch.float32, wrong)


def test_results_of_rounding_alone_are_measured_by_float64():
    def rounding(x):
        return (x + 1e4) - 1e4 - x

    def times(factor, more=0.0):
        return lambda gm, inputs: lambda *args: tuple(factor * y + more for y in gm(*args))

    x = torch.linspace(0.1, 1, 7)
    comparing.compare(rounding, (x,), {}, times(0.9))
    with pytest.raises(AssertionError):
        comparing.compare(rounding, (x,), {}, times(1.0, 0.05))
