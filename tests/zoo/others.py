"""Models of Megatron-core, litgpt and torchtitan, tiny and with random weights, that return an object with a ``loss``
as transformers' do.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F

from tests.zoo import titan
from tests.zoo.architectures import Output

MEGATRON: dict[str, dict[str, Any]] = {
    "gpt": dict(kv_heads=4),
    "grouped": {},
    "gelu": dict(gated_linear_unit=False, activation_func=F.gelu, add_bias_linear=True),
    "squared-relu": dict(gated_linear_unit=False, activation_func=lambda x: torch.pow(F.relu(x), 2)),
    "interleaved-rope": dict(rotary_interleaved=True),
    "tied": dict(tie=True),
    "qkv-bias": dict(add_qkv_bias=True),
    "window": dict(window_size=(7, 0)),
    "moe": dict(experts=4),
    "latent": dict(latent=True),
    "latent-yarn": dict(latent=True, rope_type="yarn", original_max_position_embeddings=8),
}
NOTES = {"megatron/moe": "eager experts run one by one, compiled ones as one grouped product: one swiglu for 4"}
LITGPT = (
    "Llama-3-8B",
    "Llama-2-7b-hf",
    "pythia-14m",
    "Gemma-2b",
    "Gemma-2-2b",
    "phi-2",
    "Phi-3-mini-4k-instruct",
    "Qwen2.5-0.5B",
    "Qwen3-0.6B",
    "Mixtral-8x7B-v0.1",
    "falcon-7b",
    "OLMo-2-1124-7B",
    "stablelm-3b-4e1t",
)


def names(sources: dict[str, str]) -> list[str]:
    """``megatron/...`` where Megatron-core is installed, ``litgpt/...`` and ``torchtitan/...`` where ``sources`` names
    their folders.
    """
    megatron = MEGATRON if importlib.util.find_spec("megatron") is not None else ()
    return [
        *(f"megatron/{n}" for n in megatron),
        *(f"litgpt/{n}" for n in (LITGPT if "litgpt" in sources else ())),
        *(f"torchtitan/{n}" for n in (titan.MODELS if "torchtitan" in sources else ())),
    ]


def build(name: str, sources: dict[str, str]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in training mode, in float64, and inputs of one step."""
    source, kind = name.split("/", 1)
    torch.manual_seed(0)
    if source == "megatron" and kind in MEGATRON:
        return _megatron(**MEGATRON[kind])
    if source == "litgpt":
        return _litgpt(kind, sources[source])
    if source == "torchtitan" and kind in titan.MODELS:
        return titan.build(kind, sources[source])
    raise ValueError(f"architecture {name!r}: valid: {', '.join(names(sources))}")


class _Megatron(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Output:
        return Output(self.model(**inputs).mean())


def _megatron(**config: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    import mindspeed_fx.megatron
    from tests.megatron import gpt_models

    mindspeed_fx.megatron.apply()
    gpt_models.start()
    return _Megatron(gpt_models.tiny_gpt(**config).double().train()), gpt_models.batch()


class _Litgpt(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> Output:
        logits = self.model(ids)
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def _litgpt(kind: str, folder: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """litgpt's GPT of a configuration that it names; its package and its converter of checkpoints, which need
    lightning, are not run.
    """
    if "litgpt" not in sys.modules:
        package, converter = types.ModuleType("litgpt"), types.ModuleType("litgpt.scripts.convert_hf_checkpoint")
        package.__path__ = [str(pathlib.Path(folder) / "litgpt")]
        converter.qkv_reassemble = None
        sys.modules |= {"litgpt": package, "litgpt.scripts.convert_hf_checkpoint": converter}
    from litgpt.config import Config
    from litgpt.model import GPT

    small = dict(
        n_layer=2,
        n_embd=64,
        n_head=4,
        head_size=16,
        intermediate_size=96,
        block_size=32,
        padded_vocab_size=128,
        vocab_size=128,
        sliding_window_size=8,
    )
    default = Config.from_name(kind)
    small["n_query_groups"] = 4 if default.n_query_groups == default.n_head else 1 if default.n_query_groups == 1 else 2
    if default.n_expert:
        small |= dict(n_expert=4, n_expert_per_token=2)
    if default.sliding_window_indices is not None:
        small["sliding_window_indices"] = [1, 0]
    small = {k: v for k, v in small.items() if getattr(default, k, None) is not None}
    model = GPT(Config.from_name(kind, **small)).double().train()
    return _Litgpt(model), dict(ids=torch.randint(3, 100, (2, 16)))
