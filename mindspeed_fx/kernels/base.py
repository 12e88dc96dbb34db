"""What an operator is: a schema in the ``mindspeed::`` namespace, a reference, a gradient, and a kernel per target.

Forward and backward are two explicit operators, so that a fused backward survives AOTAutograd and no target's missing
autograd can drop a gradient. An operator file calls :func:`operator` for each of the two and
``torch.library.register_autograd`` to tie them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import register_flop_formula

from mindspeed_fx.arguments import check_bool, check_callable, check_text, refuse
from mindspeed_fx.cost.operators import Cost, spec
from mindspeed_fx.cost.read import register_operators
from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.options import TARGETS

LIBRARY = torch.library.Library("mindspeed", "FRAGMENT")


@dataclass(frozen=True)
class Lowering:
    """One way to run an operator on one target."""

    kernel: str
    """What runs, as reports show it, e.g. "aten flash attention"."""
    build: Callable[..., Any]
    """Plain torch function with the operator's signature; its trace replaces the operator's node."""
    supports: Callable[..., str | None]
    """Called with the node's fake arguments; None when this kernel can run them, else the reason it cannot."""
    beats_codegen: bool = True
    """Better than the code that Inductor generates from the reference, which fuses with its neighbours; if not, the
    kernel serves only where no code is generated."""


@dataclass
class Operator:
    """One ``mindspeed::`` operator, forward or backward."""

    overload: torch._ops.OpOverload
    reference: Callable[..., Any]
    """The definition in plain torch: what runs where no target has a better kernel."""
    opaque: bool = False
    """The reference is itself a kernel: it runs as one call and is never inlined."""
    cost: Callable[..., Cost] | None = None
    """FLOP and bytes: see :meth:`costs`."""
    sharding: Callable[..., list] | None = None
    """How it is computed part by part: see :mod:`mindspeed_fx.kernels.sharding`."""
    parts: Callable[..., list[tuple[str, list]]] | None = None
    """Kernels that the reference launches on an accelerator, from its arguments: names in ``kernels.triton.PARTS``, and
    theirs.
    """
    lowerings: dict[str, list[Lowering]] = field(default_factory=dict)
    """Target -> kernels in order of preference; the reference comes last, unnamed."""

    @property
    def name(self) -> str:
        return str(self.overload).removesuffix(".default")

    def costs(self, formula: Callable[..., Cost]) -> Callable[..., Cost]:
        """Decorator: ``formula(out, *arguments)`` is the operator's cost; it takes the results and the operator's
        arguments with a :class:`mindspeed_fx.cost.operators.Spec` for each tensor, and computes with sizes by
        arithmetic alone, since they may be symbols. torch's FLOP counter counts its ``flops`` too."""
        self.cost = formula

        @register_flop_formula(self.overload.overloadpacket, get_raw=True)
        def flops(*args: Any, out_val: Any, **kwargs: Any) -> Any:
            out, args, kwargs = pytree.tree_map(
                lambda x: spec(x) if isinstance(x, torch.Tensor) else x, (out_val, args, kwargs)
            )
            return formula(out, *args, **kwargs).flops

        return formula

    def shard(self, rule: Callable[..., list]) -> Callable[..., list]:
        """Decorator: the function is the operator's sharding rule; it takes the operator's arguments."""
        self.sharding = rule
        return rule

    def lower(self, target: str) -> Callable[..., Callable[[Callable], Callable]]:
        """Decorator: the function is a kernel for ``target``; ``lower.supports`` is set by the caller."""

        if target not in TARGETS[1:]:
            valid = ", ".join(TARGETS[1:])
            refuse("lower", "target", target, f"valid: {valid}{nearest(str(target), TARGETS[1:])}")

        def add(
            kernel: str, supports: Callable[..., str | None], beats_codegen: bool = True
        ) -> Callable[[Callable], Callable]:
            check_text("lower", "kernel", kernel, "what runs, in a few words, is expected")
            check_callable("lower", "supports", supports)

            def wrap(build: Callable) -> Callable:
                check_callable("lower", "build", build)
                self.lowerings.setdefault(target, []).append(Lowering(kernel, build, supports, beats_codegen))
                return build

            return wrap

        return add

    def choose(
        self, target: str, args: tuple, kwargs: dict, codegen: bool = False
    ) -> tuple[Lowering | None, list[str]]:
        """The first kernel of ``target`` that supports these fake arguments, and why the ones before it do not.

        With ``codegen`` the alternative is generated code, and only kernels that beat it are taken.
        """
        reasons: list[str] = []
        for lowering in self.lowerings.get(target, ()):
            reason = lowering.supports(*args, **kwargs)
            if reason is None and codegen and not lowering.beats_codegen:
                # The same kernel may stand before it, for arguments with which it beats generated code.
                if any(said.startswith(f"{lowering.kernel}: ") for said in reasons):
                    continue
                reason = "generated code fuses with its neighbours; no measurement shows this kernel to be faster"
            if reason is None:
                return lowering, reasons
            if (said := f"{lowering.kernel}: {reason}") not in reasons:
                reasons.append(said)
        return None, reasons


