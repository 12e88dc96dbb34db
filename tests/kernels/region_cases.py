"""Functions of which generated kernels are made: (name, function, shapes of its arguments)."""

import torch

CASES = {
    "softmax": (lambda x: (lambda e: e / e.sum(-1, keepdim=True))((x - x.amax(-1, keepdim=True)).exp()), ((6, 37),)),
    "rms_norm": (
        lambda x, w: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w,
        ((2, 3, 256), (256,)),
    ),
    "two_results": (lambda x, r, s: (lambda t: (t * s, t.sum(-1, keepdim=True)))(x + r), ((5, 100), (5, 100), (5, 1))),
    "gate": (lambda x, y: torch.where(x > 0, x * torch.sigmoid(y), torch.relu(y) - x) * 0.5, ((4, 33), (4, 33))),
    "squared": (lambda x, g: (lambda a: (g * 2 * a, a * a))(torch.relu(x)), ((7, 64), (7, 64))),
}


def arguments(name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in CASES[name][1]]


def graph(name, dtype=torch.float32):
    """The ATen graph of a case, with fake values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(CASES[name][0], tracing_mode="fake")(*arguments(name, dtype))


def distances(dtype):
    """Case -> largest error of its generated kernels against float64, by the size of the result."""
    from mindspeed_fx.kernels.triton.generate import compiled
    from mindspeed_fx.partition.regions import regions

    found = {}
    for name, (function, _) in CASES.items():
        (region,) = regions(graph(name, dtype))
        given = arguments(name, dtype)
        want = function(*(x.double() for x in given))
        have = compiled(region)(*given)
        want = want if isinstance(want, tuple) else (want,)
        found[name] = max(
            ((h.double() - w).abs() / (w.abs() + w.square().mean().sqrt())).max().item()
            for h, w in zip(have, want, strict=True)
        )
    return found
