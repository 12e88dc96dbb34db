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

import mindspeed_fx
from mindspeed_fx.megatron import alibi
from tests import forks
from tests.megatron.launch import runner
from tests.ranks import spawn

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
    alibi: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        flags = [f"{k}={v}" for k, v in (self.flags | self.config).items()]
        widths = f"{self.heads}:{self.kv_heads} heads" + (f" v{self.v_dim}" if self.v_dim != DIM else "")
        return " ".join([self.algorithm, widths, self.mask, *flags, "alibi" * self.alibi, f"p{self.dropout}"])


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
        attention_dropout=case.dropout,
        params_dtype=torch.float64,
        masked_softmax_fusion=False,
        **case.config,
    )
    attention = DotProductAttention(config, 1, AttnMaskType.causal, "self", v_channels=case.v_dim)
    if case.alibi:
        alibi.add_bias(attention)
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


def expected(q, k, v, case, sinks, keep=None):
    """[sequence, batch, heads * v_dim] by the definition; ``keep``: what dropout keeps, [batch, heads, rows, keys]."""
    groups = case.heads // case.kv_heads
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = q @ k.transpose(-1, -2) / math.sqrt(DIM)
    if case.alibi:
        i = torch.arange(SEQ, dtype=torch.float64)
        scores = scores + torch.tensor(alibi.slopes(case.heads), dtype=torch.float64).view(-1, 1, 1) * (i - i[:, None])
    mask = masked(case.mask)
    if "window_size" in case.config:
        i = torch.arange(SEQ)
        mask = (i < i[:, None] - case.config["window_size"][0]) | (i > i[:, None])
    if mask is None:
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(mask, -10000.0)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(BATCH, -1, SEQ, 1)], -1)
    weights = scores.softmax(-1)[..., :SEQ]
    if keep is not None:
        weights = weights * keep / (1 - case.dropout)
    return (weights @ v).permute(2, 0, 1, 3).flatten(2)


