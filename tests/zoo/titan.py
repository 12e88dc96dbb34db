"""Models of torchtitan 0.2.2, tiny and with random weights.

Its package imports a trainer, whose requirements are not installed, when a model is; here only the files of the models
run, and what they import from the rest (base classes without behaviour, a logger, Triton's kernels of expert
parallelism) is empty. Its mixtures of experts count tokens by ``histc`` of integers, which torch has on CUDA alone, so
that every layer here is dense.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import pathlib
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F

from tests.zoo.architectures import Output

COMMON = dict(dim=64, n_layers=2, n_heads=4, vocab_size=128, max_seq_len=32)
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "Transformer", "TransformerModelArgs", dict(n_kv_heads=2, multiple_of=32)),
    "llama4": (
        "llama4",
        "Transformer",
        "TransformerModelArgs",
        dict(n_kv_heads=2, multiple_of=32, interleave_moe_layer_step=3),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepSeekV3Model",
        "DeepSeekV3ModelArgs",
        dict(
            inter_dim=96,
            n_dense_layers=2,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
    ),
    "qwen3": ("qwen3", "Qwen3Model", "Qwen3ModelArgs", dict(n_kv_heads=2, head_dim=16, hidden_dim=96)),
}


class _Model(torch.nn.Module):
    def __init__(self, args: Any) -> None:
        super().__init__()


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages of which every name is a class that does nothing."""

    WHERE = (
        "torchtitan.config",
        "torchtitan.components",
        "torchtitan.protocols",
        "torchtitan.tools",
        "torchtitan.distributed",
        "torchtitan.models.moe.kernels",
    )

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        found = any(name == w or name.startswith(f"{w}.") for w in self.WHERE)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def exec_module(self, module: types.ModuleType) -> None:
        def named(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "logger":
                return logging.getLogger(__name__)
            return _Model if name == "ModelProtocol" else type(name, (), {})

        module.__getattr__ = named


class Titan(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Output:
        logits = self.model(tokens)
        return Output(
            F.cross_entropy(
                logits.flatten(0, 1).float() if logits.dtype.itemsize == 2 else logits.flatten(0, 1),
                tokens.roll(-1, 1).flatten(),
            )
        )


def build(kind: str, folder: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in training mode, in float64, and inputs of one step."""
    if "torchtitan" not in sys.modules:
        sys.meta_path.insert(0, _Empty())
        for name in (
            "torchtitan",
            "torchtitan.models",
            *(f"torchtitan.models.{m}" for m, *_ in MODELS.values()),
            *(f"torchtitan.models.{m}.model" for m, *_ in MODELS.values()),
        ):
            sys.modules[name] = package = types.ModuleType(name)
            package.__path__ = [str(pathlib.Path(folder, *name.split(".")))]
    family, model, args, own = MODELS[kind]
    module = importlib.import_module(f"torchtitan.models.{family}.model.model")
    given = importlib.import_module(f"torchtitan.models.{family}.model.args")
    config = getattr(given, args)(**COMMON, **own)
    config.moe_impl = "standard"  # its trainer sets it
    made = getattr(module, model)(config)
    with torch.no_grad():
        made.init_weights(torch.device("cpu"))
    return Titan(made).double().train(), dict(tokens=torch.randint(3, 100, (2, 16)))
