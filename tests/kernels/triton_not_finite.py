"""Infinities and NaN in Triton's gates and generated kernels: how many elements differ from PyTorch's."""

import itertools

import torch

ops = torch.ops.mindspeed
NUMBERS = [-float("inf"), -2.0, 0.0, 3.0, float("inf"), float("nan")]
MAXIMA = {
    "relu": lambda x, y: torch.relu(x) * 2,
    "maximum": lambda x, y: torch.maximum(x, y) * 2,
    "minimum": lambda x, y: torch.minimum(x, y) * 2,
    "amax": lambda x, y: (x + 0 * y).amax(-1, keepdim=True) * 2,
}


def differ(have: torch.Tensor, want: torch.Tensor) -> int:
    return int((~((have == want) | (have.isnan() & want.isnan()))).sum())


def counts(device: str) -> dict[str, int]:
    gate, up, grad = torch.tensor(list(itertools.product(NUMBERS, NUMBERS, NUMBERS)), device=device).T.contiguous()
    gate, up, grad = (t.reshape(-1, 36) for t in (gate, up, grad))
    found = {
        "reglu": differ(ops.glu_triton(gate, up, "relu"), ops.glu(gate, up, "relu")),
        **{
            f"reglu_{name}": differ(have, want)
            for name, have, want in zip(
                ("gate", "up"),
                ops.glu_backward_triton(grad, gate, up, "relu"),
                ops.glu_backward(grad, gate, up, "relu"),
            )
        },
    }
    return found | {name: _generated(function, gate, up) for name, function in MAXIMA.items()} | {"scan": _scan(device)}


def _generated(function, *args: torch.Tensor) -> int:
    from torch.fx.experimental.proxy_tensor import make_fx

    from mindspeed_fx.kernels.triton.generate import compiled
    from mindspeed_fx.partition.regions import regions

    (region,) = regions(make_fx(function, tracing_mode="fake")(*args))
    (have,) = compiled(region)(*(a for a, n in zip(args, "xy") if len(region.inputs) == 2 or n == "x"))
    return differ(have, function(*args))


def _scan(device: str) -> int:
    """A selective scan with a NaN among its steps, by the elements that are NaN."""
    u, dt, b, c = (torch.ones(1, n, 5, device=device) for n in (2, 2, 3, 3))
    dt[0, 1, 2] = float("nan")
    args = u, dt, -torch.ones(2, 3, device=device), b, c, None, None, None, None, True
    have, want = ops.selective_scan_triton(*args)[0], ops.selective_scan(*args)[0]
    return int((have.isnan() != want.isnan()).sum())
