"""Two gloo processes: a model written for one device under plan "tp_sp", beside Megatron-core's own tensor and sequence
parallelism.

    python -m benchmarks.tp_sp_gloo [--optimizer]

The same model twice, with the same weights: Megatron's GPT of examples/pretrain_gpt.py (8 layers of 384, 6 heads, 2
groups of keys, float32, vocabulary of 256, 4 sequences of 256) built for two tensor-parallel ranks, and a plain Llama
of these sizes, parallelized. A step is forward, backward and whatever sums gradients over the ranks (with --optimizer
also clipping and AdamW). One thread per process; medians over interleaved rounds, each begun together.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LAYERS, HIDDEN, HEADS, KV, FFN, SEQ, VOCAB, BATCH = 8, 384, 6, 2, 1024, 256, 256, 4
HERE = Path(__file__).resolve().parent


def parts(whole: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """This rank's parameters of the Megatron model from those of the plain one."""

    def mine(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.chunk(2, dim)[rank]

    results = {
        "embedding.word_embeddings.weight": mine(whole["embed.weight"], 0),
        "decoder.final_layernorm.weight": whole["norm.weight"],
        "output_layer.weight": mine(whole["head.weight"], 0),
    }
    for i in range(LAYERS):
        here, existing = f"layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (whole[f"{here}self_attention.{n}_proj.weight"].view(KV, -1, HIDDEN) for n in "qkv")
        results[f"{existing}self_attention.linear_qkv.weight"] = mine(torch.cat([q, k, v], 1), 0).flatten(0, 1)
        results[f"{existing}self_attention.linear_proj.weight"] = mine(whole[f"{here}self_attention.o_proj.weight"], 1)
        results[f"{existing}mlp.linear_fc1.weight"] = torch.cat(
            [mine(whole[f"{here}mlp.{n}_proj.weight"], 0) for n in ("gate", "up")]
        )
        results[f"{existing}mlp.linear_fc2.weight"] = mine(whole[f"{here}mlp.down_proj.weight"], 1)
        results[f"{existing}input_layernorm.weight"], results[f"{existing}pre_mlp_layernorm.weight"] = (
            whole[f"{here}input_norm.weight"],
            whole[f"{here}post_norm.weight"],
        )
    return results


def megatron(whole: dict[str, torch.Tensor], rank: int) -> Any:
    from tests.megatron.gpt_models import tiny_gpt

    model = tiny_gpt(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=KV,
        ffn=FFN,
        vocab=VOCAB,
        seq=SEQ,
        tp=2,
        sequence_parallel=True,
    )
    arg = parts(whole, rank)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(arg.pop(name))
    assert not arg, arg.keys()
    return model


def sequence_gradients(model: Any) -> None:
    """What Megatron leaves to the training loop: the sum of the gradients that each rank has a part of."""
    from megatron.core import parallel_state

    grads = [p.grad for p in model.parameters() if getattr(p, "sequence_parallel", False)]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=parallel_state.get_tensor_model_parallel_group())
    for grad, part in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(part.view_as(grad))


def worker(rank: int, store: str, rounds: int, optimizer: bool, rivals_wanted: list[str]) -> None:
    torch.set_num_threads(1)
    from torch.distributed.device_mesh import init_device_mesh

    import mindspeed_fx
    import mindspeed_fx.megatron_adaptor  # noqa: F401
    from benchmarks import plan_models
    from tests.megatron.gpt_models import start

    start(2, rank, 2, store)
    torch.manual_seed(0)
    plain = plan_models.Decoder(
        VOCAB,
        HIDDEN,
        HIDDEN // HEADS,
        [
            plan_models.Layer(HIDDEN, plan_models.Attention(HIDDEN, HEADS, KV), plan_models.MLP(HIDDEN, FFN))
            for _ in range(LAYERS)
        ],
        base=10000.0,
    )
    whole = {n: p.detach().clone() for n, p in plain.named_parameters()}
    ids = torch.randint(0, VOCAB, (BATCH, SEQ))
    labels = ids.roll(-1, 1)
    arguments = dict(input_ids=ids, position_ids=torch.arange(SEQ).expand_as(ids), attention_mask=None, labels=labels)
    steps: dict[str, Callable[[], torch.Tensor]] = {}

    def add(name: str, model: Any, loss_of: Callable[[], torch.Tensor], after: Callable[[], None]) -> None:
        result = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True) if optimizer else None

        def step() -> torch.Tensor:
            for p in model.parameters():
                p.grad = None
            loss = loss_of()
            loss.backward()
            after()
            if result is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                result.step()
            return loss.detach()

        steps[name] = step

    for name in rivals_wanted:
        torch._dynamo.reset()
        if name.startswith("megatron"):
            model = megatron(whole, rank)
            run = model if name == "megatron eager" else torch.compile(model, backend=name.split()[1], fullgraph=True)
            add(name, model, lambda run=run: run(**arguments).mean(), lambda model=model: sequence_gradients(model))
        else:
            model = mindspeed_fx.parallelize(
                copy.deepcopy(plain), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "tp_sp"
            )
            run = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=False)
            add(name, model, lambda run=run: run(ids, labels), lambda: None)
        first = steps[name]()
        if rank == 0:
            print(f"# {name}: loss {first.item():.6f}", flush=True)
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    if rank == 0:
        print(f"{'rival':<22}{'median ms':>11}{'min ms':>9}{'max ms':>9}   plan tp_sp over it: median, paired")
        own = times["plan tp_sp"]
        for name, t in times.items():
            print(
                f"{name:<22}{statistics.median(t) * 1e3:>11.1f}{min(t) * 1e3:>9.1f}{max(t) * 1e3:>9.1f}   "
                f"{statistics.median(own) / statistics.median(t):.3f}, "
                f"{statistics.median(a / b for a, b in zip(own, t)):.3f}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--optimizer", action="store_true", help="clipping and AdamW are part of the step")
    parser.add_argument(
        "--rivals", nargs="+", default=["megatron eager", "megatron inductor", "megatron mindspeed", "plan tp_sp"]
    )
    args = parser.parse_args()
    print(
        f"# {datetime.date.today()} torch {torch.__version__}, two gloo processes, one thread each, {os.cpu_count()} "
        f"cores, load {os.getloadavg()[0]:.1f}{', with clipping and AdamW' if args.optimizer else ''}"
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (f"{folder}/store", args.rounds, args.optimizer, args.rivals), nprocs=2)


if __name__ == "__main__":
    main()
