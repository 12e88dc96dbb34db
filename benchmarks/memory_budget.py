"""Fractions of memory_budget against torch's activation_memory_budget: measured peak and step time. The case of pytorch
#197838, small.

    python -m benchmarks.memory_budget [--layers 8] [--hidden 128] [--batch 4] [--seq 256] [--rounds 5, 0 for peaks
    alone] [--fractions 0.05,0.1,...,1]

A Llama-style model on CPU without generated code: torch is aot_eager_decomp_partition at that budget, ours is codegen
"eager" with memory_budget. Both run the operators of ATen one by one, but ours with fused operators, so peaks compare
as ratios of each one's own peak at 1.0, and in MB. Peaks are allocation events, gradients of parameters left out.
"""

from __future__ import annotations

import statistics

import torch
import torch._functorch.config as functorch_config
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import common
from benchmarks.whole_models import Loss


def main() -> None:
    arg = common.arguments(
        layers=8,
        hidden=128,
        batch=4,
        seq=256,
        vocab=512,
        rounds=5,
        fractions="0.05,0.1,0.15,0.2,0.25,0.35,0.5,0.75,0.9,1",
    )
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=arg.hidden,
        intermediate_size=arg.hidden * 11 // 4,
        num_hidden_layers=arg.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=arg.vocab,
    )
    model = Loss(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), attn_implementation="sdpa"))
    ids = torch.randint(0, arg.vocab, (arg.batch, arg.seq))
    named = dict(input_ids=ids, labels=ids, use_cache=False)
    common.header(
        f"{arg.layers} layers, hidden {arg.hidden}, batch {arg.batch}, sequence {arg.seq}; peaks in MB without "
        f"the gradients of parameters, times in ms (median of {arg.rounds}, interleaved)"
    )
    print(
        f"{'budget':>6} {'torch MB':>9} {'ours MB':>9} {'ours/torch':>10} {'torch ms':>9} {'ours ms':>9} "
        f"{'ours/torch':>10}"
    )
    peaks: dict[str, list[int]] = {"torch": [], "ours": []}
    for fraction in map(float, arg.fractions.split(",")):
        steps = {}
        torch._dynamo.reset()
        for name in peaks:  # no reset in between: the first would be compiled again, at another budget
            options = {"options": {"codegen": "eager", "memory_budget": fraction}} if name == "ours" else {}
            compiled = torch.compile(
                Loss(model.model), backend="mindspeed" if name == "ours" else "aot_eager_decomp_partition", **options
            )
            steps[name] = common.training_step(model, compiled, named, lambda loss: loss)
            with functorch_config.patch(activation_memory_budget=fraction if name == "torch" else 1.0):
                steps[name]()
        times = common.interleaved(steps, arg.rounds, 1) if arg.rounds else {}
        for name, step in steps.items():
            peaks[name].append(common.peak_bytes(step, common.gradient_bytes(model)))
        a, b = (peaks[n][-1] / 1e6 for n in ("torch", "ours"))
        timed = ""
        if times:
            s, t = (statistics.median(times[n]) * 1e3 for n in ("torch", "ours"))
            timed = f" {s:>9.1f} {t:>9.1f} {t / s:>10.3f}"
        print(f"{fraction:>6.2f} {a:>9.1f} {b:>9.1f} {b / a:>10.3f}{timed}", flush=True)
    for name, result in peaks.items():
        print(f"{name}: {'monotone' if all(x <= y for x, y in zip(result, result[1:])) else 'not monotone'}")


if __name__ == "__main__":
    main()
