"""Linear programs by HiGHS through highspy.

``scipy.optimize.milp`` takes longer around programs of a thousand columns than HiGHS takes to solve them (1.1 of 1.9 s
in a search for DeepSeek-V3 over 609 meshes) and starts every program anew; here a program whose costs alone have
changed goes on from where it was, which halves the iterations.
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
    """scipy's modules ``optimize`` and ``sparse``, of which highspy needs a matrix.

    Raises:
        ShardingError: scipy or highspy is missing.
    """
    try:
        import highspy  # noqa: F401
        from scipy import optimize, sparse
    except ImportError as error:
        raise ShardingError(f'the search needs the package {error.name}: pip install "mindspeed-fx[plans]"') from None
    return optimize, sparse


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
        self._solver: Any = None

    def minimum(self, cost: Any) -> tuple[float, Any] | None:
        """Optimum and a place of it [columns]; None where nothing satisfies the rows."""
        import highspy

        if self._solver is None:
            self._solver = self._build_solver(cost)
        else:
            self._solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), np.asarray(cost, dtype=float))
        self._solver.run()
        if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return float(self._solver.getInfo().objective_function_value), np.array(self._solver.getSolution().col_value)

    def _build_solver(self, cost: Any) -> Any:
        import highspy

        rows, columns = self.matrix.shape
        program = highspy.HighsLp()
        program.num_col_ = program.a_matrix_.num_col_ = columns
        program.num_row_ = program.a_matrix_.num_row_ = rows
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.col_cost_ = np.asarray(cost, dtype=float)
        program.col_lower_, program.col_upper_ = np.zeros(columns), np.full(columns, np.inf)
        program.row_lower_, program.row_upper_ = self._low, self._up
        program.a_matrix_.start_, program.a_matrix_.index_ = self.matrix.indptr, self.matrix.indices
        program.a_matrix_.value_ = self.matrix.data
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("presolve", "on" if RELAXED["presolve"] else "off")
        solver.passModel(program)
        return solver
