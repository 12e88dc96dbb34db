"""The same GPT in plain PyTorch, written independently, reading a Megatron-core state dict: the oracle for tests."""

import torch
import torch.nn.functional as F


def loss_per_token(state, inputs, layers, heads, kv_heads):
    """[batch, seq] losses of a Megatron-core GPT (RMSNorm 1e-5, SwiGLU, RoPE 10000) with parameters ``state``."""
    ids, labels = inputs["input_ids"], inputs["labels"]
    x = F.embedding(ids, state["embedding.word_embeddings.weight"])
    b, s, h = x.shape
    d, group = h // heads, heads // kv_heads
    angles = torch.outer(
        torch.arange(s, dtype=torch.float32), 1.0 / 10000 ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    )
    angles = torch.cat((angles, angles), -1)
    for i in range(layers):

        def weight(name):
            return state[f"decoder.layers.{i}.{name}.weight"]

        y = norm(x, weight("input_layernorm"))
        qkv = (y @ weight("self_attention.linear_qkv").T).view(b, s, kv_heads, group + 2, d)
        q, k, v = qkv[..., :group, :].reshape(b, s, heads, d), qkv[..., group, :], qkv[..., group + 1, :]
        q, k = rotate(q, angles), rotate(k, angles)
        scores = torch.einsum("bsngd,btnd->bngst", q.view(b, s, kv_heads, group, d), k) / d**0.5
        scores = scores + torch.full((s, s), float("-inf")).triu(1)
        out = torch.einsum("bngst,btnd->bsngd", scores.softmax(-1), v).reshape(b, s, h)
        x = x + out @ weight("self_attention.linear_proj").T
        gate, up = (norm(x, weight("pre_mlp_layernorm")) @ weight("mlp.linear_fc1").T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ weight("mlp.linear_fc2").T
    head = state.get("output_layer.weight", state["embedding.word_embeddings.weight"])
    logits = norm(x, state["decoder.final_layernorm.weight"]) @ head.T
    return -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x, angles):
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin
