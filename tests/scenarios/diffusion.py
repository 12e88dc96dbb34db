"""Models and schedulers of diffusers: a step of training, and a loop that takes noise away."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.scenarios.steps import train
from tests.scenarios.table import scenario


def preload() -> None:
    import diffusers  # noqa: F401
    from diffusers import AutoencoderKL, DiTTransformer2DModel, UNet2DConditionModel, UNet2DModel  # noqa: F401


def unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def build(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    import diffusers

    x, at, text = torch.randn(2, 4, 8, 8), torch.tensor([3, 7]), torch.randn(2, 5, 32)
    if kind == "unet":
        return unet(), dict(sample=torch.randn(2, 3, 16, 16), timestep=at)
    if kind == "unet_condition":
        return diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            cross_attention_dim=32,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            attention_head_dim=4,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ), dict(sample=x, timestep=at, encoder_hidden_states=text)
    if kind == "dit":
        dit = diffusers.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=8
        )
        for block in dit.transformer_blocks:
            block.norm1.emb.class_embedder.dropout_prob = 0.0  # generated code draws numbers of its own
        return dit, dict(hidden_states=x, timestep=at, class_labels=at)
    if kind == "pixart":
        return diffusers.PixArtTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            num_layers=2,
            sample_size=8,
            cross_attention_dim=32,
            caption_channels=32,
            use_additional_conditions=False,
        ), dict(hidden_states=x, timestep=at, encoder_hidden_states=text, added_cond_kwargs={})
    if kind == "sd3":
        return diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            out_channels=4,
        ), dict(hidden_states=x, timestep=at, encoder_hidden_states=text, pooled_projections=torch.randn(2, 16))
    if kind == "flux":
        ids = torch.zeros(16, 3)
        ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
        return diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 6, 6),
        ), dict(
            hidden_states=torch.randn(2, 16, 4),
            timestep=at / 10,
            encoder_hidden_states=text,
            pooled_projections=torch.randn(2, 16),
            img_ids=ids,
            txt_ids=torch.zeros(5, 3),
        )
    if kind == "vae":
        return diffusers.AutoencoderKL(
            block_out_channels=(16, 32),
            norm_num_groups=8,
            latent_channels=4,
            sample_size=16,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ), dict(sample=torch.randn(2, 3, 16, 16))
    assert kind == "vq"
    return diffusers.VQModel(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        latent_channels=4,
        num_vq_embeddings=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ), dict(sample=torch.randn(2, 3, 16, 16))


@scenario("diffusers/{}", ("unet", "unet_condition", "dit", "pixart", "sd3", "flux", "vae", "vq"))
def run_model(run: Any, kind: str) -> Any:
    model, inputs = build(kind)
    with torch.no_grad():
        for name, p in model.named_parameters():  # gates that begin as zeros
            p.add_(0.05 * torch.randn_like(p)) if p.ndim > 1 and "emb" not in name else None
    key = "hidden_states" if "hidden_states" in inputs else "sample"
    target = torch.randn_like(inputs[key])
    shape = lambda out: out.sample[:, : target.shape[1]]
    return train(run, model.train(), inputs, loss=lambda out: F.mse_loss(shape(out), target))


@scenario("diffusers/schedule/{}", ("DDPM", "DDIM", "EulerDiscrete", "DPMSolverMultistep", "FlowMatchEulerDiscrete"))
def run_schedule(run: Any, kind: str) -> Any:
    import diffusers

    model, schedule = unet().eval(), getattr(diffusers, f"{kind}Scheduler")()
    compiled = run.compile(model)
    schedule.set_timesteps(3)
    x = torch.randn(1, 3, 16, 16)
    torch.manual_seed(4)
    with torch.no_grad():
        for at in schedule.timesteps:
            scaled = schedule.scale_model_input(x, at) if hasattr(schedule, "scale_model_input") else x
            x = schedule.step(compiled(scaled, at).sample, at, x).prev_sample
    return x


@scenario("diffusers/training_with_schedule")
def run_training(run: Any) -> Any:
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel

    model, schedule = unet(), DDPMScheduler()
    compiled, average = run.compile(model), EMAModel(model.parameters(), decay=0.9)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(2):
        clean, noise, at = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16), torch.randint(0, 1000, (2,))
        loss = F.mse_loss(compiled(schedule.add_noise(clean, noise, at), at).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss)
    return {"losses": losses, "weights": dict(model.named_parameters()), "average": average.shadow_params}
