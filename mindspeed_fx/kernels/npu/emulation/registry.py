"""CPU kernels of the ``npu::`` operators, from their documented formulas, so that a lowered graph can run without an
NPU.

They show that a graph computes what the model computes: layouts, polarity of masks, scaling, statistics, permutations,
types. They show nothing about the kernels of a device. What the documentation leaves undefined comes out as NaN, so
that a lowering that relies on it fails.

Where torch_npu is imported its own schemas, meta kernels and gradients are used and :func:`register` adds the CPU
kernels; where it is not, :func:`define` makes the operators from the pinned schemas. Then torch_npu can no longer be
imported into the process.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Callable

import torch

from mindspeed_fx.compat import dispatcher
from mindspeed_fx.kernels.npu.schemas import SCHEMAS, TORCH_NPU
from mindspeed_fx.modules import import_all

log = logging.getLogger("mindspeed_fx")


@dataclass(frozen=True)
class Emulation:
    """One ``npu::`` operator on CPU."""

    run: Callable
    fake: Callable
    """Shapes, types and strides as torch_npu's meta kernel has them, or as documented where it has none or a wrong
    one.
    """
    setup: Callable | None
    backward: Callable | None
    """The gradient that torch_npu gives the operator, if it does; without one, gradients vanish here as they do
    there.
    """


EMULATIONS: dict[str, Emulation] = {}

FAKES = ("npu_fusion_attention_v3", "npu_fusion_attention_grad_v3")
"""Operators whose shapes torch_npu gives through ``register_fake``."""

# A registration ends with its library.
_defined: list[torch.library.Library] = []
_registered: list[torch.library.Library] = []
_repairs: list[torch.library.Library] = []


def emulation(
    name: str, fake: Callable, setup: Callable | None = None, backward: Callable | None = None
) -> Callable[[Callable], Callable]:
    """Decorator: the function is ``npu::<name>`` on CPU tensors."""
    assert name in SCHEMAS, f"{name} is not in schemas.py"

    def wrap(run: Callable) -> Callable:
        EMULATIONS[name] = Emulation(run, fake, setup, backward)
        return run

    return wrap


def _load() -> None:
    import_all("mindspeed_fx.kernels.npu.emulation", without="registry")


def present() -> bool:
    """Whether the operators exist in this process, torch_npu's or ours."""
    return hasattr(torch.ops.npu, "npu_rms_norm")


def define() -> None:
    """Make the operators, with CPU kernels, fakes and gradients, unless they exist already."""
    if present():
        return
    _load()
    library = torch.library.Library("npu", "FRAGMENT")
    _defined.append(library)
    for name, schema in SCHEMAS.items():
        result = EMULATIONS[name]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, result.run, "CPU")
        torch.library.register_fake(f"npu::{name}", result.fake, lib=library)
        if result.backward is not None:
            torch.library.register_autograd(f"npu::{name}", result.backward, setup_context=result.setup, lib=library)
    log.info("npu operators are emulated on CPU (schemas of torch_npu %s)", TORCH_NPU)


def register() -> None:
    """CPU kernels for the operators of an imported torch_npu; the operators are made where it is not imported."""
    if _defined or _registered:
        return
    if not present():
        return define()
    _load()
    library = torch.library.Library("npu", "IMPL")
    _registered.append(library)
    for name, result in EMULATIONS.items():
        library.impl(name, result.run, "CPU")


BROKEN = ("npu_geglu_grad",)
"""Meta kernels of torch_npu 2.13 that do not fit their schema: two results where there is one."""


@functools.cache
def repair() -> None:
    """Give torch_npu's operators the meta kernels that are missing or wrong, without which nothing can be traced."""
    if _defined:  # ours, whose fakes are right
        return
    _load()
    library = torch.library.Library("npu", "IMPL")
    _repairs.append(library)
    for name, result in EMULATIONS.items():
        if not hasattr(torch.ops.npu, name):
            continue
        known = dispatcher.has_kernel(f"npu::{name}", "Meta") or name in FAKES
        if name in BROKEN or not known:
            library.impl(name, result.fake, "Meta", allow_override=True)
