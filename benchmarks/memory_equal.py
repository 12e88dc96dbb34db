"""Step time at equal measured peak: memory_budget beside torch's activation_memory_budget, a checkpoint per layer, and
recomputed attention.

    python -m benchmarks.memory_equal [--models llama,gpt2,mixtral] [--attention sdpa] [--layers 4] [--seq 512] [--batch
    4] [--rounds 5]
        [--ours 0.05,0.2,0.4,0.6,0.8,1] [--torch 0.05,0.2,0.4,0.6,0.8,1] [--passes all, or recompute: ours without fused
        operators]

Hugging Face models of hidden 512, vocabulary 8192, float32, all under Inductor. "layer" is torch.utils.checkpoint
around every layer, "selective" around the core of attention (Megatron's selective mode); torch's budget plans the rest
of neither. Each planner is swept. A line of the second table is a
peak that a rival reaches: the fastest of all rivals' programs within it, and the fastest of ours within it. Peaks are
allocation events, gradients of parameters left out; what Inductor cannot run with a rival's setting is named.
"""

from __future__ import annotations

import copy
import importlib
import logging
import math
import statistics
import warnings
from typing import Any, Callable

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import common
from benchmarks.whole_models import HUGGING_FACE, Loss

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
PASSES = {"all": {}, "recompute": {"passes": ["recompute.*"]}}


def build(name: str, attention: str, layers: int) -> torch.nn.Module:
    kind, sizes = HUGGING_FACE[name]
    depth = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**sizes, depth: layers}, pad_token_id=0), attn_implementation=attention
    )
    model.loss_type = "ForCausalLM"
    return model


def recomputed_attention(model: torch.nn.Module, attention: str) -> torch.nn.Module:
    """``model``, its core of attention under a checkpoint: Megatron's selective recompute."""
    core = (
        importlib.import_module(type(model).__module__).eager_attention_forward
        if attention == "eager"
        else ALL_ATTENTION_FUNCTIONS[attention]
    )

    def selective(
        owner: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        **named: Any,
    ) -> Any:
        return checkpoint(lambda *args: core(owner, *args, **named), q, k, v, mask, use_reentrant=False)

    ALL_ATTENTION_FUNCTIONS.register("selective", selective)
    ALL_MASK_ATTENTION_FUNCTIONS.register("selective", ALL_MASK_ATTENTION_FUNCTIONS[attention])
    model.config._attn_implementation = "selective"
    return model


def inductor(fraction: float) -> Callable:
    """Inductor at torch's own budget; one backend per fraction, so that Dynamo keeps their programs apart."""

    def backend(gm: torch.fx.GraphModule, inputs: list) -> Callable:
        from torch._inductor.compile_fx import compile_fx

        with functorch_config.patch(activation_memory_budget=fraction):
            return compile_fx(gm, inputs)

    return backend


def programs(name: str, arg: Any) -> tuple[dict[str, common.Step], int]:
    """Name -> one training step, every one with the same weights; and the bytes of the gradients."""
    torch.manual_seed(0)
    model = build(name, arg.attention, arg.layers)
    ids = torch.randint(0, 8192, (arg.batch, arg.seq))
    named = dict(input_ids=ids, labels=ids, use_cache=False)

    def step(owner: torch.nn.Module, **how: Any) -> common.Step:
        wrapped = Loss(owner)
        return common.training_step(owner, torch.compile(wrapped, **how), named, lambda loss: loss)

    steps = {f"torch {f}": step(model, backend=inductor(float(f))) for f in arg.torch.split(",")}
    layered = copy.deepcopy(model)
    layered.gradient_checkpointing_enable({"use_reentrant": False})
    steps["layer"] = step(layered.train(), backend=inductor(1.0))
    steps["selective"] = step(recomputed_attention(copy.deepcopy(model), arg.attention), backend=inductor(1.0))
    for f in arg.ours.split(","):
        steps[f"ours {f}"] = step(model, backend="mindspeed", options={"memory_budget": float(f), **PASSES[arg.passes]})
    return steps, common.gradient_bytes(model)


def compare(name: str, arg: Any) -> list[float]:
    """Ours over the best rival, at each peak of the rivals' front."""
    torch._dynamo.reset()
    steps, gradients = programs(name, arg)
    losses, peaks = {}, {}
    for who, step in list(steps.items()):
        try:
            losses[who] = step().item()
            peaks[who] = common.peak_bytes(step, gradients)
        except Exception as error:  # noqa: BLE001  a rival that cannot run is said so, and the others still race
            print(f"{who}: {type(error).__name__}: {str(error).splitlines()[0]}")
            del steps[who]
    first = next(iter(losses.values()))
    assert all(math.isclose(loss, first, rel_tol=1e-4) for loss in losses.values()), losses
    times = {who: statistics.median(t) for who, t in common.interleaved(steps, arg.rounds, 1).items()}
    common.header(
        f"{name}, attention {arg.attention}, {arg.layers} layers, {arg.batch} x {arg.seq} tokens, passes of "
        f"ours: {arg.passes}; medians of {arg.rounds} interleaved"
    )
    print(f"{'program':<12}{'peak MiB':>10}{'ms':>9}")
    for who in steps:
        print(f"{who:<12}{peaks[who] / 2**20:>10.1f}{times[who] * 1e3:>9.1f}")
    print(f"{'peak MiB':>10}  {'best rival':<12}{'ms':>9}  {'best of ours':<12}{'ms':>9}{'ratio':>8}")
    ratios, before = [], math.inf
    rivals = [who for who in steps if not who.startswith("ours")]
    for level in sorted(peaks[who] for who in rivals):
        best, own = (
            min((w for w in group if peaks[w] <= level), key=times.__getitem__, default=None)
            for group in (rivals, [w for w in steps if w not in rivals])
        )
        if times[best] >= before:
            continue  # no rival is faster for having more memory
        before = times[best]
        ratio = times[own] / before if own else math.inf
        ratios.append(ratio)
        print(
            f"{level / 2**20:>10.1f}  {best:<12}{before * 1e3:>9.1f}  "
            f"{own or '-':<12}{times[own] * 1e3 if own else math.inf:>9.1f}{ratio:>8.3f}",
            flush=True,
        )
    return ratios


def main() -> None:
    arg = common.arguments(
        models="llama,gpt2,mixtral",
        attention="sdpa",
        layers=4,
        seq=512,
        batch=4,
        rounds=5,
        ours="0.05,0.2,0.4,0.6,0.8,1",
        torch="0.05,0.2,0.4,0.6,0.8,1",
        passes="all",
    )
    dynamo_config.recompile_limit = 64  # every program is one more for the same code
    ratios = [r for name in arg.models.split(",") for r in compare(name, arg)]
    print(
        f"{len(ratios)} peaks: geometric mean {math.exp(statistics.mean(map(math.log, ratios))):.3f}, worst "
        f"{max(ratios):.3f} of the best rival's time"
    )


if __name__ == "__main__":
    main()
