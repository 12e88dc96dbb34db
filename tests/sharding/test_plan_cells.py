"""Every plan of the tables that searches return traces on fake ranks: models x devices x memory (plan_cells).

The usual suite takes a shallow model of each family; the slow one all sixty cells.
"""

from __future__ import annotations

import pytest

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

from benchmarks import plan_cells
from mindspeed_fx.planning.search import traced_plan

SHALLOW = [("llama_8b", 16, {"layers": 2}), ("experts", 32, {"layers": 2})]


def all_trace(cell):
    assert not cell.refused and not cell.failures and not cell.unsupported, cell
    assert cell.traced >= 2 and "ms" in cell.best


@pytest.mark.parametrize("name,devices,sizes", SHALLOW, ids=[name for name, *_ in SHALLOW])
def test_a_table_of_plans_traces(name, devices, sizes):
    all_trace(plan_cells.traced(name, devices, plan_cells.MEMORY[0], **sizes))


def test_what_does_not_trace_is_named(monkeypatch):
    found = []

    def fails(traced, plan, sizes):
        found.append(plan.name)
        return "too odd" if len(found) == 2 else None

    monkeypatch.setattr(traced_plan, "find_failure", fails)
    cell = plan_cells.traced("llama_8b", 8, plan_cells.MEMORY[1], layers=2)
    assert cell.failures == {found[1]: "too odd"} and cell.traced == plan_cells.KEPT - 1


@pytest.mark.slow
@pytest.mark.parametrize("name,devices,memory", plan_cells.CELLS)
def test_sixty_cells(name, devices, memory):
    all_trace(plan_cells.traced(name, devices, memory))


def test_there_are_sixty():
    assert len(plan_cells.CELLS) == 60 and len({c[:2] for c in plan_cells.CELLS}) == 30
