"""The table of scenarios: how one is written, and what it is given.

    @scenario("torch/parametrize")
    def run_parametrize(run):
        model = ...
        return train(run, model, dict(x=...))

A scenario returns what is compared, tensors and numbers in dictionaries and lists; it compiles by ``run.compile`` or
gives ``run.name`` to a library.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests import forks

BACKENDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "eager": (None, {}),
    "inductor": ("inductor", {}),
    "aot_eager": ("aot_eager", {}),
    "mindspeed": ("mindspeed", {}),
    "passes": ("mindspeed", {"codegen": "eager"}),
    "read_once": ("mindspeed", {"codegen": "eager"}),
}
"""Name -> (backend of torch.compile, options). "passes" is ours without generated code, which compiles in a moment;
"read_once" the same with two layers of a class for many, of which Dynamo reads one (``compat/alike_layers.py``)."""

MODULES = (
    *("causal", "encoders", "images", "audio", "multimodal", "generation", "trainer", "adapters", "trl_losses"),
    *("timm_models", "vision", "diffusion", "x_models", "lightning_fit", "quantized", "titan_trainer"),
    *("parallel", "hooks", "functional", "modules", "optimizers", "tensors"),
)
"""Files of scenarios, in the order in which they run."""


@dataclass
class Scenario:
    name: str
    function: Callable[..., Any]
    module: str
    args: tuple[Any, ...] = ()


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, each: Iterable[Any] = (None,)) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table; with ``each`` once for every element, whose name is put for ``{}``."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for element in each:
            args = () if element is None else (element,)
            full = name.format(*args)
            if full in SCENARIOS:
                raise ValueError(f"two scenarios are called {full}")
            SCENARIOS[full] = Scenario(full, function, function.__module__, args)
        return function

    return enter


def load() -> dict[str, Scenario]:
    """All scenarios, by name."""
    for module in MODULES:
        importlib.import_module(f"tests.scenarios.{module}")
    return SCENARIOS


class Run:
    """One backend, as a scenario uses it."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.name, self.options = BACKENDS[label]
        if label == "read_once":
            from mindspeed_fx.compat import alike_layers

            alike_layers.FEWEST = 2
        if self.name == "mindspeed" and self.options:
            os.environ["MINDSPEED_FX_OPTIONS"] = json.dumps(self.options)  # for libraries that take a name alone

    def compile(self, target: Any, **how: Any) -> Any:
        """``torch.compile`` with the backend; ``target`` itself where it is eager."""
        return target if self.name is None else torch.compile(target, backend=self.name, **how)

    def ranks(self, work: Callable[..., Any], count: int = 2, **kwargs: Any) -> dict[str, Any]:
        """What ``work(rank, **kwargs)`` returns in ``count`` gloo processes, by rank."""
        with tempfile.TemporaryDirectory() as folder:
            port = forks.free_port()

            def start(rank: int) -> int:
                return forks.start(lambda: _run_rank(rank, count, port, folder, work, kwargs), f"{folder}/{rank}.txt")

            codes, late = forks.wait([start(rank) for rank in range(count)], 400, grace=5)
            outputs = [Path(folder, f"{rank}.txt").read_text(errors="replace") for rank in range(count)]
            if late or any(codes):
                raise RuntimeError("\n".join([f"exit statuses {codes}", *outputs]))
            torch._dynamo.utils.counters["stats"]["unique_graphs"] += int(Path(folder, "graphs").read_text())
            return {f"rank {r}": torch.load(f"{folder}/{r}.pt", weights_only=True) for r in range(count)}


def _run_rank(rank: int, count: int, port: int, folder: str, work: Callable[..., Any], kwargs: dict[str, Any]) -> int:
    import torch.distributed as dist

    forks.take_place(rank, count, port)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", count), rank=rank, world_size=count)
    torch.save(flatten(work(rank, **kwargs)), f"{folder}/{rank}.pt")
    if rank == 0:
        Path(folder, "graphs").write_text(str(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    if dist.is_initialized():  # a trainer may have ended it
        dist.barrier()
        dist.destroy_process_group()
    return 0


def flatten(values: Any, at: str = "") -> dict[str, torch.Tensor]:
    """{path: tensor} of what is nested, numbers too; DTensors are gathered, jagged tensors padded."""
    if isinstance(values, dict):
        pairs = values.items()
    elif isinstance(values, (list, tuple)):
        pairs = enumerate(values)
    elif values is None:
        return {}
    else:
        return {at: _plain(values)}
    flat: dict[str, torch.Tensor] = {}
    for name, value in pairs:
        flat |= flatten(value, f"{at}.{name}" if at else str(name))
    return flat


def _plain(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value)
    with torch.no_grad():
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if hasattr(value, "dequantize") and type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
            value = value.dequantize()
        if value.is_nested:
            value = value.to_padded_tensor(0.0)
        if value.is_sparse:
            value = value.to_dense()
        return value.detach().clone().contiguous()
