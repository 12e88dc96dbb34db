"""What the dispatcher has: kernels of operators, oneDNN, and operators that torch defines on import."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@functools.cache
def onednn_beats_blas() -> bool:
    """True where oneDNN is present and torch's BLAS is MKL on a processor that is not Intel's."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if not torch.backends.mkl.is_available():
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return "GenuineIntel" not in file.read(4096)
    except OSError:
        return False


@functools.cache
def multiplies_narrow(dtype: torch.dtype) -> bool:
    """Whether oneDNN has matrix products of bfloat16 or float16 for this processor: AVX-512, AMX or another vendor's
    instructions. ATen's products then run on them."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    ask = getattr(torch.ops.mkldnn, name, None)
    return torch.backends.mkldnn.is_available() and ask is not None and ask()


@functools.cache
def multiplies_pairs() -> bool:
    """Whether this processor multiplies pairs of bfloat16 and adds both products to a float32 (AVX512_BF16), and ATen
    may use it."""
    ask = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return ask is not None and ask() and torch.backends.cpu.get_cpu_capability() == "AVX512"


@functools.cache
def multiplies_tiles(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies whole tiles of bfloat16 or float16 (AMX), as oneDNN's products do there unless
    ``ONEDNN_MAX_CPU_ISA`` keeps them from it."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    name = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}[dtype]
    ask = getattr(torch.cpu, name, None)
    return ask is not None and ask() and (most == "DEFAULT" or "AMX" in most)


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether a CUDA device of this machine multiplies 8-bit floats: those from sm_89 on do."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def adds_narrow_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``torch.addmm(..., out_dtype=torch.float32)`` adds a product of 16-bit matrices to float32 ones in their
    place, found out by doing so once; it is asked on cuda alone."""
    if device.type != "cuda":
        return False
    x, into = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(into, x.t(), x, out_dtype=torch.float32, alpha=0.5, out=into)
    except (RuntimeError, TypeError):
        return False
    return bool((into == 9).all())


def asserts_async(device: torch.device) -> bool:
    """Whether ``torch._assert_async`` stops ``device`` without the host's waiting for it."""
    key = {"cuda": "CUDA", "npu": "PrivateUse1"}.get(device.type)
    return key is not None and has_kernel("aten::_assert_async.msg", key)


def has_kernel(operator: str, key: str) -> bool:
    """Whether ``operator``, as in "aten::mm", has a kernel of its own for a dispatch key, as in "Meta"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def varlen_attention_of_torch() -> Any:
    """The operator behind ``torch.nn.attention.varlen.varlen_attn``; None where this torch has none or it was not
    imported.
    """
    operator = getattr(getattr(torch.ops, "torch_attn", None), "_varlen_attn", None)
    return getattr(operator, "default", None)


def is_computing_again() -> bool:
    """Whether a backward runs, and what is called now is a forward: it is recorded for another backward, or called by
    the backward of torch's or Megatron's CheckpointFunction (whose own backward has nodes of its own).
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    node = torch._C._current_autograd_node()
    return torch.is_grad_enabled() or (node is not None and node.name() == "CheckpointFunctionBackward")


class Watch(TorchDispatchMode):
    """Inside, ``told(function, arguments, keywords, result)`` is called for every operator that runs."""

    def __init__(self, told: Callable[[Any, tuple, dict, Any], None]) -> None:
        super().__init__()
        self.told = told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.told(func, args, kwargs or {}, result)
        return result
