"""Every kernel that attention is lowered to on a CPU, preferred or not, is the reference in its types."""

import pytest
import torch

from mindspeed_fx.kernels.attention import attention
from mindspeed_fx.kernels.cpu import attention as cpu_attention


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_types(dtype, with_sinks):
    q, k, v = (torch.randn(2, 4, 20, 16).to(dtype) for _ in range(3))
    sinks = torch.randn(4).to(dtype) if with_sinks else None
    arguments = (q, k, v, None, True, 0.25, 0, 0.0, sinks)
    served = [lowering for lowering in attention.lowerings["cpu"] if lowering.supports(*arguments) is None]
    assert "aten flash attention" in [lowering.kernel for lowering in served]
    want = attention.reference(*arguments)
    for lowering in served:
        for have, wanted in zip(lowering.build(*arguments), want, strict=True):
            assert have.dtype == wanted.dtype, lowering.kernel
            # ATen's kernel rounds its weights to 16 bits, and has an exponential of its own for 32 and fewer
            eps = {torch.float64: 1e-14, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps)
            error = (have - wanted).abs().max()
            assert error <= 2 * eps * wanted.abs().max(), f"{lowering.kernel}: off by {error:.3g}"


def test_atens_kernel_pads_values_that_are_narrower_than_keys_and_no_others():
    """A sequence that is shorter than a head is wide is no reason."""
    q, k, v = (torch.randn(1, 2, 4, 16) for _ in range(3))
    assert cpu_attention._flash_supports(q, k, v, None, True, 0.25) is None
    assert cpu_attention._flash_supports(q, k, v[..., :8], None, True, 0.25) is None
    assert "is larger than that of q and k (8)" in cpu_attention._flash_supports(
        q[..., :8], k[..., :8], v, None, True, 1
    )
