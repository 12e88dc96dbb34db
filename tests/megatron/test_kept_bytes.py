"""Recomputation and moved attention save what their closed forms say, within 2 %."""

from __future__ import annotations

import pytest

from tests.megatron import kept_bytes

USUAL = ("layer recomputed, eager",)


@pytest.mark.parametrize(
    "row", [row if row in USUAL else pytest.param(row, marks=pytest.mark.slow) for row in kept_bytes.ROWS]
)
def test_bytes_of_a_layer(row):
    counted, closed_form = kept_bytes.ROWS[row]
    assert counted() == pytest.approx(closed_form, rel=0.02)


def test_activation_of_a_layer():
    """The small sibling of the slow cases: one graph of one layer each way."""
    plain, again = (
        kept_bytes._of_model(1, kept_bytes.GRAPH | {"recompute": policy}, {})[0]
        for policy in ("none", "activation_function")
    )
    assert plain - again == pytest.approx(kept_bytes.TOKENS * kept_bytes.WIDTH, rel=0.02)
