"""Tensor-parallel ranks with unequal heads, widths and tokens (``--unaligned-linear``) against one process."""

import pytest
import torch

from mindspeed_fx.megatron import uneven
from tests import ranks

HEADS, GROUPS, WIDTH, FFN, TOKENS, VOCABULARY = 6, 3, 4, 35, 17, 60
MODEL = dict(heads=HEADS, kv_heads=GROUPS, kv_channels=WIDTH, ffn=FFN, seq=TOKENS, hidden=24)
WORSE = 1e-11
"""In float64."""


def test_parts():
    assert (
        uneven.parts(5, 2) == [3, 2] and uneven.parts(1026, 4) == [257, 257, 256, 256] and uneven.parts(1, 2) == [1, 0]
    )
    assert uneven.sequence_parts(2) is None  # nothing is allowed yet
    uneven.allow(17)
    assert uneven.sequence_parts(2) == [9, 8] and uneven.sequence_parts(17) is None
    uneven.forbid()


def part(name, full, rank, world):
    """A rank's part of a whole parameter or gradient, by hand."""
    per_group = WIDTH * (HEADS // GROUPS)
    if "linear_qkv" in name:
        return torch.cat(full.chunk(GROUPS, 0)[owned(GROUPS, rank, world)], 0)
    if "linear_proj" in name:
        assert full.shape[1] == GROUPS * per_group
        return torch.cat(full.chunk(GROUPS, 1)[owned(GROUPS, rank, world)], 1)
    if "linear_fc1" in name:
        gate, up = full[:FFN], full[FFN:]
        return torch.cat([gate[owned(FFN, rank, world)], up[owned(FFN, rank, world)]], 0)
    if "linear_fc2" in name:
        return full[:, owned(FFN, rank, world)]
    return full[owned(full.shape[0], rank, world)] if "word_embeddings" in name or "output_layer" in name else full


def owned(units, rank, world):
    """The first units mod world ranks have one more."""
    starts = [r * (units // world) + min(r, units % world) for r in range(world + 1)]
    return slice(starts[rank], starts[rank + 1])


def train(model, call, rank, world):
    """Of a rank's logits: (themselves, gradients of a function of all ranks' logits). Megatron's loss is float32."""
    from tests.megatron.gpt_models import batch

    model.zero_grad()
    inputs = batch(seq=TOKENS, vocab=VOCABULARY)
    del inputs["labels"]
    logits = call(**inputs)
    weight = torch.linspace(-1, 2, VOCABULARY, dtype=torch.float64)[owned(VOCABULARY, rank, world)]
    (logits.square() * weight).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def worker(rank, store, path, settings, world):
    torch.set_num_threads(1)
    import torch.distributed as dist
    from megatron.core import parallel_state

    import mindspeed_fx.megatron_adaptor  # noqa: F401
    from tests.megatron.gpt_models import start, tiny_gpt

    start(world, rank, world, store)
    uneven.allow(TOKENS)
    full = torch.load(path)
    torch.manual_seed(0)
    model = tiny_gpt(tp=world, vocab=VOCABULARY, **MODEL, **settings).double()
    for name, p in model.named_parameters():  # every rank draws the whole weight and keeps its part
        assert torch.equal(p, part(name, full["state"][name], rank, world)), name
    attention = model.decoder.layers[0].self_attention
    groups = len(range(GROUPS)[owned(GROUPS, rank, world)])
    assert (attention.num_query_groups_per_partition, attention.num_attention_heads_per_partition) == (
        groups,
        2 * groups,
    )
    graphs = []
    compiled = torch.compile(model, backend=lambda gm, i: counted(graphs, gm, i), fullgraph=True)
    results = [train(model, call, rank, world) for call in (model, compiled)]
    assert len(graphs) == 1
    for logits, grads in results:
        expected = full["logits"][..., owned(VOCABULARY, rank, world)]
        torch.testing.assert_close(logits, expected, rtol=WORSE, atol=WORSE)
        for name, p in model.named_parameters():
            if getattr(p, "sequence_parallel", False):  # as Megatron's finalize_model_grads
                dist.all_reduce(grads[name], group=parallel_state.get_tensor_model_parallel_group())
            torch.testing.assert_close(
                grads[name], part(name, full["grads"][name], rank, world), rtol=WORSE, atol=WORSE
            )
    dist.destroy_process_group()


def counted(graphs, gm, inputs):
    from torch._dynamo.backends.registry import lookup_backend

    graphs.append(gm)
    return lookup_backend("mindspeed")(gm, inputs, options={"codegen": "eager", **uneven.OPTIONS})


RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize(
    "settings, world",
    [
        (dict(sequence_parallel=True), 2),
        pytest.param(dict(tie=True), 2, marks=pytest.mark.slow),
        pytest.param(dict(sequence_parallel=True, **RECOMPUTED), 2, marks=pytest.mark.slow),
        pytest.param(
            dict(sequence_parallel=True), 3, marks=pytest.mark.slow
        ),  # groups are even, widths and tokens are not
    ],
    ids=["sequence", "plain", "recomputed", "three"],
)
def test_ranks_equal_one(tmp_path, monkeypatch, settings, world):
    from tests.megatron.gpt_models import tiny_gpt

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    alone = {k: v for k, v in settings.items() if k != "sequence_parallel"}
    model = tiny_gpt(vocab=VOCABULARY, **MODEL, **alone).double()
    logits, grads = train(model, model, 0, 1)
    torch.save({"state": dict(model.named_parameters()), "logits": logits, "grads": grads}, tmp_path / "full.pt")
    ranks.spawn(worker, args=(str(tmp_path / "store"), str(tmp_path / "full.pt"), settings, world), nprocs=world)


def test_fewer_groups_than_ranks_are_refused():
    from megatron.core.transformer.transformer_config import TransformerConfig

    uneven.allow(TOKENS)
    try:
        with pytest.raises(ValueError, match="2 query groups are fewer than 3 tensor-parallel ranks"):
            TransformerConfig(
                num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, tensor_model_parallel_size=3
            )
    finally:
        uneven.forbid()
