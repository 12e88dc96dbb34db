"""Every module of torch's own database: compiled against eager, with gradients of inputs and parameters, in training
and evaluation; see operators.py."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db

from tests.torch_suites.installed.comparing import chosen, compare

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def check(info: Any, dtype: torch.dtype, training: bool, backend: Any) -> None:
    """Raises where a module compiled by ``backend`` is not as it is eager."""
    inputs = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training)
    for x in chosen(inputs):
        if x.forward_input is not None:
            made = x.constructor_input
            torch.manual_seed(0)
            module = info.module_cls(*made.args, **made.kwargs).to("cpu", dtype).train(training)
            compare(module, x.forward_input.args, x.forward_input.kwargs, backend)


class Modules(unittest.TestCase):
    pass


def _add(info: Any, dtype: torch.dtype, training: bool) -> None:
    def test(self: unittest.TestCase) -> None:
        check(info, dtype, training, "aot_eager")

    mode = "train" if training else "eval"
    setattr(Modules, f"test_{info.name.replace('.', '_')}_{mode}_{str(dtype)[6:]}", test)


for _info in module_db:
    for _dtype in DTYPES:
        if _dtype in _info.dtypes:
            for _training in (True, False):
                _add(_info, _dtype, _training)
