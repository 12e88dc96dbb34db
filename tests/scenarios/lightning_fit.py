"""Lightning's Trainer with a compiled module, and Fabric."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from tests.scenarios.hooks import Stack
from tests.scenarios.table import scenario

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": dict(accumulate_grad_batches=2),
    "clip": dict(gradient_clip_val=0.1),
    "bfloat16": dict(precision="bf16-mixed"),
    "validation": dict(limit_val_batches=2),
    "logging": {},
}


def preload() -> None:
    import lightning  # noqa: F401


def fit(run: Any, inside: bool = False, log: bool = False, **how: Any) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Stack(1)
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.model(batch[0]).square().mean()
            if log:
                self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.losses.append(self.model(batch[0]).abs().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    torch.manual_seed(0)
    module = Module()
    if inside:
        module.model = run.compile(module.model)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 8, 32)), batch_size=2)
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            dict(
                max_steps=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                accelerator="cpu",
                devices=1,
                default_root_dir=folder,
                enable_model_summary=False,
                num_sanity_val_steps=0,
            )
            | how
        )
        validation = data if "limit_val_batches" in how else None
        L.Trainer(**settings).fit(module if inside else run.compile(module), data, validation)
    weights = {k.replace("_orig_mod.", ""): v for k, v in module.state_dict().items()}
    return {"losses": module.losses, "weights": weights}


@scenario("lightning/fit/{}", SETTINGS)
def run_fit(run: Any, kind: str) -> Any:
    values = fit(run, log=kind == "logging", **SETTINGS[kind])
    if kind == "bfloat16":
        values = torch.utils._pytree.tree_map(lambda v: v.bfloat16(), values)
    return values


@scenario("lightning/fit/model_inside_compiled")
def run_inside(run: Any) -> Any:
    return fit(run, inside=True, log=True)


@scenario("lightning/fabric")
def run_fabric(run: Any) -> Any:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = Stack(1)
    prepared, optimizer = fabric.setup(run.compile(model), torch.optim.SGD(model.parameters(), 0.05))
    losses = []
    for x in torch.randn(2, 2, 8, 32):
        loss = prepared(x).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(prepared, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "weights": dict(model.named_parameters())}
