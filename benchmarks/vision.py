"""Training steps of vision transformers on CPU whose tokens are a convolution's result: Inductor, mindspeed, and
mindspeed without canonicalize.row_layout ("as stored"), interleaved.

    python -m benchmarks.vision [--rounds 15] [--models siglip,sam,dit] [--dtype float32] [--clock wall]

Four layers of 384 with six heads. SigLIP and SAM are Hugging Face's, of two images of 256 x 256 in patches of 16 and
one of 512 x 512; DiT is written here after Peebles and Xie 2022, "Scalable Diffusion Models with Transformers"
(adaLN-Zero, patches of 2 of two latents of 32 x 32).
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import common

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

LAYERS, HIDDEN, HEADS = 4, 384, 6
SIZES: dict[str, Any] = dict(
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=4 * HIDDEN,
    patch_size=16,
    attn_implementation="sdpa",
)


class DiTBlock(torch.nn.Module):
    """Attention and an MLP, each between a scale and shift of its norm and a gate, all six of the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(HIDDEN, 3 * HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.Linear(4 * HIDDEN, HIDDEN)
        self.condition = torch.nn.Linear(HIDDEN, 6 * HIDDEN)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = self.condition(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        x = x + gate * self.attention(F.layer_norm(x, (HIDDEN,)) * (1 + scale) + shift)
        h = F.layer_norm(x, (HIDDEN,)) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.down(F.gelu(self.up(h), approximate="tanh"))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(4, HIDDEN, 2, 2)
        self.positions = torch.nn.Parameter(torch.randn(1, 256, HIDDEN))
        self.blocks = torch.nn.ModuleList(DiTBlock() for _ in range(LAYERS))

    def forward(self, latents: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        return F.layer_norm(x, (HIDDEN,))


def dit() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return DiT(), dict(latents=torch.randn(2, 4, 32, 32), condition=torch.randn(2, HIDDEN))


def siglip() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(**SIZES, image_size=256)), dict(
        pixel_values=torch.randn(2, 3, 256, 256)
    )


def sam() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import SamVisionConfig, SamVisionModel

    config = SamVisionConfig(**SIZES, image_size=512, output_channels=64, global_attn_indexes=[LAYERS - 1])
    return SamVisionModel(config), dict(pixel_values=torch.randn(1, 3, 512, 512))


MODELS = {"siglip": siglip, "sam": sam, "dit": dit}
AS_STORED = {"disable": ["canonicalize.row_layout"]}


def loss_of(result: Any) -> torch.Tensor:
    return (result if isinstance(result, torch.Tensor) else result[0]).float().square().mean()


def main() -> None:
    args = common.arguments(rounds=15, models=",".join(MODELS), dtype="float32", clock="wall")
    dtype = getattr(torch, args.dtype)
    for name in args.models.split(","):
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        model, inputs = model.to(dtype), {n: v.to(dtype) for n, v in inputs.items()}
        steps = common.rivals(model, inputs, loss_of, names=("inductor", "mindspeed"))
        steps["as stored"] = common.rivals(model, inputs, loss_of, AS_STORED, names=("mindspeed",))["mindspeed"]
        common.race(f"{name}, {args.dtype}, {args.clock} time", model, steps, args.rounds, clock=args.clock)


if __name__ == "__main__":
    main()
