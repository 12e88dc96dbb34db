"""x-transformers: its wrappers with the options that change attention."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.steps import train
from tests.scenarios.table import scenario

DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": dict(rotary_pos_emb=True),
    "rotary_xpos": dict(rotary_xpos=True),
    "alibi": dict(alibi_pos_bias=True),
    "relative_bias": dict(rel_pos_bias=True),
    "dynamic_bias": dict(dynamic_pos_bias=True),
    "rms_norm_swiglu": dict(use_rmsnorm=True, ff_swish=True, ff_glu=True),
    "scale_norm": dict(use_scalenorm=True),
    "qk_norm": dict(attn_qk_norm=True),
    "grouped_heads": dict(attn_kv_heads=2),
    "one_kv_head": dict(attn_one_kv_head=True),
    "talking_heads": dict(attn_pre_talking_heads=True, attn_post_talking_heads=True),
    "sandwich": dict(sandwich_norm=True),
    "memory_kv": dict(attn_num_mem_kv=4),
    "gated_values": dict(attn_gate_values=True),
    "flash": dict(attn_flash=True),
    "macaron": dict(macaron=True),
    "residual_attention": dict(residual_attn=True),
    "softclamp": dict(attn_softclamp_logits=True),
    "sparse_topk": dict(attn_sparse_topk=4),
    "shift_tokens": dict(shift_tokens=1),
}


def preload() -> None:
    import x_transformers  # noqa: F401


@scenario("x-transformers/decoder/{}", DECODERS)
def run_decoder(run: Any, kind: str) -> Any:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **DECODERS[kind])
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers))
    return train(run, model, (torch.randint(0, 64, (2, 17)),), loss=lambda loss: loss)


@scenario("x-transformers/vision")
def run_vision(run: Any) -> Any:
    from x_transformers import Encoder, ViTransformerWrapper

    model = ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=6, attn_layers=Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    )
    return train(run, model, (torch.randn(2, 3, 32, 32),), lr=0.01)


@scenario("x-transformers/encoder_decoder")
def run_encoder_decoder(run: Any) -> Any:
    from x_transformers import XTransformer

    how = dict(num_tokens=64, depth=1, heads=4, max_seq_len=32)
    model = XTransformer(dim=32, **{f"{side}_{k}": v for side in ("enc", "dec") for k, v in how.items()})
    mask = torch.ones(2, 12, dtype=torch.bool)
    inputs = dict(src=torch.randint(0, 64, (2, 12)), tgt=torch.randint(0, 64, (2, 9)), mask=mask)
    return train(run, model, inputs, loss=lambda loss: loss)


@scenario("x-transformers/generate")
def run_generate(run: Any) -> Any:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=1, heads=4, attn_dim_head=8, rotary_pos_emb=True)
    net = TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)
    model = AutoregressiveWrapper(net).eval()
    model.net = run.compile(net)
    return model.generate(torch.randint(0, 64, (1, 5)), 5, temperature=0.0, cache_kv=False)


@scenario("x-transformers/continuous")
def run_continuous(run: Any) -> Any:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    model = ContinuousTransformerWrapper(
        dim_in=8, dim_out=4, max_seq_len=16, attn_layers=Encoder(dim=32, depth=1, heads=4, attn_dim_head=8)
    )
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 9:] = False
    return train(run, model, (torch.randn(2, 12, 8),)) | train(run, model, dict(x=torch.randn(2, 12, 8), mask=mask))
