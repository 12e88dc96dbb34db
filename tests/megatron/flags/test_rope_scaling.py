"""Frequencies of rotations: the logits of a model against formulas written out, and compiled in one graph."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_fx.megatron import rope_scaling
from tests.megatron.flags.layer_effects import LONGROPE
from tests.megatron.flags.values import apply, build_with_parts, logits_by_formula

pytestmark = pytest.mark.usefixtures("on_one_rank")

DIM, LENGTH, LONGEST = 8, 64, 1024
YARN = (
    f"--rope-scaling-type yarn --rope-scaling-original-max-position-embeddings {LENGTH} --beta-fast 4 --beta-slow 1 "
    "--position-embedding-type rope --rope-scaling-mscale 1.3 --rope-scaling-mscale-all-dim 0.7"
)


def plain() -> torch.Tensor:
    return 10000 ** -(torch.arange(0, DIM, 2).double() / DIM)


def yarn() -> tuple[torch.Tensor, float]:
    """Frequencies that turn often stay, those that turn seldom are divided (arXiv 2309.00071, section 3.2)."""
    scale = LONGEST / LENGTH
    bounds = [DIM * math.log(LENGTH / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (4, 1)]
    low, high = math.floor(bounds[0]), math.ceil(bounds[1])
    slow = ((torch.arange(DIM // 2).double() - low) / (high - low)).clamp(0, 1)
    factor = (0.13 * math.log(scale) + 1) / (0.07 * math.log(scale) + 1)
    return plain() / scale * slow + plain() * (1 - slow), factor


def compare(words: str, frequencies: torch.Tensor, factor: float) -> None:
    from tests.megatron.gpt_models import batch

    args, model = build_with_parts(words)
    inputs = {**batch(), "labels": None}
    logits = model(**inputs)
    expected = logits_by_formula(model, args, inputs["input_ids"], frequencies.float(), factor)
    torch.testing.assert_close(logits, expected)
    assert (logits - logits_by_formula(model, args, inputs["input_ids"])).abs().max() > 1e-4
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    torch.testing.assert_close(compiled(**inputs), logits)


@pytest.mark.parametrize("length, divisors", [(128, (1.5, 3.5, 4.5, 9.5)), (32, (1, 1.25, 1.5, 2))])
@pytest.mark.parametrize("given", [False, True])
def test_longrope(length, divisors, given):
    """The long factors beyond the original length, else the short ones."""
    factors = "--long-mscale 1.5 --short-mscale 1.25" if given else ""
    words = (
        f"{LONGROPE} --longrope-freqs-type outer --max-position-embeddings {LONGEST} --seq-length {length} {factors}"
    )
    factor = math.sqrt(1 + math.log(LONGEST / LENGTH) / math.log(LENGTH))
    if given:
        factor = 1.5 if length > LENGTH else 1.25
    compare(words, plain() / torch.tensor(divisors), factor)


def test_a_factor_for_every_frequency():
    args = apply(f"{LONGROPE.replace(',9.5', '')} --max-position-embeddings {LONGEST} --seq-length 128")
    with pytest.raises(ValueError, match="--long-factor has 3 numbers; the rotation has 4 frequencies"):
        rope_scaling.longrope(plain(), args)


def test_yarn_of_plain_attention():
    compare(f"{YARN} --max-position-embeddings {LONGEST}", *yarn())