def kept_weights(attention, own, ranks):
    """What the ranks draw in their next forward, put together to [batch, heads, rows, keys], and a forward that draws
    it again."""
    from torch import distributed as dist

    from mindspeed_fx.megatron.context_parallel import attention as module
    from mindspeed_fx.megatron.context_parallel.sequence import own_positions, rank_order

    module.draw = getattr(module, "draw", module._draw_kept)
    drawn = module.draw(attention, own[0].permute(1, 2, 0, 3), ranks)
    parts = [torch.empty_like(drawn) for _ in range(ranks)]
    dist.all_gather(parts, drawn)
    whole, keys = (
        torch.empty(BATCH, own[0].shape[2], SEQ, SEQ, dtype=torch.bool),
        rank_order(torch.arange(SEQ), 0, ranks),
    )
    for rank, part in enumerate(parts):
        rows = own_positions(SEQ // ranks, ranks, rank, part.device)
        whole[:, :, rows.unsqueeze(1), keys] = part
    module._draw_kept = lambda *_: drawn
    assert 0 < whole.sum() < whole.numel()
    return whole


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
    part = lambda x: own_chunks(x.detach(), 0, ranks, rank)  # noqa: E731
    own = [part(x).requires_grad_() for x in wholes]
    right = expected(*wholes, case, target, kept_weights(attention, own, ranks) if case.dropout else None)
    (right * weight).sum().backward()

    mask = get_batch_on_this_cp_rank({"attention_mask": masked(case.mask)})["attention_mask"]
    run = attention
    if case.compiled:
        run = compiled(attention, case, *own, mask)
    out = run(*own, mask)
    torch.testing.assert_close(out, part(right), rtol=1e-10, atol=1e-10, msg=lambda m: f"{case}: {m}")
    (out * part(weight)).sum().backward()
    for x, whole in zip(own, wholes):
        assert whole.grad.abs().max() > 1e-3
        torch.testing.assert_close(x.grad, part(whole.grad), rtol=1e-10, atol=1e-10, msg=lambda m: f"{case}: {m}")
    if target is not None and target.requires_grad:
        torch.distributed.all_reduce(sinks.grad)  # as DistributedDataParallel sums over context-parallel ranks
        torch.testing.assert_close(sinks.grad, target.grad, rtol=1e-10, atol=1e-10)


def compiled(attention, case, *inputs):
    """One graph, in which attention is fused, whatever the algorithm."""
    torch._dynamo.reset()
    options = {"codegen": "eager"}
    report = mindspeed_fx.explain(attention, *inputs, options=options)
    assert (report.graph_count, report.break_reasons) == (1, []), case
    assert case.algorithm == RING or report.counts["fusion.attention"] == 1, (case, report.skipped("fusion.attention"))
    for x in inputs[:3]:
        x.grad = None
    return torch.compile(attention, backend="mindspeed", fullgraph=True, options=options)


def check_roll(rank, ranks):
    """What multi-token prediction shifts, in a graph and by Megatron's own messages."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from mindspeed_fx.megatron.context_parallel.sequence import own_chunks

    group = parallel_state.get_context_parallel_group()
    tokens = torch.randint(1, 99, (BATCH, SEQ), generator=torch.Generator().manual_seed(4))
    right = own_chunks(torch.cat([tokens[:, 1:], tokens[:, :1] * 0], 1), 1, ranks, rank)
    own = own_chunks(tokens, 1, ranks, rank)
    call = lambda x: roll_tensor(x, shifts=-1, dims=-1, cp_group=group)  # noqa: E731
    for roll in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        rolled, total = roll(own)
        assert torch.equal(rolled, right) and total == right.sum()


def worker(rank, ranks, store, cases):
    import torch.distributed as dist
    from megatron.core import parallel_state

    forks.renew_threads()
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    for case in cases:
        check(case, rank, ranks)
    check_roll(rank, ranks)
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
    Case(RING, 4, 2, mask="general", config={"softmax_type": "learnable"}),
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
    Case(ULYSSES, 12, 3, alibi=True),
    Case(RING, 4, 2, flags={"cp_window_size": 2}, alibi=True),
    Case(RING, 3, 1, mask="general", alibi=True),
    Case(HYBRID, 6, 2, flags=TWO, alibi=True),
    Case(GATHER, 3, 1, mask="documents", alibi=True),
    Case(GATHER, alibi=True),
    Case(RING, 4, 2, flags={"context_parallel_kv_cache_policy": "half", "cp_window_size": 2}, dropout=0.4),
    Case(RING, 3, 1, mask="general", config={"softmax_type": "learnable"}, dropout=0.4),
    Case(RING, alibi=True, dropout=0.1),
]


def test_every_algorithm_gives_what_one_process_gives(tmp_path):
    """Values and gradients of queries, keys, values and sinks on two and four ranks; a ring also in one graph."""
    two = [c for c in FAMILIES if "ulysses_degree_in_cp" not in c.flags]
    cases = {2: [*two, Case(RING, 4, 2, compiled=True, alibi=True)], 4: FAMILIES}
    spawn(fork_ranks, (str(tmp_path / "store"), cases), nprocs=1)


COMPILED = [
    Case(ULYSSES, 4, 1, mask="documents", compiled=True),
    Case(RING, 4, 2, mask="general", flags={"context_parallel_kv_cache_policy": "half"}, compiled=True),
    Case(GATHER, 4, 2, compiled=True),
    Case(GATHER, 4, 2, compiled=True, alibi=True),
    Case(RING, 4, 2, compiled=True),
]


@pytest.mark.slow
def test_one_graph_with_fused_attention(tmp_path):
    spawn(fork_ranks, (str(tmp_path / "store"), {2: COMPILED}), nprocs=1)


# --------------------------------------------------------------------------- Megatron-LM's script

SCRIPT = """--num-layers 2 --hidden-size 64 --num-attention-heads 4
--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3
--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --transformer-impl local --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --eval-iters 1
--eval-interval 100 --log-interval 1 --num-workers 0 --attention-dropout 0 --hidden-dropout 0"""
GROUPED = "--group-query-attention --num-query-groups 2"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 4 --rope-type rope"
)
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss --calculate-per-token-loss"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CORE = "--recompute-granularity selective --recompute-modules core_attn"


def words(flags):
    """A command line's words for values of arguments."""
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in flags.items())
    return [word for flag, value in pairs for word in ([flag] if value is True else [flag, str(value)])]


def train(runs):
    """Each of ``runs`` (ranks, arguments, flags, compiled) in turn."""
    results = []
    for ranks, arguments, flags, is_compiled in runs:
        environ = {"MINDSPEED_FX_COMPILE": str(int(is_compiled)), "MINDSPEED_FX_OPTIONS": '{"codegen": "eager"}'}
        heads = "" if LATENT in arguments else GROUPED  # Megatron takes one of the two
        args = [*SCRIPT.split(), *heads.split(), *arguments.split(), *words(flags)]
        results.append(runner.run(args, ranks, environ=environ))
    return results


