"""Tensor parallel 2 and sequence parallel over gloo: the single-process model's loss and gradients, in one graph."""

import os

import pytest
import torch
import torch.multiprocessing as mp


def shard(name, full, like, rank):
    """This rank's part of a full parameter. fc1 holds gate and up, each split by itself; qkv is split by group."""
    dims = [d for d in range(full.dim()) if full.shape[d] != like.shape[d]]
    if not dims:
        return full
    if "linear_fc1" in name:
        return torch.cat([part.chunk(2, 0)[rank] for part in full.chunk(2, 0)], 0)
    return full.chunk(2, dims[0])[rank]


def worker(rank, store, path, sequence_parallel, results):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import torch.distributed as dist
    from megatron.core import parallel_state

    import mindspeed_fx
    import mindspeed_fx.megatron_adaptor  # noqa: F401
    from tests.megatron.gpt_models import batch, start, tiny_gpt, train

    start(2, rank, 2, store)
    full = torch.load(path)
    model = tiny_gpt(tp=2, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(shard(name, full["state"][name], p, rank))
    compiled = torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    loss, grads = train(model, batch(), compiled)
    if sequence_parallel:
        for name, p in model.named_parameters():
            if getattr(p, "sequence_parallel", False):
                dist.all_reduce(grads[name], group=parallel_state.get_tensor_model_parallel_group())
    worst = max(
        ((grads[n] - shard(n, full["grads"][n], g, rank)).abs().max() / full["grads"][n].abs().max()).item()
        for n, g in grads.items()
    )
    torch._dynamo.reset()
    report = mindspeed_fx.explain(model, options={"codegen": "eager", "hardware": "ascend910b2"}, **batch())
    results[rank] = {
        "loss": loss.item(),
        "worst": worst,
        "graphs": report.graph_count,
        "breaks": report.break_reasons,
        "counts": report.counts,
    }
    results[rank] |= {
        "notes": [
            n for g in report.graphs for r in g.runs if r.report.name == "sharding.recognize" for n in r.report.notes
        ]
    }
    dist.destroy_process_group()


@pytest.mark.slow  # test_two_ranks.py has the parts, test_example.py a whole run
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_equal_one(tmp_path, sequence_parallel):
    from tests.megatron.gpt_models import batch, tiny_gpt, train

    model = tiny_gpt()
    loss, grads = train(model, batch())
    torch.save({"state": dict(model.named_parameters()), "grads": grads}, tmp_path / "full.pt")
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(
            worker, args=(str(tmp_path / "store"), str(tmp_path / "full.pt"), sequence_parallel, results), nprocs=2
        )
        for rank in range(2):
            found = results[rank]
            assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
            assert found["worst"] < 2e-5
            assert found["graphs"] == 1 and found["breaks"] == []
            plans = [n for n in found["notes"] if "amount to" in n]
            own = "tp_sp" if sequence_parallel else "tp"
            assert any(
                n.startswith(f'modelled on 2 x ascend910b2, per layer and step: "{own}" has ') for n in found["notes"]
            ), found["notes"]
            assert sum(n.startswith('"') and ("loses" in n or "wins" in n) for n in found["notes"]) >= 4
            assert len(plans) == 2 and all(
                ('plan "tp_sp"' if sequence_parallel else 'plan "tp"') in n for n in plans
            ), found["notes"]
            assert (
                found["counts"]["fusion.attention"],
                found["counts"]["fusion.rms_norm"],
                found["counts"]["fusion.swiglu"],
                found["counts"]["fusion.rope"],
            ) == (2, 5, 2, 4)