REGISTRY: dict[torch._ops.OpOverload, Operator] = {}
"""Every operator, by overload."""
TAGS = {
    "activation": "an activation function or a gate: each row of its result is made of the same rows of its arguments",
    "norm": "a normalization; a sum that it returns besides is not recomputed",
    "cheap": "neither, and redone rather than kept where activations and norms are",
}
"""What an operator may say of itself, for those who treat all of a kind alike: policies of recompute
(:mod:`mindspeed_fx.passes.recompute.problem.policies`), the plan search, a mixture of experts divided over ranks."""
TAGGED: dict[str, set[torch._ops.OpOverload]] = {tag: set() for tag in TAGS}
"""Tag -> the operators that bear it."""
ADOPTED: dict[torch._ops.OpOverload, Operator] = {}
"""Operators that a frontend defines for itself, by overload: they have costs and kernels of targets, but no sharding
rule.
"""


def find(overload: Any) -> Operator | None:
    """The operator that a node calls, a frontend's own included."""
    return REGISTRY.get(overload) or ADOPTED.get(overload)


register_operators(find)


def adopt(overload: torch._ops.OpOverload, reference: Callable[..., Any]) -> Operator:
    """Make a frontend's operator known; it runs as one call where no target has a kernel."""
    return ADOPTED.setdefault(overload, Operator(overload, reference, opaque=True))


def operator(
    schema: str,
    fake: Callable[..., Any],
    opaque: bool = False,
    random: bool = False,
    tags: tuple[str, ...] = (),
) -> Callable[[Callable], Operator]:
    """Define ``mindspeed::<schema>``; the decorated function is its reference and its implementation on every device.

    Args:
        schema: "name(Tensor x, ...) -> ...", as ``torch.library`` takes it.
        fake: shapes, dtypes and strides of the results from fake arguments.
        opaque: run the reference as one call, never inline it for code generation.
        random: it draws random numbers, so that nothing may drop, repeat or move it past another that does.
        tags: names in :data:`TAGS`.

    Raises:
        OptionError: a schema that is none, or whose name is taken; no function; an unknown tag.
    """
    _check_schema(schema)
    check_callable("operator", "fake", fake)
    check_bool("operator", "opaque", opaque)
    check_bool("operator", "random", random)
    if not isinstance(tags, tuple) or not set(tags) <= set(TAGS):
        close = nearest(str(next((t for t in tags if t not in TAGS), "")), TAGS)
        refuse("operator", "tags", tags, f"a tuple is expected, of {', '.join(TAGS)}{close}")

    def wrap(reference: Callable) -> Operator:
        check_callable("operator", "reference", reference)
        name = schema.split("(")[0].strip()
        try:
            LIBRARY.define(
                schema, tags=(torch.Tag.pt2_compliant_tag, *((torch.Tag.nondeterministic_seeded,) if random else ()))
            )
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise OptionError(f"operator: schema is {schema!r}, which torch does not take ({reason:.300})") from error
        LIBRARY.impl(name, _returning_no_views(reference), "CompositeExplicitAutograd")
        torch.library.register_fake(f"mindspeed::{name}", fake, lib=LIBRARY)
        result = Operator(getattr(torch.ops.mindspeed, name).default, reference, opaque)
        REGISTRY[result.overload] = result
        for tag in tags:
            TAGGED[tag].add(result.overload)
        return result

    return wrap


def _returning_no_views(reference: Callable) -> Callable:
    """``reference``, whose result may be a view of what it made: autograd refuses to write into such a one; a caller
    may, as into the result of any operator (``out += bias``).
    """

    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = reference(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return _without_base(result)
        return type(result)(map(_without_base, result)) if isinstance(result, (tuple, list)) else result

    return run


def _without_base(x: Any) -> Any:
    return torch.ops.aten._unsafe_view(x, x.shape) if isinstance(x, torch.Tensor) and x._is_view() else x


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., n] as [rows, n]; of no elements too, for which ``reshape(-1, n)`` cannot tell the rows."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _check_schema(schema: Any) -> None:
    """A name and its arguments, in no namespace; one operator has it."""
    match = re.fullmatch(r"\s*(\w+)\(.*\)\s*->\s*\S.*", schema, re.DOTALL) if isinstance(schema, str) else None
    if match is None:
        refuse("operator", "schema", schema, '"name(Tensor x, ...) -> ..." is expected, the name without a namespace')
    elif any(o.name == f"mindspeed.{match[1]}" for o in REGISTRY.values()):
        refuse("operator", "schema", schema, f"mindspeed::{match[1]} is there already; another name is expected")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the 16-bit types, else the type itself: the precision in which every reference computes."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
