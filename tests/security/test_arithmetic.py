"""Texts that were run as Python once are read: numbers, names and a few functions, and nothing else."""

from __future__ import annotations

import fractions

import pytest
import sympy
import torch

from mindspeed_fx.cost.arithmetic import evaluate, names_of
from mindspeed_fx.cost.naming import naming
from mindspeed_fx.training import flop_count

ATTACKS = (
    "__import__('os').system('touch {file}')",
    "open('{file}', 'w')",
    'exec(\'open("{file}", "w")\')',
    "(lambda: open('{file}', 'w'))()",
    "[open('{file}', 'w') for x in (1,)]",
    "s0.__class__",
    "Max(open('{file}', 'w'), 1)",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_runs(attack, tmp_path):
    file = tmp_path / "ran"
    text = attack.format(file=file)
    with pytest.raises(ValueError, match="no arithmetic"):
        evaluate(text, {"s0": 2})
    with pytest.raises(ValueError, match="no arithmetic"):
        naming({text: 4})
    with pytest.raises(ValueError, match="no arithmetic"):
        torch.ops.mindspeed.count_flops([torch.ones(1)], [2], "s0", text, "1", "")
    assert not file.exists()


def test_names_of_symbols_run_nothing(tmp_path):
    file = tmp_path / "ran"
    with flop_count.FlopCount() as count:
        torch.ops.mindspeed.count_flops([torch.ones(1)], [2], f"open('{file}')", "6", "8", "")
    assert (count.model, count.hardware) == (6, 8) and not file.exists()


@pytest.mark.parametrize(
    "text", ["9**9**9**9", "2**100000000", "2**s0", "1" * 200_000, "(" * 9000 + ")" * 9000, "", "1/0"]
)
def test_what_would_take_for_ever_is_refused_at_once(text):
    with pytest.raises(ValueError):
        evaluate(text, {"s0": 10**9})


def test_values():
    assert evaluate("2*s0*(s1 + 1) - -3", {"s0": 4, "s1": 7}) == 67
    assert evaluate("s0**2//3 + Mod(s0, 4) + Max(s0, 2, u1) + floor(s0/2)", {"s0": 7, "u1": 9}) == 16 + 3 + 9 + 3
    assert evaluate("123456789012345678901*s0/2", {"s0": 2}) == 123456789012345678901
    assert isinstance(evaluate("1/3", {}), fractions.Fraction)
    b, s = sympy.symbols("b s", positive=True)
    assert evaluate("b*s/2", {"b": b, "s": s}) == b * s / 2 and names_of("Max(b, s*b)") == ["b", "s"]
    assert naming({"b": 3, "4*b": 12, "h/2": 50})(12) == 4 * b


def test_expressions_that_torch_writes_are_read():
    from torch.utils._sympy import functions

    s, t = sympy.symbols("s0 s1", integer=True, positive=True)
    expressions = (
        functions.FloorDiv(s + 5, 2) * t,
        functions.CleanDiv(6 * s, t),
        functions.PythonMod(s, t),
        sympy.Max(s, t) ** 2 + functions.Max(s, t),
        sympy.Rational(3, 2) * s**2 * t,
        functions.FloorDiv(s * t + 63, 64) * 128,
    )
    for expression in expressions:
        value = expression.subs({s: 12, t: 4})
        assert evaluate(str(expression), {"s0": 12, "s1": 4}) == value, expression
