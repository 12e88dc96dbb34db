"""Every NPU lowering, run through the emulated torch_npu operators, against the operator's reference: values, types,
strides.
"""

import pytest
import torch
from torch.utils import _pytree as pytree

from mindspeed_fx.compat.tracing import make_fx_decomposed
from mindspeed_fx.cost.graph import estimate
from mindspeed_fx.cost.operators import spec
from mindspeed_fx.kernels.base import find
from mindspeed_fx.kernels.npu import attention
from mindspeed_fx.planning.verify_device import calls as npu_cases

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def layout(x):
    return [s for s, n in zip(x.stride(), x.shape) if n > 1]


LOWERED = [family for family in npu_cases.FAMILIES if family != "optimizer"]
"""AdamW's step has no kernel on npu: torch's operators run there."""


def exact(args):
    """The same arguments in float64, where the reference has no error worth the name."""
    return pytree.tree_map(lambda a: a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a, args)


def results_of(run, op, args):
    """What ``run`` returns, as a list; of an operator that returns nothing what it wrote to its first argument."""
    if not op.default._schema.returns:
        written = args[0].clone()
        run(written, *args[1:])
        return [written]
    found = run(*args)
    return [found] if isinstance(found, torch.Tensor) else list(pytree.tree_leaves(found))


def finite(x):
    return x.masked_fill(x == float("-inf"), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("family", LOWERED)
def test_a_lowering_is_its_reference(family, dtype):
    for name, op, args, kernel in npu_cases.cases(family, dtype):
        operator = find(op.default)
        lowering, reasons = operator.choose("npu", args, {})
        if not kernel:  # what runs there is the reference
            assert lowering is None and not operator.lowerings.get("npu"), name
            continue
        assert lowering is not None and lowering.kernel == kernel, f"{name}: {lowering and lowering.kernel}, {reasons}"
        found = (
            results_of(run, op, given)
            for run, given in ((lowering.build, args), (operator.reference, args), (operator.reference, exact(args)))
        )
        for i, (have, want, truth) in enumerate(zip(*found, strict=True)):
            assert have.dtype == want.dtype and have.shape == want.shape and layout(have) == layout(want), (
                f"{name}, result {i}: {have.dtype}, {have.shape}, {have.stride()} instead of {want.dtype}, "
                f"{want.shape}, {want.stride()}"
            )
            if want.numel() == 0:
                continue
            if not want.is_floating_point():
                assert torch.equal(have, want), name
                continue
            have, want, truth = (finite(x).double() for x in (have, want, truth))
            error, own = ((x - truth).abs().max() for x in (have, want))
            assert error <= max(2 * own, TOLERANCE[dtype] * truth.abs().max()), (
                f"{name}, result {i}: off by {error:.3g}, the reference by {own:.3g}"
            )
            assert have.isfinite().all(), name


def test_a_lowering_costs_the_products_that_its_operator_does():
    """torch_npu's operators have costs of their own: one that none knows would make a step seem fast."""
    seen = set()
    for family in LOWERED:
        for name, op, args, kernel in npu_cases.cases(family, torch.bfloat16):
            operator = find(op.default)
            if not kernel or (operator.name, kernel) in seen or "causal" in name:
                continue
            seen.add((operator.name, kernel))
            own = operator.cost(
                *pytree.tree_map(
                    lambda a: spec(a) if isinstance(a, torch.Tensor) else a,
                    (operator.reference(*args) if op.default._schema.returns else None, *args),
                )
            )
            tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
            leaves, tree = pytree.tree_flatten(args)

            def run(*values):
                given = iter(values)
                return operator.choose("npu", args, {})[0].build(
                    *pytree.tree_unflatten([next(given) if isinstance(a, torch.Tensor) else a for a in leaves], tree)
                )

            gm = make_fx_decomposed(run, tensors, None)
            for node in gm.graph.nodes:
                node.meta.setdefault("val", None)
            made = estimate(gm, "ascend910b2", fused=False)
            extra = (
                kernel.startswith("npu_fused_linear") and "total" in operator.name
            )  # the logits again for the backward
            assert own.flops <= made.flops <= own.flops * (2 if extra else 1.4) + 1, (
                f"{name}: {made.flops} FLOP by {kernel}, {own.flops} of the operator"
            )


def test_a_bias_by_keys_is_not_written_out_for_every_query():
    """ALiBi, as the model's pass leaves it: [1, heads, 1, keys]."""
    from mindspeed_fx.kernels.npu import attention

    q = torch.empty(3, 32, 4096, 64, device="meta", dtype=torch.bfloat16)
    for shape, wanted in (
        ((1, 32, 1, 4096), (3, 32, 1, 4096)),
        ((3, 1, 1, 4096), (3, 32, 1, 4096)),
        ((1, 32, 4096, 4096), (1, 32, 4096, 4096)),
        ((4096, 4096), (1, 32, 4096, 4096)),
    ):
        bias = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        assert attention._mask(q, q, attention._four(bias, q, q), False, 0.5, 0)["pse"].shape == wanted


@pytest.mark.parametrize("heads, shape", [(4, (2, 4, 6, 6)), (1, (1, 1, 6, 6))])
def test_a_mask_of_every_head_is_one_of_every_row_of_the_batch(heads, shape):
    q, mask = torch.empty(2, 4, 6, 16, device="meta"), torch.empty(1, heads, 6, 6, dtype=torch.bool, device="meta")
    assert attention._mask(q, q, mask, False, 0.5, 0)["atten_mask"].shape == shape


@pytest.mark.parametrize("lowest", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("causal, window", [(False, 0), (True, 0), (True, 3)])
def test_rows_that_a_number_hides_whole_are_means(lowest, causal, window):
    """And so are their gradients: nothing is left in a log-sum-exp of -1e9 of how many keys there are. What the
    log-sum-exp of such a row is worth in a ring must stay next to nothing."""
    ops = torch.ops.mindspeed
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, n, 7, 16) for n in (4, 2, 2, 4))
    mask = torch.zeros(2, 1, 7, 7)
    mask[0, :, :4] = lowest
    mask[1, ..., :3] = lowest
    settings = (mask, causal, 0.25, window, 0.0)
    forward, backward = find(ops.attention.default), find(ops.attention_backward.default)
    want, lse = forward.reference(q, k, v, *settings)
    have, have_lse = forward.choose("npu", (q, k, v, *settings), {})[0].build(q, k, v, *settings)
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    far = lse < -5e3
    assert far.any() and (have_lse[far] < -5e3).all()
    torch.testing.assert_close(have_lse[~far], lse[~far])
    given = (grad, q, k, v, have, have_lse, *settings)
    gradients = backward.choose("npu", given, {})[0].build(*given)
    truths = backward.reference(grad, q, k, v, want, lse, *settings)
    for gradient, truth in zip(gradients, truths, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=2e-3, atol=2e-3)
