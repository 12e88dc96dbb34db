"""Products of bfloat16 and float16 on CPU go to a kernel of our own where the processor has no instruction for them.

ATen then multiplies them in plain loops: by 512 x 1408 at 1024 rows in bfloat16 on two AVX2 cores ``x w^T`` takes 8
times as long as in float32, ``g^T x`` 8 times and ``g w`` 100 times (benchmarks/narrow_product.py); the kernel takes
what float32 takes. Elsewhere ATen's products are oneDNN's and stay.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.kernels.cpu import narrow_product
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "lowering.narrow_products", "mindspeed::narrow_product"
SMALLEST = 2**18
"""Multiplications below which the call overhead eats the gain."""


@register(NAME)
def narrow_products(gm: fx.GraphModule, context: Context) -> PassReport:
    """bfloat16 and float16 products on CPU are summed in float32 by a kernel of our own where oneDNN has none."""
    report = PassReport(NAME)
    if context.options.target != "cpu":
        return report
    targets = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    rewrite_each(report, OPERATOR, calls(gm, *targets), lambda node: _rewrite(gm, node))
    recompile(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    *bias, a, b = node.args
    x, y = match.value(a), match.value(b)
    if x.dtype not in narrow_product.NARROW:
        return None  # nothing to say of every product of a float32 model
    if reason := narrow_product.problem(x.dtype, x.device.type):
        return reason
    multiplications = x.numel() * y.shape[-1]
    if fake.hint(multiplications) < SMALLEST:
        sizes = " x ".join(str(fake.hint(s)) for s in (*x.shape, y.shape[-1]))
        return f"{sizes} is too small to gain"
    if bias and (reason := _refuses_bias(node, match.value(bias[0]))):
        return reason
    new = rewrite.insert(gm, node, torch.ops.mindspeed.narrow_product.default, (a, b, *bias))
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    return site(OPERATOR, new, [node])


def _refuses_bias(node: fx.Node, bias: torch.Tensor) -> str | None:
    if bias.dim() != 1:
        return f"the bias has {bias.dim()} dimensions"
    factors = {name: node.kwargs[name] for name in ("beta", "alpha") if node.kwargs.get(name, 1) != 1}
    return f"factors {factors} on bias and product" if factors else None
