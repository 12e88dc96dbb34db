"""Launch scripts made small train compiled as they do eager: three in the fast tier, the others in the slow one."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.megatron.launch import shrink, table

FAST = (
    "ling_v2__pretrain_ling_mini_16b_4k_ptd_A3",
    "qwen3__pretrain_qwen3_1point7b_4K_ptd",
    "system_tests__feature_tests__llama2_layerzero",
)
"""On two ranks, which take seconds: experts, a dense model, and one with a flag to be skipped."""
ROWS = {r["name"]: table.Row(**r) for r in json.loads(table.RESULTS.read_text())}
SCRIPTS = {s.name: s for collection in shrink.COLLECTIONS for s in shrink.scripts(collection)}


def test_the_page_is_the_table():
    assert table.PAGE.read_text() == table.page([ROWS[name] for name in SCRIPTS])


@pytest.mark.parametrize("name", FAST)
def test_a_script_trains_as_its_eager_run_did(name):
    """Against the losses and gradient norms of the eager run that made the table."""
    args, world = shrink.shrink(SCRIPTS[name], "fp32")
    row = table.Row(name, world, eager=ROWS[name].eager)
    row.skipped, row.refused = table.refusals(args)
    assert not row.refused
    assert table.compare(row, table.with_skips(args, row.skipped)).passes, row


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_script_is_equal_or_refused_by_name(name):
    row = table.measure(SCRIPTS[name])
    assert row.passes or row.refused or ROWS[name].error, row
    assert row.passes >= ROWS[name].passes


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name, row in ROWS.items() if row.passes))
def test_sixteen_bits(name):
    """Compiled losses are as near to float32 as twice the eager run's."""
    row = table.measure_narrow(table.Row(**dataclasses.asdict(ROWS[name])), SCRIPTS[name])
    assert not row.narrow or row.narrow_passes, row.narrow
