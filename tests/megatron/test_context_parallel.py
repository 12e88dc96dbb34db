"""Attention over a divided sequence: gloo ranks against one process in float64, and training runs of Megatron-LM's own
script against runs on one rank."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

ULYSSES, RING, HYBRID = "ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo"
ADAPTIVE, HYBRID_ADAPTIVE, GATHER = "adaptive_cp_algo", "hybrid_adaptive_cp_algo", "kvallgather_cp_algo"
SEQ, BATCH, DIM = 16, 2, 4


@dataclass
class Case:
    """One attention layer: its heads, its mask and the flags of context parallelism."""

    algorithm: str
    heads: int = 4
    kv_heads: int = 4
    v_dim: int = DIM
    mask: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False

    def __str__(self) -> str:
        flags = [f"{k}={v}" for k, v in (self.flags | self.config).items()]
        widths = f"{self.heads}:{self.kv_heads} heads" + (f" v{self.v_dim}" if self.v_dim != DIM else "")
        return " ".join([self.algorithm, widths, self.mask, *flags])


def layer(case, ranks):
    """DotProductAttention in float64 as the local spec builds it."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.heads * DIM,
        num_attention_heads=case.heads,
        num_query_groups=case.kv_heads,
        context_parallel_size=ranks,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        masked_softmax_fusion=False,
        **case.config,
    )
    attention = DotProductAttention(config, 1, AttnMaskType.causal, "self", v_channels=case.v_dim)
    if attention.softmax_offset is not None:
        with torch.no_grad():
            attention.softmax_offset.copy_(torch.linspace(-1, 1, case.heads))
    return attention


def masked(kind):
    """Megatron's mask [batch, 1, sequence, sequence], True where a score does not count; None: causal."""
    later = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    if kind == "documents":
        numbers = torch.tensor([[0] * 5 + [1] * 8 + [2] * 3, [0] * 11 + [1] * 5])
        return (later | (numbers[:, :, None] != numbers[:, None, :]))[:, None]
    if kind == "general":  # some rows see no key of some rank, and one sees none at all
        seen = torch.rand(BATCH, SEQ, SEQ, generator=torch.Generator().manual_seed(2)) > 0.8
        seen[1, 6] = False
        return ~seen[:, None]
    return None


def expected(q, k, v, case, sinks):
    """[sequence, batch, heads * v_dim] by the definition."""
    groups = case.heads // case.kv_heads
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = q @ k.transpose(-1, -2) / math.sqrt(DIM)
    mask = masked(case.mask)
    if "window_size" in case.config:
        i = torch.arange(SEQ)
        mask = (i < i[:, None] - case.config["window_size"][0]) | (i > i[:, None])
    if mask is None:
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(mask, -10000.0)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(BATCH, -1, SEQ, 1)], -1)
    return (scores.softmax(-1)[..., :SEQ] @ v).permute(2, 0, 1, 3).flatten(2)


def check(case, rank, ranks):
    from megatron.core.utils import get_batch_on_this_cp_rank
    from megatron.training import global_vars

    from mindspeed_fx.megatron.context_parallel.sequence import own_chunks

    global_vars._GLOBAL_ARGS = Namespace(context_parallel_algo=case.algorithm, **case.flags)
    attention = layer(case, ranks)
    draw = torch.Generator().manual_seed(1)
    widths = ((case.heads, DIM), (case.kv_heads, DIM), (case.kv_heads, case.v_dim))
    wholes = [torch.randn(SEQ, BATCH, *w, generator=draw, dtype=torch.float64, requires_grad=True) for w in widths]
    weight = torch.randn(SEQ, BATCH, case.heads * case.v_dim, generator=draw, dtype=torch.float64)
    sinks = attention.softmax_offset
    target = None if sinks is None else sinks.detach().clone().requires_grad_(sinks.requires_grad)
    right = expected(*wholes, case, target)
    (right * weight).sum().backward()

    part = lambda x: own_chunks(x.detach(), 0, ranks, rank)  # noqa: E731
    own = [part(x).requires_grad_() for x in wholes]
    mask = get_batch_on_this_cp_rank({"attention_mask": masked(case.mask)})["attention_mask"]
    run = attention
    if case.compiled:
        torch._dynamo.reset()
        run = torch.compile(attention, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    out = run(*own, mask)
    torch.testing.assert_close(out, part(right), rtol=1e-10, atol=1e-10, msg=lambda m: f"{case}: {m}")
    (out * part(weight)).sum().backward()
    for x, whole in zip(own, wholes):
        assert whole.grad.abs().max() > 1e-3
        torch.testing.assert_close(x.grad, part(whole.grad), rtol=1e-10, atol=1e-10, msg=lambda m: f"{case}: {m}")
    if target is not None and target.requires_grad:
        torch.distributed.all_reduce(sinks.grad)  # as DistributedDataParallel sums over context-parallel ranks
        torch.testing.assert_close(sinks.grad, target.grad, rtol=1e-10, atol=1e-10)


def worker(rank, ranks, store, cases):
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    for case in cases:
        check(case, rank, ranks)
    dist.destroy_process_group()


def fork_ranks(_, store, cases):
    """One process imports everything; every rank is a fork of it."""
    from tests.megatron.launch import runner

    runner.prepare()
    for ranks, own in cases.items():
        mp.start_processes(worker, args=(ranks, f"{store}{ranks}", own), nprocs=ranks, start_method="fork")


TWO = {"ulysses_degree_in_cp": 2}
FAMILIES = [
    Case(ULYSSES),
    Case(ULYSSES, 8, 2, mask="documents"),
    Case(ULYSSES, 8, 2, flags={"use_ulysses_allgather_kv": True}),
    Case(ULYSSES, 12, 3, v_dim=2),
    Case(ULYSSES, 12, 3, flags={"use_ulysses_allgather_kv": True}),
    Case(RING, 4, 2),
    Case(RING, 3, 3, v_dim=2, flags={"cp_window_size": 2}),
    Case(RING, mask="documents"),
    Case(RING, 4, 1, mask="general"),
    Case(RING, flags={"context_parallel_kv_cache_policy": "full"}),
    Case(RING, flags={"context_parallel_kv_cache_policy": "half", "cp_window_size": 2}),
    Case(RING, config={"softmax_type": "learnable"}),
    Case(RING, config={"window_size": (5, 0)}),
    Case(HYBRID, 4, 1, flags=TWO),
    Case(HYBRID, 2, 2, mask="general", flags=TWO),
    Case(GATHER, 3, 1, v_dim=2),
    Case(GATHER, mask="documents", config={"softmax_type": "learnable"}),
    Case(GATHER, config={"window_size": (5, 0)}),
    Case(ADAPTIVE, mask="general"),
    Case(HYBRID_ADAPTIVE, 4, 2, mask="documents", flags=TWO),
]


def test_every_algorithm_gives_what_one_process_gives(tmp_path):
    """Values and gradients of queries, keys, values and sinks on two and four ranks."""
    two = [c for c in FAMILIES if "ulysses_degree_in_cp" not in c.flags]
    mp.spawn(fork_ranks, args=(str(tmp_path / "store"), {2: two, 4: FAMILIES}), nprocs=1)
