"""Linear programs by HiGHS, which scipy brings along.

scipy's own door to it, ``optimize.milp``, takes longer around programs of a thousand columns than HiGHS takes to solve
them (1.1 of 1.9 s in a search for DeepSeek-V3 over 609 meshes) and starts every program anew. Where scipy has HiGHS's
classes (1.15 and newer; they are private) these are called instead: a program whose costs alone have changed goes on
from where it was, which halves the iterations. Else ``milp`` it is, with the same optima.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_fx.sharding.plan import ShardingError

RELAXED = {"presolve": False}
"""Of a linear relaxation: presolving these takes several times as long as solving them (measured for DeepSeek-V3 on 512
devices).
"""


def milp() -> Any:
    """scipy's modules ``optimize`` and ``sparse``.

    Raises:
        ShardingError: scipy is missing.
    """
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise ShardingError('the search needs the package scipy: pip install "mindspeed-fx[plans]"') from None
    return optimize, sparse


def classes() -> Any:
    """The module of HiGHS's classes; None where scipy has none."""
    try:
        from scipy.optimize._highspy import _core
    except ImportError:
        return None
    return (
        _core
        if all(hasattr(_core, n) for n in ("_Highs", "HighsLp", "HighsOptions", "HighsModelStatus", "MatrixFormat"))
        else None
    )


class Linear:
    """Least ``cost @ x`` with ``low <= A x <= up`` and ``x >= 0``, for one cost after the other.

    Args:
        rows: (rows, columns, values) of A's entries, each pair once.
        low, up: [rows].
        columns: of A.
    """

    def __init__(self, rows: tuple[Any, Any, Any], low: Any, up: Any, columns: int):
        self._low, self._up = np.asarray(low, dtype=float), np.asarray(up, dtype=float)
        self.matrix = milp()[1].csc_matrix((rows[2], (rows[0], rows[1])), shape=(len(self._low), columns))
        self._core, self._solver = classes(), None

    def minimum(self, cost: Any) -> tuple[float, Any] | None:
        """Optimum and a place of it [columns]; None where nothing satisfies the rows."""
        if self._core is None:
            optimize, _ = milp()
            made = optimize.milp(
                cost,
                constraints=optimize.LinearConstraint(self.matrix, self._low, self._up),
                bounds=optimize.Bounds(0, np.inf),
                options=RELAXED,
            )
            return (float(made.fun), made.x) if made.x is not None else None
        if self._solver is None:
            self._solver = self._made(cost)
        else:
            self._solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), np.asarray(cost, dtype=float))
        self._solver.run()
        if self._solver.getModelStatus() != self._core.HighsModelStatus.kOptimal:
            return None
        return float(self._solver.getInfo().objective_function_value), np.array(self._solver.getSolution().col_value)

    def _made(self, cost: Any) -> Any:
        h, (rows, columns) = self._core, self.matrix.shape
        program = h.HighsLp()
        program.num_col_ = program.a_matrix_.num_col_ = columns
        program.num_row_ = program.a_matrix_.num_row_ = rows
        program.a_matrix_.format_ = h.MatrixFormat.kColwise
        program.col_cost_ = np.asarray(cost, dtype=float)
        program.col_lower_, program.col_upper_ = np.zeros(columns), np.full(columns, np.inf)
        program.row_lower_, program.row_upper_ = self._low, self._up
        program.a_matrix_.start_, program.a_matrix_.index_, program.a_matrix_.value_ = (
            self.matrix.indptr,
            self.matrix.indices,
            self.matrix.data,
        )
        solver, options = h._Highs(), h.HighsOptions()
        options.output_flag, options.presolve = False, "on" if RELAXED["presolve"] else "off"
        solver.passOptions(options)
        solver.passModel(program)
        return solver
