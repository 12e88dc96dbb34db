"""Small tensor- and sequence-parallel programs with functional collectives, and graphs of them."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx import kernels  # noqa: F401  the operators


def size():
    return dist.get_world_size()


def all_gather(x):
    return functional.wait_tensor(functional.all_gather_tensor(x.contiguous(), 0, dist.group.WORLD))


def reduce_scatter(x):
    return functional.wait_tensor(functional.reduce_scatter_tensor(x.contiguous(), "sum", 0, dist.group.WORLD))


def all_reduce(x):
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", dist.group.WORLD))


def all_to_all(x):
    there = [x.shape[0] // size()] * size()
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), there, there, dist.group.WORLD))


def along(dim, x):
    """What DTensor does with a sequence in dimension ``dim``: dimension 0 of the collective is the ranks'."""
    return torch.cat(all_gather(x).split(x.shape[0]), dim)


def pair(there, back):
    """A function that does ``there``, and ``back`` with the gradient."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, grad):
            return back(grad)

    return Pair


Gather, Scatter = pair(all_gather, reduce_scatter), pair(reduce_scatter, all_gather)
Copy, Reduce = pair(torch.clone, all_reduce), pair(all_reduce, lambda grad: grad)
Exchange = pair(all_to_all, all_to_all)


def experts(x, norm, up, down):
    """Two experts per rank with a capacity of half the sequence, and a shared expert: [seq, batch, hidden]."""
    local, rows = 2, x.reshape(2, -1, x.shape[-1])
    sent = torch.stack([rows[i % 2] * norm + i for i in range(local * size())])  # [experts, capacity, hidden]
    here = Exchange.apply(sent).unflatten(0, (size(), local)).transpose(0, 1).flatten(1, 2)
    made = torch.bmm(torch.relu(torch.bmm(here, up.t().expand(local, -1, -1))), down.t().expand(local, -1, -1))
    back = Exchange.apply(made.unflatten(1, (size(), -1)).transpose(0, 1).flatten(0, 1).contiguous())
    shared = F.linear(torch.tanh(F.linear(x, up)), down)
    return shared + back.unflatten(0, (-1, 2)).sum(0).reshape(x.shape)


def mlp(x, norm, up, down):
    """Megatron's with sequence parallelism: [seq / ranks, batch, hidden]."""
    y = torch.ops.mindspeed.rms_norm(x, norm, 1e-5, True)[0]
    h = F.silu(torch.ops.mindspeed.linear(Gather.apply(y), up))
    return x + Scatter.apply(torch.ops.mindspeed.linear(h, down))


def mlp_whole(x, norm, up, down):
    """Megatron's without: all_reduce, forward and backward."""
    y = torch.ops.mindspeed.rms_norm(x, norm, 1e-5, True)[0]
    return x + Reduce.apply(F.linear(F.silu(F.linear(Copy.apply(y), up)), down))


def training(layer):
    """Result and gradients of ``layer`` as one program."""

    def run(x, norm, up, down):
        inputs = [t.detach().requires_grad_() for t in (x, norm, up, down)]
        out = layer(*inputs)
        out = layer(out, *inputs[1:])
        return out.detach(), *torch.autograd.grad(out.square().sum(), inputs)

    return run


def batch_first(x, norm, up, down):
    """DTensor's spelling: [batch, seq / ranks, hidden]."""
    h = torch.relu(F.linear(along(1, x), up))
    y = F.linear(h, down)
    z = reduce_scatter(torch.cat(y.split(y.shape[1] // size(), 1)))
    return z * norm, h.sum(0)


def packed(x, norm, up, down):
    """A product whose halves are read apart, one of them outside too, as saved values of attention are: it lies inside
    the product.
    """
    a, b = F.linear(along(0, x), up).chunk(2, -1)
    return reduce_scatter(F.linear(torch.cat([a.tanh(), 2 * b], -1), down)) * norm, b.permute(1, 2, 0), a


def exchange(x, norm, up, down):
    """Rows exchanged between products: experts that every rank sends as many rows."""
    rows = x.reshape(-1, x.shape[-1])
    sent = all_to_all(rows @ up.t())
    back = all_to_all(torch.relu(sent) @ down.t())
    return back + rows * norm, sent


def shapes(seq=8, batch=2, hidden=16, ffn=24):
    return [(seq, batch, hidden), (hidden,), (ffn, hidden), (hidden, ffn)]


def graph(program, of=None, dtype=torch.float64):
    with torch.device("cpu"):
        gm = make_fx(program, tracing_mode="fake")(*[torch.empty(s, dtype=dtype) for s in (of or shapes())])
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def inputs(rank, of=None, dtype=torch.float64):
    """Different on every rank but for the norm's weight."""
    generators = [torch.Generator().manual_seed(100 * (0 if k == 1 else rank + 1) + k) for k in range(4)]
    return [
        (torch.randn(s, generator=g, dtype=torch.float64) / 4).to(dtype) for s, g in zip(of or shapes(), generators)
    ]


def on_every_rank(gm, mode, of=None, dtype=torch.float64):
    """Results of ``gm`` on every rank: one list of tensors for each result."""
    from torch.distributed._local_tensor import LocalTensor

    given = [inputs(r, of, dtype) for r in range(size())]
    with mode, torch.no_grad():
        out = gm(*[LocalTensor({r: given[r][k] for r in range(size())}) for k in range(len(given[0]))])
    return [[o._local_tensors[r] for r in range(size())] for o in out]
