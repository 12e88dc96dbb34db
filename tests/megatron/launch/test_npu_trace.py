"""Chunks of launch scripts compile for an NPU through torch_npu, on fake tensors: one graph each, every operator
of ours lowered, and no wait of the host but for the counts of rows for experts."""

import json

import pytest

from tests.ascend.npu_process import needs_npu, worker
from tests.megatron.launch import table

FAST = "qwen3__pretrain_qwen3_1point7b_4K_ptd"
SCRIPT = "../megatron/launch/npu_trace.py"
ROWS = json.loads(table.NPU_RESULTS.read_text())


@needs_npu
def test_the_chunk_of_a_first_rank_is_what_the_page_says():
    (rows,) = worker("--first", FAST, script=SCRIPT).values()
    assert rows == [row for row in ROWS[FAST] if row["rank"] == 0]


@needs_npu
@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_chunks_are_what_the_page_says(name):
    (rows,) = worker(name, script=SCRIPT).values()
    assert rows == ROWS[name]


def test_no_row_of_the_page_breaks_or_waits():
    assert len(ROWS) >= 12
    for name, rows in ROWS.items():
        for row in rows:
            assert row["graphs"] == 1 and row["breaks"] == row["unlowered"] == [], name
            assert set(row["waits"]) <= {"aten._local_scalar_dense.default"}, name
            assert any("fusion_attention" in operator for operator in row["npu"]), name
