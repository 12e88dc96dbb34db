"""A Triton kernel -> linalg IR with triton-ascend, for :mod:`mindspeed_fx.ascend.bishengir`.

Imported only by a process in which ``import triton`` gives triton-ascend 3.2. ``triton.compile`` is not used: its last
stage builds C++ against CANN's headers.
"""

from __future__ import annotations

from typing import Any

import torch
from triton._C.libtriton import ir
from triton.backends.ascend import compiler as ascend
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


class FrontendError(Exception):
    """triton-ascend refused a kernel; the message has the stage and its words."""


def signature(kernel: Any, args: tuple, constants: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """(types of the runtime arguments, constants) by name, as a launch specializes them: integers equal to one are
    constants.
    """
    runtime = dict(zip(kernel.arg_names, args))
    constants = {
        **constants,
        **{n: 1 for n, v in runtime.items() if isinstance(v, int) and not isinstance(v, bool) and v == 1},
    }
    return {n: _type(v) for n, v in runtime.items() if n not in constants}, constants


def lower(kernel: Any, types: dict[str, str], constants: dict[str, Any], soc: str) -> tuple[str, str]:
    """(linalg IR, "aiv" | "aic" | "mix") of a ``@triton.jit`` kernel.

    Raises:
        FrontendError: it does not compile.
    """
    target = GPUTarget("npu", soc, 0)
    backend = make_backend(target)
    options = backend.parse_options({})
    metadata = {"hash": "mindspeed_fx", "target": target, **options.__dict__}
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stage = "triton"
    try:
        source = ASTSource(kernel, signature=dict(types), constants=dict(constants))
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        module = ascend.make_ttir(module, metadata, options)
        stage = "triton-adapter"
        text = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
        text, metadata = ascend._parse_linalg_metadata(text, metadata)
    except Exception as e:
        said = getattr(e, "stderr", None)
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        raise FrontendError(f"{stage}: {(said or f'{type(e).__name__}: {e}').strip()[:500]}") from e
    return text, metadata["mix_mode"]


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i64" if abs(value) >= 2**31 else "i32"
