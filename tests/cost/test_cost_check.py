"""The comparison with published numbers runs, is deterministic, and stays as close as it is."""

import statistics

from benchmarks.cost_check import rows as ROWS


def test_published_numbers_are_met_as_well_as_documented():
    rows = ROWS()
    errors = [
        abs(modelled / published - 1)
        for _, what, published, modelled, unit, _ in rows
        if "gain" not in unit and "*" not in what
    ]
    # The constants are those that whole runs reach; some of these rows are the best that a kernel's authors measured.
    assert len(errors) >= 11 and statistics.median(errors) < 0.31, errors
    assert all(
        abs(modelled / published - 1) < 0.25 for section, _, published, modelled, *_ in rows if "collectives" in section
    )
    gains = {what: (published, modelled) for _, what, published, modelled, unit, _ in rows if "gain" in unit}
    assert (
        all(modelled > 0 for _, modelled in gains.values())
        and max(gains, key=lambda k: gains[k][1]) == max(gains, key=lambda k: gains[k][0]) == "FlashAttention"
    )
