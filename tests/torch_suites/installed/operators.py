"""Every operator of torch's own database, as torch's tests of Inductor run them: compiled and eager, with gradients.

    python -m tests.torch_suites.suite tests/torch_suites/installed operators.py modules.py

The suite puts ours in the place of "aot_eager", and asks that backend where ours fails.
"""

from __future__ import annotations

import unittest
from typing import Any, Callable

import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.torch_suites.installed.comparing import chosen, compare

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
UNDEFINED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
"""Their values are whatever was in memory."""


def check(info: Any, dtype: torch.dtype, backend: Any, inplace: bool = False) -> None:
    """Raises where an operator compiled by ``backend`` is not as it is eager."""
    op: Callable[..., Any] = info.inplace_variant if inplace else info.get_op()
    differentiable = (
        dtype.is_floating_point and info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    )

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return op(x * 1 if inplace else x, *args, **kwargs)  # autograd refuses writes into leaves

    for sample in chosen(info.sample_inputs("cpu", dtype, requires_grad=differentiable)):
        if inplace and (sample.broadcasts_input or sample.input.dtype != dtype):
            continue
        compare(call, (sample.input, *sample.args), sample.kwargs, backend)


class Operators(unittest.TestCase):
    pass


def _add(info: Any, dtype: torch.dtype, inplace: bool) -> None:
    name = "_".join(x for x in (info.name, info.variant_test_name, "inplace" * inplace, str(dtype)[6:]) if x)

    def test(self: unittest.TestCase) -> None:
        check(info, dtype, "aot_eager", inplace)

    setattr(Operators, f"test_{name.replace('.', '_')}", test)


for _info in op_db:
    if _info.name not in UNDEFINED:
        for _dtype in DTYPES:
            if _dtype in _info.supported_dtypes("cpu"):
                _add(_info, _dtype, False)
                if _info.inplace_variant is not None and _dtype == torch.float32:
                    _add(_info, _dtype, True)
