"""The linalg IR of a Triton kernel run on a CPU: the numbers of the very text that ``bishengir-compile`` is given.

It is almost plain MLIR, which torch-mlir brings a compiler and an execution engine for. Two LLVM versions lie between
the two (19 and a newer one), which some edits of the text bridge. Programs run one after the other, so that a race
between them does not show; nor does what the Ascend compiler does after this text. Imported only by a process that has
triton-ascend and torch-mlir.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from typing import Any, Iterator

import torch
from torch_mlir import execution_engine, ir, passmanager

from mindspeed_fx.ascend import frontend
from mindspeed_fx.kernels.triton import tiles
from mindspeed_fx.kernels.triton.launch import launching

_BUFFERS = (
    "builtin.module(convert-elementwise-to-linalg,one-shot-bufferize{allow-unknown-ops=1 "
    "allow-return-allocs-from-loops=1},buffer-deallocation-pipeline,convert-bufferization-to-memref)"
)
_LLVM = (
    "builtin.module(func.func(convert-linalg-to-loops),expand-strided-metadata,lower-affine,convert-scf-to-cf,math-expand-ops,convert-math-to-llvm,convert-math-to-libm,"
    "arith-expand{include-bf16=1},convert-arith-to-llvm,finalize-memref-to-llvm,convert-func-to-llvm,convert-cf-to-llvm,convert-index-to-llvm,reconcile-unrealized-casts)"
)
_SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
_LEADING, _TRAILING = 2, 6
"""What the adapter puts before a kernel's own arguments (a lock, a workspace) and after them (sizes of the grid, the
program).
"""


class _Memory(ctypes.Structure):
    """A memref of one dimension."""

    _fields_ = [(n, ctypes.c_void_p) for n in ("allocated", "aligned")] + [
        (n, ctypes.c_int64) for n in ("offset", "size", "stride")
    ]


class Program:
    """A kernel from its linalg IR.

    Raises:
        ValueError: the text has no kernel.
        RuntimeError: MLIR does not take it (the message names the operation).
    """

    def __init__(self, text: str):
        result = re.search(r"func\.func @(\w+)\((.*?)\) attributes", text, re.S)
        if not result:
            raise ValueError("no kernel in the text")
        self.name, self.types = result[1], re.findall(r"%\w+: (memref<\?x\w+>|\w+)", result[2])
        with ir.Context() as context:
            context.allow_unregistered_dialects = True
            module = ir.Module.parse(_newer(text))
            passmanager.PassManager.parse(_BUFFERS).run(module.operation)
            module = ir.Module.parse(_copies(str(module)))
            passmanager.PassManager.parse(_LLVM).run(module.operation)
            self.engine = execution_engine.ExecutionEngine(module, opt_level=2, shared_libs=[])
        self.function = self.engine.lookup(self.name)

    def run(self, grid: int, args: list[Any]) -> None:
        """Every program of a one-dimensional grid, one after the other, on CPU tensors and numbers, which are written
        in place.
        """
        lock = torch.zeros(64, dtype=torch.int8)
        if len(args) != len(self.types) - _LEADING - _TRAILING:
            raise TypeError(f"{self.name} takes {len(self.types) - _LEADING - _TRAILING} arguments, got {len(args)}")
        for program in range(grid):
            values = [lock, lock, *args, grid, 1, 1, program, 0, 0]
            kept = [_argument(kind, value) for kind, value in zip(self.types, values)]
            self.function((ctypes.c_void_p * len(kept))(*(ctypes.cast(k[0], ctypes.c_void_p) for k in kept)))


def _argument(kind: str, value: Any) -> tuple:
    """A pointer to the value, and what must live as long."""
    if not isinstance(value, torch.Tensor):
        result = _SCALARS[kind](value)
        return ctypes.pointer(result), result
    if value.device.type != "cpu":
        raise TypeError(f"a tensor is on {value.device}")
    memory = _Memory(
        value.data_ptr(),
        value.data_ptr(),
        0,
        value.untyped_storage().nbytes() // value.element_size() - value.storage_offset(),
        1,
    )
    inner = ctypes.pointer(memory)
    return ctypes.pointer(inner), inner, memory


def _newer(text: str) -> str:
    """The spelling of a newer MLIR, and no attributes of dialects it does not have."""

    def tensor(result: re.Match) -> str:
        shape = re.sub(r"^memref<([^,>]*).*$", r"tensor<\1>", result[3])
        return f"bufferization.to_tensor {result[1]}{result[2]} : {result[3]} to {shape}"

    text = re.sub(
        r"bufferization\.to_tensor (%\w+)((?: restrict| writable)*) : (memref<.*>)$", tensor, text, flags=re.M
    )
    text = re.sub(r"\{hivm\.[^}]*\}|\{tt\.[^}]*\}", "", _copies(text))
    return re.sub(r"attributes \{[^\n]*\} \{\n", "attributes {llvm.emit_c_interface} {\n", text, count=1)


def _copies(text: str) -> str:
    """Copies as loops: those of memrefs want a library of MLIR's at run time."""
    return re.sub(
        r"memref\.copy (%\w+), (%\w+) : (memref<.*>) to (memref<.*>)$",
        r"linalg.copy ins(\1 : \3) outs(\2 : \4)",
        text,
        flags=re.M,
    )


@contextlib.contextmanager
def executing(soc: str = "Ascend910B2") -> Iterator[list[str]]:
    """In here launches of Triton kernels on CPU tensors run their linalg IR, with the first tile that would be tried
    for ``soc``; gives the names of the kernels that ran."""
    ran: list[str] = []
    programs: dict[str, Program] = {}

    def run(kernel: Any, grid: int, args: tuple, num_warps: int, constants: dict[str, Any]) -> None:
        constants = {**constants, **tiles.candidates(constants)[0]}
        types, constants = frontend.signature(kernel, args, constants)
        key = repr((kernel.__name__, sorted(types.items()), sorted(constants.items())))
        if key not in programs:
            programs[key] = Program(frontend.lower(kernel, types, constants, soc)[0])
        named = dict(zip(kernel.arg_names, args))
        programs[key].run(grid, [named[n] for n in types])
        ran.append(kernel.__name__)

    with launching(run, for_npu=True):
        yield ran
