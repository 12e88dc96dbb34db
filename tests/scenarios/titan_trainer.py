"""torchtitan's trainer, on a CPU, with the backend in ``compile.backend``.

Its device is the accelerator that it finds; here a processor, which has no table of memory to print, and gloo, which
has no barrier on a device and no sums that are scaled on the way.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import torch

from tests.scenarios.table import scenario

MODES: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp2": {},
    "fsdp2_no_checkpointing": dict(activation_checkpoint=dict(mode="none")),
    "fsdp2_full_checkpointing": dict(activation_checkpoint=dict(mode="full")),
    "tensor_parallel": dict(parallelism=dict(tensor_parallel_degree=2)),
    "tensor_parallel_no_checkpointing": dict(
        parallelism=dict(tensor_parallel_degree=2),
        activation_checkpoint=dict(mode="none"),
        compile=dict(components=["model"]),  # a compiled loss on divided logits fails with aot_eager too
    ),
    "ddp": dict(parallelism=dict(data_parallel_replicate_degree=2, data_parallel_shard_degree=1)),
    "accumulation": dict(training=dict(global_batch_size=8)),
    "pipeline": dict(parallelism=dict(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B")),
    "float8": dict(model=dict(converters=["quantize.linear.float8"])),
}


def preload() -> None:
    import importlib.machinery
    import sys
    import types

    import torch._utils

    kernels = types.ModuleType("torchtitan.models.moe.kernels")  # written in Triton, which is not on the path
    kernels.generate_permute_indices = None
    kernels.__spec__ = importlib.machinery.ModuleSpec(kernels.__name__, None)
    sys.modules[kernels.__name__] = kernels

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
    from torchtitan.components import metrics

    class Monitor:
        device_name, device_capacity_gib = "cpu", 1.0

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self) -> None:
            pass

    metrics.build_device_memory_monitor = Monitor
    import torchtitan.train  # noqa: F401
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.quantization import float8
    from torchtitan.distributed import utils

    float8.has_cuda_capability = lambda *_: True  # products of float8 run on a processor too
    utils.set_pg_timeouts = lambda *args, **how: None
    divide = FSDPModule.set_gradient_divide_factor

    def divide_apart(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_apart


@scenario(
    "torchtitan/{}",
    [f"{model}/{mode}" for model in ("llama3", "qwen3") for mode in MODES if model == "llama3" or mode == "fsdp2"],
)
def run_titan(run: Any, name: str) -> Any:
    return run.ranks(_train, run=run, name=name)


def _train(rank: int, run: Any, name: str) -> Any:
    import torchtitan.protocols.train_spec as specs
    from torchtitan.config import JobConfig
    from torchtitan.train import Trainer

    model, mode = name.split("/")
    spec = specs.get_train_spec(model)
    flavor = dataclasses.replace(
        spec.model_args["debugmodel"],
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=256,
        **(dict(head_dim=16, hidden_dim=96, enable_weight_tying=False) if model == "qwen3" else {}),
    )
    data = lambda dp_world_size, dp_rank, **_: _Batches(dp_rank)
    specs.register_train_spec(
        f"{model}_tiny",
        dataclasses.replace(spec, model_args={"tiny": flavor}, build_tokenizer_fn=None, build_dataloader_fn=data),
    )
    config = JobConfig()
    settings: dict[str, dict[str, Any]] = dict(
        model=dict(name=f"{model}_tiny", flavor="tiny"),
        training=dict(local_batch_size=2, seq_len=16, steps=2, mixed_precision_param="float32"),
        compile=dict(enable=run.name is not None, backend=run.name or "eager"),
        optimizer=dict(name="AdamW", lr=1e-3, implementation="for-loop", eps=1e-4),
        debug=dict(seed=1),
        metrics=dict(log_freq=1),
        parallelism={},
        activation_checkpoint={},
    )
    for part, values in (*settings.items(), *MODES[mode].items()):
        for key, value in values.items():
            assert hasattr(getattr(config, part), key), key
            setattr(getattr(config, part), key, value)
    config.job.dump_folder = tempfile.mkdtemp()
    torch.distributed.destroy_process_group()  # its own is made by the trainer
    trainer = Trainer(config)
    losses: list[Any] = []
    log = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, mean, most, norm, **how: (
        losses.append([float(mean), float(norm)]),
        log(step, mean, most, norm, **how),
    )
    trainer.train()
    weights = {n: p.detach().clone() for m in trainer.model_parts for n, p in m.named_parameters()}
    return {
        "losses": losses,
        "weights": {
            n.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): w for n, w in weights.items()
        },
    }


class _Batches:
    """Random tokens, other ones for every rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            ids = torch.randint(0, 256, (2, 17), generator=generator)
            yield {"input": ids[:, :-1]}, ids[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
