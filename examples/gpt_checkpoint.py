"""Checkpoints of pretrain_gpt.py by Megatron's dist_checkpointing: with the same ranks a run goes on bitwise, with
other parallel sizes to rounding.
"""

from __future__ import annotations

import os
import pathlib
import random
import shutil
from argparse import Namespace
from typing import Any

import gpt_arguments
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.utils import unwrap_model

LATEST = "latest_checkpointed_iteration.txt"
"""Megatron's name of the file that tells the last whole checkpoint."""


def save(trainer: Any) -> None:
    """Write ``SAVE/iter_0000100``; once it is whole, ``LATEST`` names it and the one before goes."""
    root = pathlib.Path(trainer.args.save)
    folder = root / f"iter_{trainer.step:07d}"
    if trainer.args.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it wrote
        folder.mkdir(parents=True)
    dist.barrier()
    state = make_state(trainer, loading=False)
    state |= {
        "iteration": trainer.step,
        "log": trainer.log,
        "settings": read_settings(trainer.args, trainer.corpus.fingerprint),
        "ranks": read_ranks(trainer.args),
    }
    dist_checkpointing.save(state, str(folder), content_metadata=make_metadata(trainer.args, stored=True))
    if trainer.args.rank == 0:
        before = root / f"iter_{read_latest(root):07d}"
        partial = root / f"{LATEST}.partial"
        partial.write_text(str(trainer.step))
        os.replace(partial, root / LATEST)
        if before != folder:
            shutil.rmtree(before, ignore_errors=True)
    dist.barrier()


def load(trainer: Any) -> None:
    """Go on from the last whole checkpoint of ``--load``; ends the run where there is none, or one of another run."""
    args, root = trainer.args, pathlib.Path(trainer.args.load)
    folder = root / f"iter_{read_latest(root):07d}"
    if not folder.is_dir():
        gpt_arguments.fail(f"--load: there is no checkpoint in {root}")
    common = dist_checkpointing.load_common_state_dict(str(folder))
    refuse_others(common["settings"], read_settings(args, trainer.corpus.fingerprint), folder)
    state = make_state(trainer, loading=True)
    if common["ranks"] != read_ranks(args):
        del state["random"]  # noise is drawn by rank: other ranks draw their own
    state = dist_checkpointing.load(state, str(folder))
    for name, chunk in name_chunks(trainer):
        chunk.load_state_dict(state[name])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.load_state_dict(state["scheduler"])
    trainer.step, trainer.log = state["iteration"], state["log"]
    if "random" in state:
        set_random_state(state["random"])


def refuse_others(stored: dict[str, Any], now: dict[str, Any], folder: pathlib.Path) -> None:
    """End the run where the checkpoint is of one with other settings."""
    others = [name for name in now if stored.get(name) != now[name]]
    if others:
        told = "; ".join(f"--{n.replace('_', '-')} {stored.get(n)}, not {now[n]}" for n in others)
        gpt_arguments.fail(f"--load: {folder} was written with {told}")


def read_latest(root: pathlib.Path) -> int:
    """Iteration of the last whole checkpoint; 0 where there is none."""
    file = root / LATEST
    return int(file.read_text()) if file.exists() else 0


def read_settings(args: Namespace, fingerprint: str) -> dict[str, Any]:
    """What the next steps depend on."""
    return {**{name: getattr(args, name) for name in gpt_arguments.RESUME}, "data": f"text {fingerprint}"}


def read_ranks(args: Namespace) -> list[int]:
    """Sizes by which ranks, and the random numbers that each draws, are told apart."""
    return [args.world_size, args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
            args.context_parallel_size, args.expert_model_parallel_size]  # fmt: skip


def make_metadata(args: Namespace, stored: bool) -> dict[str, Any]:
    """How the optimizer's state is divided among files: so that other parallel sizes can read it."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if args.use_distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    if not stored:
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return metadata


def name_chunks(trainer: Any) -> list[tuple[str, torch.nn.Module]]:
    """This rank's chunks by their names in a checkpoint."""
    chunks = unwrap_model(trainer.model)
    return [(f"model{i}" if len(chunks) > 1 else "model", chunk) for i, chunk in enumerate(chunks)]


def make_state(trainer: Any, loading: bool) -> dict[str, Any]:
    """The parts of a checkpoint that differ from rank to rank, each with its place in the whole."""
    metadata = make_metadata(trainer.args, stored=False)
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in name_chunks(trainer)}
    optimizer = trainer.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    world, rank = trainer.args.world_size, trainer.args.rank
    state |= {"optimizer": optimizer, "scheduler": trainer.scheduler.state_dict()}
    state["random"] = ShardedObject("random", get_random_state(), (world,), (rank,))
    return state


def get_random_state() -> dict[str, Any]:
    """Of every generator of this rank."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """What :func:`get_random_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
