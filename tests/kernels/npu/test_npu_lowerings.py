"""Every NPU lowering, run through the emulated torch_npu operators, against the operator's reference: values, types, strides."""

import pytest
import torch

import npu_cases
from mindspeed_fx.kernels import REGISTRY

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def layout(x):
    return [s for s, n in zip(x.stride(), x.shape) if n > 1]


def exact(args):
    """The same arguments in float64, where the reference has no error worth the name."""
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)


def finite(x):
    return x.masked_fill(x == float("-inf"), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("family", npu_cases.FAMILIES)
def test_a_lowering_is_its_reference(family, dtype):
    for name, op, args, kernel in npu_cases.cases(family, dtype):
        operator = REGISTRY[op.default]
        lowering, reasons = operator.choose("npu", args, {})
        assert lowering is not None and lowering.kernel == kernel, f"{name}: {lowering and lowering.kernel}, {reasons}"
        fakes, truths = operator.reference(*args), operator.reference(*exact(args))
        results = lowering.build(*args)
        if isinstance(results, torch.Tensor):
            results, fakes, truths = (results,), (fakes,), (truths,)
        for i, (have, want, truth) in enumerate(zip(results, fakes, truths, strict=True)):
            assert have.dtype == want.dtype and have.shape == want.shape and layout(have) == layout(want), f"{name}, result {i}: {have.dtype}, {have.shape}, {have.stride()} instead of {want.dtype}, {want.shape}, {want.stride()}"
            if want.numel() == 0:
                continue
            if not want.is_floating_point():
                assert torch.equal(have, want), name
                continue
            have, want, truth = (finite(x).double() for x in (have, want, truth))
            error, own = ((x - truth).abs().max() for x in (have, want))
            assert error <= max(2 * own, TOLERANCE[dtype] * truth.abs().max()), f"{name}, result {i}: off by {error:.3g}, the reference by {own:.3g}"
            assert have.isfinite().all(), name
