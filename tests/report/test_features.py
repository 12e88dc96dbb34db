"""docs/features.md: a row for each of MindSpeed's 54 features, 19 operators and 10 profiling flags, with code and a
test that exist."""

import re
from pathlib import Path

import pytest

import mindspeed_fx
from mindspeed_fx.megatron import flags

ROOT = Path(__file__).parents[2]
PACKAGE = Path(mindspeed_fx.__file__).parent
PAGE = (ROOT / "docs" / "features.md").read_text()
STATES = ("works", "Megatron's", "traced", "emulated", "part", "missing")

FEATURES = 54
OPERATORS = """
npu_rms_norm npu_swiglu npu_rotary_position_embedding fusion_attention npu_dropout_add_layer_norm
npu_dropout_add_rms_norm npu_mm_all_reduce_add_rms_norm npu_gmm npu_grouped_mat_mul_all_reduce lcal_coc ffn
npu_moe_token_permute npu_moe_token_unpermute npu_ring_attention_update npu_matmul_add_fp32 npu_groupmatmul_add_fp32
npu_all_to_all_all_gather_bmm npu_bmm_reduce_scatter_all_to_all quant_gmm
""".split()
PROFILE = "--profile -step-start -step-end -level -with-cpu -with-stack -with-memory -record-shapes -save-path -ranks"


def read_table(header: str) -> list[list[str]]:
    """Cells of the table of the page that begins with ``header``."""
    lines = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


FEATURE_ROWS = read_table("| feature | flag or option |")
PROFILE_ROWS = read_table("| flag | sets |")


def test_all_rows_are_there():
    assert len({row[0] for row in FEATURE_ROWS}) == len(FEATURE_ROWS) == FEATURES
    names = [row[0].strip("`") for row in PROFILE_ROWS]
    assert names == [name if name == "--profile" else f"--profile{name}" for name in PROFILE.split()]
    rows = read_table("| MindSpeed | here |")
    assert len(rows) == len(OPERATORS)
    for name, row in zip(OPERATORS, rows, strict=True):
        assert f"`{name}`" in row[0]


@pytest.mark.parametrize("row", [*FEATURE_ROWS, *PROFILE_ROWS], ids=lambda row: row[0].strip("`"))
def test_a_row_names_code_and_a_test_that_exist(row):
    code, test = (cell.strip("`") for cell in row[2:4])
    assert (PACKAGE / code).exists(), code
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    function, _, case = name.partition("[")
    assert "def test_" in text and (not function or f"\ndef {function}(" in text), test
    if case:  # the case is a flag of the table, which names this test as its own
        flag = next(f for f in flags.TABLE if f.name == case.rstrip("]"))
        assert flag.test.endswith(name), flag.test
    assert row[-1].startswith(STATES), row[-1]


def test_a_flag_that_is_refused_is_not_said_to_work():
    """A state that begins "works" needs a flag that is not refused, or another way to it, which the row names."""
    refused = {f.name for f in flags.TABLE} - {f.name for f in flags.TABLE if f.state != "refused"}
    for row in FEATURE_ROWS:
        names = re.findall(r"`(--[a-z0-9-]+)", row[1])
        if names and set(names) <= refused:
            told = "refused" in row[1] or "refused" in row[-1]
            assert told, row[0]


def test_a_flag_that_works_is_not_said_to_be_refused():
    """The other way: none of the flags of a row that is missing, or refused by name, is done."""
    states = {f.name: f.state for f in flags.TABLE}
    for row in FEATURE_ROWS:
        known = [states[name] for name in re.findall(r"`(--[a-z0-9-]+)", row[1]) if name in states]
        if known and (row[-1].startswith("missing") or "refused" in row[-1]):
            assert "refused" in known, row[0]
