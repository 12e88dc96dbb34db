"""Tiny Megatron-core GPTs for tests."""

from __future__ import annotations

import logging
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

warnings.filterwarnings("ignore")
logging.getLogger("megatron").setLevel(logging.ERROR)


def start(tp: int = 1, rank: int = 0, world: int = 1, store: str | None = None) -> None:
    """Process groups of one process, or of one rank of several that share ``store``."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", store=dist.FileStore(store or tempfile.mktemp(), world), rank=rank, world_size=world
        )
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tp)


def tiny_gpt(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=64,
    vocab=64,
    seq=16,
    dropout=0.0,
    tie=False,
    experts=None,
    tp=1,
    sequence_parallel=False,
    latent=False,
    **config,
):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    moe = (
        dict(num_moe_experts=experts, moe_router_topk=2, moe_grouped_gemm=False, moe_ffn_hidden_size=ffn)
        if experts
        else {}
    )
    if latent:  # the heads have no groups
        kv_heads = heads
        config = (
            dict(q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8, rope_type="rope")
            | config
        )
    made = (MLATransformerConfig if latent else TransformerConfig)(
        **dict(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=kv_heads,
            ffn_hidden_size=ffn,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tp,
            sequence_parallel=sequence_parallel,
            bias_dropout_fusion=False,
        )
        | moe
        | config
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        multi_latent_attention=latent,
        qk_layernorm=latent,
    )
    if made.experimental_attention_variant:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        spec = variants.get_transformer_block_with_experimental_attention_variant_spec(made)
    return GPTModel(
        made,
        spec,
        vocab_size=vocab,
        max_sequence_length=seq,
        position_embedding_type="none" if latent else "rope",
        share_embeddings_and_output_weights=tie,
    )


def batch(size=2, seq=16, vocab=64):
    ids = torch.randint(0, vocab, (size, seq), generator=torch.Generator().manual_seed(3))
    return dict(
        input_ids=ids, position_ids=torch.arange(seq).expand_as(ids), attention_mask=None, labels=ids.roll(-1, 1)
    )


def train(model, inputs, compiled=None):
    """Loss and every gradient of one step."""
    model.zero_grad()
    loss = (model if compiled is None else compiled)(**inputs).mean()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


class Loss(torch.nn.Module):
    """A Megatron GPT as the function of token ids that it is."""

    def __init__(self, **config):
        super().__init__()
        self.config, self.gpt = config, tiny_gpt(**config)

    def __deepcopy__(self, memo):
        """Another with the same weights; process groups cannot be copied."""
        made = type(self)(**self.config).to(next(self.parameters()).dtype)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, ids, labels):
        return self.gpt(
            input_ids=ids, position_ids=torch.arange(ids.shape[1]).expand_as(ids), attention_mask=None, labels=labels
        ).mean()


COUNTS = {
    "fusion.add_rms_norm": 4,
    "fusion.attention": 2,
    "fusion.cross_entropy": 1,
    "fusion.rms_norm": 5,
    "fusion.rope": 4,
    "fusion.swiglu": 2,
}
