"""Tokens that sequence parallelism gathered for products are gathered again in the backward: fewer bytes, the same
values."""

from __future__ import annotations

import torch

from tests import ranks

LAYERS, HIDDEN, SEQ, BATCH = 1, 32, 16, 2


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    import torch.distributed as dist

    import mindspeed_fx.megatron_adaptor  # noqa: F401
    from mindspeed_fx.report import recorder
    from tests.megatron.gpt_models import batch, start, tiny_gpt, train
    from tests.megatron.kept_bytes import bytes_kept

    start(2, rank, 2, store)
    sizes = dict(hidden=HIDDEN, heads=4, kv_heads=4, ffn=64, seq=SEQ)
    results = {}
    for again in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, inputs = tiny_gpt(tp=2, sequence_parallel=True, layers=LAYERS, **sizes), batch(BATCH, SEQ)
        options = {"codegen": "eager", "recompute": "none", "regather": again}
        call = torch.compile(model, backend="mindspeed", fullgraph=True, options=options)
        with recorder.collecting() as records:
            loss, gradients = train(model, inputs, call)
        (record,) = records
        results[again] = (
            loss,
            gradients,
            bytes_kept(call, model, inputs),
            record.counts.get("sharding.regather", 0),
        )
    (loss, gradients, whole, none), (same, same_gradients, parts, marked) = results[False], results[True]
    print("bytes kept", whole, parts, "marked", none, marked)
    assert torch.equal(loss, same) and all(torch.equal(gradients[n], g) for n, g in same_gradients.items())
    # of each layer what enters attention and the MLP, and what enters the output layer: half of it is a rank's own
    gathers = 2 * LAYERS + 1
    assert (none, marked) == (0, gathers)
    assert whole - parts == gathers * SEQ * BATCH * HIDDEN * 4 / 2
    dist.destroy_process_group()


def test_a_rank_keeps_its_own_tokens_alone(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"),))