def same(result, right):
    assert result.error is None, result.error
    assert right.error is None, right.error
    assert sorted(right.losses) == sorted(right.grad_norms) == [1, 2, 3]
    for iteration, loss in right.losses.items():
        assert result.losses[iteration] == pytest.approx(loss, rel=1e-5)
        assert result.grad_norms[iteration] == pytest.approx(right.grad_norms[iteration], rel=1e-5)


def test_training_is_that_of_one_rank():
    algorithms = (ULYSSES, RING)
    runs = [(2, "--context-parallel-size 2", {"context_parallel_algo": a}, False) for a in algorithms]
    right, *results = train([(1, "", {}, False), *runs])
    for result in results:
        same(result, right)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, ranks, others, arguments, flags",
    [
        (ULYSSES, 4, 1, "", {"use_ulysses_allgather_kv": True}),
        (ULYSSES, 2, 1, DOCUMENTS, {}),
        (RING, 4, 1, "", {"cp_window_size": 2, "context_parallel_kv_cache_policy": "full"}),
        (RING, 2, 1, DOCUMENTS, {}),
        (RING, 2, 1, LATENT, {}),
        (RING, 2, 1, FULL, {}),
        (RING, 2, 1, CORE, {}),
        (RING, 2, 2, "--tensor-model-parallel-size 2 --sequence-parallel", {}),
        (RING, 2, 2, "--pipeline-model-parallel-size 2", {}),
        (HYBRID, 4, 1, DOCUMENTS, TWO),
        (ADAPTIVE, 2, 1, DOCUMENTS, {}),
        (HYBRID_ADAPTIVE, 4, 1, "", TWO),
        (GATHER, 2, 1, LATENT, {}),
    ],
)
def test_training_of_every_kind_is_that_without_context_parallelism(algorithm, ranks, others, arguments, flags):
    """Eager and compiled, one graph for training and one for evaluation."""
    given = {"context_parallel_algo": algorithm, **flags}
    divided = f"--context-parallel-size {ranks} {arguments}"
    runs = [(others, arguments, {}, False), *((ranks * others, divided, given, c) for c in (False, True))]
    right, eager, compiled = train(runs)
    same(eager, right)
    same(compiled, right)
    assert compiled.graphs == [2] * (ranks * others) and compiled.chunks == [1] * (ranks * others)
    assert compiled.breaks == []


# --------------------------------------------------------------------------- what is refused


@dataclass
class Config:
    context_parallel_size: int = 4
    context_parallel_algo: str = ULYSSES
    cp_window_size: int = 1
    ulysses_degree_in_cp: int | None = None
    context_parallel_kv_cache_policy: str | None = None
    cp_comm_type: str | None = None


@pytest.mark.parametrize(
    "values, words",
    [
        ({"context_parallel_algo": "mamba_cp_algo"}, ["--context-parallel-algo mamba_cp_algo", RING, GATHER]),
        ({"context_parallel_algo": HYBRID}, ["--ulysses-degree-in-cp None", "valid: 2"]),
        ({"context_parallel_algo": HYBRID, "ulysses_degree_in_cp": 3}, ["--ulysses-degree-in-cp 3", "valid: 2"]),
        ({"context_parallel_algo": RING, "cp_window_size": 3}, ["--cp-window-size 3", "valid: 1, 2, 4"]),
        (
            {"context_parallel_algo": RING, "context_parallel_kv_cache_policy": "all"},
            ["--context-parallel-kv-cache-policy all", "full, half"],
        ),
        ({"cp_comm_type": "all_gather"}, ["--cp-comm-type all_gather", f"--context-parallel-algo {GATHER}"]),
    ],
)
def test_flags_that_do_not_fit_are_refused_by_name(values, words):
    from mindspeed_fx.megatron.context_parallel import read_settings

    with pytest.raises(ValueError) as error:
        read_settings(Config(**values))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_what_a_layer_cannot_do_is_refused_by_name():
    from mindspeed_fx.megatron.context_parallel.settings import check_layer, read_settings

    ulysses, ring = (read_settings(Config(context_parallel_algo=a)) for a in (ULYSSES, RING))
    with pytest.raises(ValueError, match=r"--context-parallel-size 4 .* --num-attention-heads 12 .* valid: 1, 2, 3, 6"):
        check_layer(ulysses, heads=6, tensor_ranks=2, softmax_type="vanilla")
    with pytest.raises(ValueError, match="--softmax-type learnable .* valid: megatron_cp_algo"):
        check_layer(ulysses, heads=4, tensor_ranks=1, softmax_type="learnable")
    check_layer(ring, heads=3, tensor_ranks=1, softmax_type="learnable")
