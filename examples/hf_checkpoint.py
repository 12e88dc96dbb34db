"""Checkpoints of train_hf.py by torch.distributed.checkpoint, written beside training: bitwise the same run on the same
mesh and plan, to rounding on another.

A checkpoint is written to ``step_0000100.partial`` and gets its name when all ranks have written, so that what has the
name is whole. Tensors are the library's own; everything else stands in ``state.json``.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from argparse import Namespace
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hf_arguments import RESUME, fail, flag
from torch.distributed.checkpoint import FileSystemReader

KEPT = 2
"""Checkpoints that stay."""
STATE, PARTIAL, OF_STAGE = "state.json", ".partial", "_of_stage_"


class Checkpoints:
    """Those under one folder.

    Args:
        args: of the run; ``save`` is the folder.
    """

    def __init__(self, args: Namespace):
        self.args, self.root = args, pathlib.Path(args.save)
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None  # messages beside training's
        self.future: Future | None = None
        self.folder: pathlib.Path | None = None
        if args.rank == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            for left in self.root.glob(f"step_*{PARTIAL}"):  # of a run that was killed while it wrote
                shutil.rmtree(left, ignore_errors=True)
            for old in [] if goes_on(args) else self.whole():
                shutil.rmtree(old)
        self.barrier()

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    def whole(self) -> list[pathlib.Path]:
        """Checkpoints that all ranks have written, the last one last."""
        return sorted(p for p in self.root.glob("step_*") if p.suffix != PARTIAL and (p / STATE).is_file())

    def save(self, trainer: Any) -> None:
        """Write the trainer's state; returns once it is copied, and writes on while training goes on."""
        self.finish()
        self.folder = self.root / f"step_{trainer.step:07d}"
        partial = self.folder.with_suffix(PARTIAL)
        if self.args.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            (partial / STATE).write_text(json.dumps(trainer.read_state() | {"settings": read_settings(trainer)}))
        self.barrier()
        tensors = make_tensors(trainer)
        if self.args.async_save:
            self.future = dcp.async_save(tensors, checkpoint_id=partial, process_group=self.group)
            return
        dcp.save(tensors, checkpoint_id=partial, process_group=self.group)
        self._name()

    def poll(self) -> None:
        """Give a checkpoint its name if it is whole by now; nobody waits."""
        if self.future is not None and self.future.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last one is whole.

        Raises:
            whatever writing it raised.
        """
        if self.future is not None:
            self.future.result()
            self.future = None
            self._name()

    def _name(self) -> None:
        """The first rank's writer returns when all have written."""
        assert self.folder is not None
        if self.args.rank == 0:
            os.replace(self.folder.with_suffix(PARTIAL), self.folder)
            for old in self.whole()[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def load(self, trainer: Any) -> bool:
        """Go on from the last checkpoint; False where there is none. Ends the run where it is of another run."""
        last: list[Any] = [None]
        if self.args.rank == 0 and goes_on(self.args) and (whole := self.whole()):
            last = [str(whole[-1])]
        if self.group is not None:
            dist.broadcast_object_list(last, src=0, group=self.group)
        if last[0] is None:
            if self.args.resume == "require":
                fail(f"--resume require: there is no checkpoint in {self.root}")
            return False
        folder = pathlib.Path(last[0])
        state = json.loads((folder / STATE).read_text())
        refuse_others(state["settings"], read_settings(trainer), folder)
        tensors = make_tensors(trainer)
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors["random"] = {n: t for n, t in tensors["random"].items() if f"random.{n}" in stored}
        dcp.load(tensors, checkpoint_id=folder, process_group=self.group)
        for name, value in tensors["random"].items():  # a stage's own is after that of one device
            set_random_state(name.partition(OF_STAGE)[0], value)
        trainer.write_state(state)
        return True


def goes_on(args: Namespace) -> bool:
    """Whether a checkpoint is looked for: processes that torchrun's agent starts again always go on."""
    return args.resume != "never" or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def make_tensors(trainer: Any) -> dict[str, Any]:
    """Parameters, buffers, the optimizer's state by parameter, and generators; loading writes into them in place.

    Tied parameters are stored once. Random numbers are those of one device, whatever the plan, so their state is that
    of every rank; the ranks of a pipeline draw their own layers' numbers alone, and each has a state of its own.
    """
    model = trainer.losses.model
    parameters = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    names = trainer.saved - tied  # stages have buffers too that are none of a checkpoint
    whole = {n: t.detach() for n, t in model.state_dict().items() if n in names and isinstance(t, torch.Tensor)}
    optimizer = trainer.optimizer
    fill_state(optimizer)
    states = {n: dict(optimizer.state[p]) for n, p in parameters.items() if p in optimizer.state}
    random = {"cpu": torch.get_rng_state()}
    if trainer.device.type != "cpu":
        random["device"] = getattr(torch, trainer.device.type).get_rng_state()
    if trainer.pipeline is not None:
        random |= {f"{name}{OF_STAGE}{trainer.pipeline.rank}": state.clone() for name, state in random.items()}
    return {"model": whole, "optimizer": states, "random": random}


def set_random_state(name: str, state: torch.Tensor) -> None:
    if name == "cpu":
        torch.set_rng_state(state)
    else:
        getattr(torch, torch.accelerator.current_accelerator().type).set_rng_state(state)


def fill_state(optimizer: torch.optim.AdamW) -> None:
    """AdamW's state as it is before its first step, for parameters that have none."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and not optimizer.state[p]:
                moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[p] = {"step": torch.zeros(()), **moments}


def read_settings(trainer: Any) -> dict[str, Any]:
    """What the next steps depend on; plan, mesh, accumulation and compiler may be others: the values are then the same
    to rounding.
    """
    settings = {name: getattr(trainer.args, name) for name in RESUME}
    return json.loads(json.dumps({**settings, "data": trainer.documents.fingerprint}))


def refuse_others(stored: dict[str, Any], now: dict[str, Any], folder: pathlib.Path) -> None:
    """End the run where the checkpoint is of one with other settings."""
    others = [name for name in now if stored.get(name) != now[name]]
    if others:
        words = "; ".join(f"{flag(n)} {stored.get(n)}, not {now[n]}" for n in others)
        fail(f"{folder} was written with {words}; give another --save, or --resume never, which removes it")
