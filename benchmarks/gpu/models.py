"""Training steps of whole models of transformers on a CUDA device: eager, Inductor and mindspeed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import common
from mindspeed_fx.backend import mindspeed

from .measure import Peak, kernel_times, most, of_each

HIDDEN, LAYERS, VOCAB = 2048, 4, 32000
DENSE = dict(
    hidden_size=HIDDEN,
    intermediate_size=5632,
    num_hidden_layers=LAYERS,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=VOCAB,
)
STATE_SPACE = dict(mamba_n_heads=64, mamba_d_head=64, mamba_d_state=128)


@dataclass(frozen=True)
class Model:
    """A model of transformers and what a step of it is fed."""

    kind: str
    sizes: dict[str, Any]
    batch: int = 2
    tokens: int = 2048
    attention: str = "sdpa"
    autocast: bool = False
    """Weights in float32, computed in bfloat16."""
    without: tuple[str, ...] = ()
    """Rivals that take minutes."""


MODELS = {
    "llama": Model("llama", DENSE),
    "llama, attention by hand": Model("llama", DENSE, attention="eager"),
    "llama, autocast": Model("llama", DENSE, autocast=True),
    "qwen3": Model("qwen3", DENSE),
    "gemma2": Model("gemma2", {**DENSE, "sliding_window": 1024}, attention="eager"),
    "gpt2": Model("gpt2", dict(n_embd=HIDDEN, n_layer=LAYERS, n_head=16, n_positions=2048, vocab_size=50304), batch=4),
    "mixtral": Model("mixtral", {**DENSE, "num_local_experts": 8, "intermediate_size": 2816}),
    "qwen3_moe": Model(
        "qwen3_moe", {**DENSE, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
    ),
    "deepseek_v3": Model(
        "deepseek_v3",
        dict(
            hidden_size=HIDDEN,
            intermediate_size=5632,
            moe_intermediate_size=768,
            num_hidden_layers=LAYERS,
            num_attention_heads=16,
            num_key_value_heads=16,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            kv_lora_rank=512,
            q_lora_rank=768,
            first_k_dense_replace=1,
            vocab_size=VOCAB,
        ),
    ),
    "mamba2": Model(
        "mamba2",
        dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_heads=64, head_dim=64, n_groups=1, vocab_size=VOCAB),
        attention="eager",
    ),
    "falcon_h1": Model(
        "falcon_h1",
        {**DENSE, **STATE_SPACE, "mamba_d_ssm": 4096},
    ),
    "qwen3_next": Model(
        "qwen3_next",
        {
            **DENSE,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        without=("inductor",),
    ),
}


class Loss(torch.nn.Module):
    """What a training loop compiles: nothing but the loss leaves, so that the logits need not."""

    def __init__(self, model: torch.nn.Module, autocast: bool):
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            return self.model(**inputs).loss


def build(name: str, device: str = "cuda") -> tuple[Model, Loss, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    what = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(what.kind, **what.sizes, pad_token_id=0)
    for field in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=what.attention)
    model.loss_type = "ForCausalLM"
    model = model.to(torch.float32 if what.autocast else torch.bfloat16)
    ids = torch.randint(VOCAB, (what.batch, what.tokens), device=device)
    return what, Loss(model, what.autocast), dict(input_ids=ids, labels=ids, use_cache=False)


class WholeModel:
    """One model: its step compiled by every rival and compared once, then timed."""

    def __init__(self, name: str):
        what, self.model, inputs = build(name)
        self.steps: dict[str, common.Step] = {}
        for rival in ("eager", "mindspeed", "inductor"):
            if rival not in what.without:
                backend = mindspeed if rival == "mindspeed" else rival  # also where the package is not installed
                step = self.model if rival == "eager" else torch.compile(self.model, backend=backend, dynamic=False)
                self.steps[rival] = common.training_step(self.model, step, inputs, lambda loss: loss)

    def values(self) -> dict[str, float | str]:
        """Rival -> relative distance of its gradients from those of eager PyTorch in the same types; for eager PyTorch
        that of a second run, which is what its own atomic additions change."""
        exact: list[torch.Tensor] = []

        def distance(rival: str, step: common.Step) -> float | str:
            step()
            if not exact:
                exact.append(self._gradients())
                step()
            have = self._gradients()
            return ((have - exact[0]).norm() / exact[0].norm()).item() if have.shape == exact[0].shape else "lost"

        result = of_each(self.steps, distance)
        self._forget()
        return result

    def times(self, rounds: int) -> dict[str, dict[str, Any]]:
        """Rival -> median milliseconds of a step, MiB at its peak beyond what was there before it and gradients, and
        milliseconds that the device computes in one more step ("busy"), its launches, and both of the kernels that
        take most.
        """
        result: dict[str, dict[str, Any]] = {rival: {} for rival in self.steps}
        seconds: dict[str, list[float]] = {rival: [] for rival in self.steps}
        for turn in range(rounds + 2):
            for rival, step in self.steps.items():
                self._forget()
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                with Peak(True) as peak:
                    start.record()
                    step()
                    end.record()
                    end.synchronize()
                if turn >= 2:
                    seconds[rival].append(start.elapsed_time(end))
                result[rival]["MiB"] = peak.mib - common.gradient_bytes(self.model) / 2**20
        self._forget()
        return {
            rival: {"step": statistics.median(seconds[rival]), **result[rival], **self._busy(rival)} for rival in result
        }

    def _busy(self, rival: str) -> dict[str, Any]:
        kernels, _ = kernel_times(self.steps[rival])
        self._forget()
        return {
            "busy": sum(time for time, _ in kernels.values()),
            "launches": sum(count for _, count in kernels.values()),
            "kernels": most(kernels),
        }

    def _gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.cpu().float().flatten() for p in self.model.parameters() if p.grad is not None])

    def _forget(self) -> None:
        for p in self.model.parameters():
            p.grad = None
