"""Hooks, threads, checkpoints and autocast around a compiled module."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import checkpoint

from tests.scenarios.steps import train
from tests.scenarios.table import scenario


class Block(torch.nn.Module):
    """A layer of a transformer. x [batch, length, width]."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = torch.nn.RMSNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Stack(torch.nn.Module):
    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(width: int = 32) -> tuple[torch.Tensor]:
    return (torch.randn(2, 8, width),)


@scenario("torch/hooks/forward")
def run_forward_hook(run: Any) -> Any:
    model, seen = Stack(), []
    model.layers[0].register_forward_hook(lambda m, i, o: o * 1.5)
    model.layers[1].register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    model.head.register_forward_hook(lambda m, i, o: seen.append(o.detach().sum()))
    return train(run, model, batch()) | {"seen": seen}


@scenario("torch/hooks/forward_after_compile")
def run_late_hook(run: Any) -> Any:
    model, x = Stack(), batch()[0]
    compiled = run.compile(model)
    first = compiled(x)
    handle = model.layers[0].register_forward_hook(lambda m, i, o: o * 1.5)
    second = compiled(x)
    handle.remove()
    return {"without": first, "with": second, "removed": compiled(x)}


@scenario("torch/hooks/full_backward")
def run_backward_hook(run: Any) -> Any:
    model, seen = Stack(), []
    model.layers[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].detach().norm()))
    model.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].detach().norm()))
    return train(run, model, batch()) | {"seen": seen}


@scenario("torch/hooks/full_backward_changes")
def run_backward_hook_changes(run: Any) -> Any:
    model, x = Stack(), batch()[0].requires_grad_()
    model.layers[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    return train(run, model, (x,)) | {"input": x.grad}


@scenario("torch/hooks/full_backward_pre")
def run_backward_pre_hook(run: Any) -> Any:
    model = Stack()
    model.layers[1].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
    return train(run, model, batch())


@scenario("torch/hooks/parameter")
def run_parameter_hook(run: Any) -> Any:
    model, seen = Stack(), []
    model.head.weight.register_hook(lambda g: g * 3)
    model.layers[0].qkv.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().clone()))
    return train(run, model, batch()) | {"seen": seen}


@scenario("torch/hooks/tensor_within")
def run_tensor_hook(run: Any) -> Any:
    class Hooked(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            if x.requires_grad:
                x.register_hook(lambda g: g * 0.25)
            return self.head(self.layers[1](x))

    return train(run, Hooked(), batch())


@scenario("torch/hooks/optimizer_in_backward")
def run_optimizer_in_backward(run: Any) -> Any:
    model = Stack()
    optimizers = {p: torch.optim.SGD([p], 0.05) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    compiled, x, losses = run.compile(model), batch()[0], []
    for _ in range(3):
        loss = compiled(x).square().mean()
        loss.backward()
        losses.append(loss)
    return {"losses": losses, "weights": dict(model.named_parameters())}


@scenario("torch/hooks/saved_tensors")
def run_saved_tensors(run: Any) -> Any:
    model, packed = Stack(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(1), t.clone())[1], lambda t: t):
        return train(run, model, batch())


@scenario("torch/hooks/save_on_cpu")
def run_save_on_cpu(run: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return train(run, Stack(), batch())


@scenario("torch/threads/two_models")
def run_threads(run: Any) -> Any:
    results: dict[str, Any] = {}
    work = [(str(i), Stack(1, 32), torch.randn(2 + i, 8, 32)) for i in range(2)]

    def forward(name: str, model: torch.nn.Module, x: torch.Tensor) -> None:
        loss = run.compile(model)(x).square().mean()
        loss.backward()
        results[name] = [loss, *(p.grad for p in model.parameters())]

    threads = [threading.Thread(target=forward, args=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(results.items()))


@scenario("torch/threads/one_model")
def run_shared(run: Any) -> Any:
    model, x = Stack(1).eval(), torch.randn(4, 8, 32)
    compiled, results = run.compile(model), {}
    with torch.no_grad():
        compiled(x[0:1])

    def forward(i: int) -> None:
        with torch.no_grad():
            results[str(i)] = compiled(x[i : i + 1])

    threads = [threading.Thread(target=forward, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(results.items()))


@scenario("torch/checkpoint/{}", ("reentrant", "non_reentrant", "selective", "whole_compiled", "sequential"))
def run_checkpoint(run: Any, mode: str) -> Any:
    from functools import partial

    class Checkpointed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            how: dict[str, Any] = dict(use_reentrant=mode == "reentrant")
            if mode == "selective":
                mm = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
                how["context_fn"] = partial(checkpoint.create_selective_checkpoint_contexts, mm)
            if mode == "sequential":
                return self.head(checkpoint.checkpoint_sequential(list(self.layers), 2, x, use_reentrant=False))
            for layer in self.layers:
                x = checkpoint.checkpoint(layer, x, **how)
            return self.head(x)

    if mode == "whole_compiled":  # checkpoint outside, compiled blocks inside
        model = Stack()
        blocks = [run.compile(layer) for layer in model.layers]
        x = batch()[0]
        for block in blocks:
            x = checkpoint.checkpoint(block, x, use_reentrant=False)
        model.head(x).square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters()}
    return train(run, Checkpointed(), (batch()[0].requires_grad_(mode == "reentrant"),))


@scenario("torch/autocast/{}", ("inside", "outside", "nested_float32", "float16", "cache_off"))
def run_autocast(run: Any, where: str) -> Any:
    dtype = torch.float16 if where == "float16" else torch.bfloat16

    class Inside(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype):
                x = self.layers[0](x)
                if where == "nested_float32":
                    with torch.autocast("cpu", enabled=False):
                        return self.head(self.layers[1](x.float()))
                return self.head(self.layers[1](x))

    if where in ("inside", "nested_float32"):
        return _bfloat16(train(run, Inside(), batch()))
    model, x, losses = Stack(), batch()[0], []
    compiled = run.compile(model)
    for _ in range(2):  # each step by itself: within one autocast eager keeps weights of before in its cache
        model.zero_grad()
        with torch.autocast("cpu", dtype, cache_enabled=where != "cache_off"):
            loss = compiled(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        torch.optim.SGD(model.parameters(), 0.05).step()
    return _bfloat16({"losses": losses, "gradients": {n: p.grad for n, p in model.named_parameters()}})


def _bfloat16(values: Any) -> Any:
    """Of a step in bfloat16, compared as such."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.bfloat16(), values)


@scenario("torch/grad_scaler")
def run_scaler(run: Any) -> Any:
    model, x = Stack(), batch()[0]
    compiled, scaler = run.compile(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)
    return {"losses": losses, "weights": dict(model.named_parameters())}


@scenario("torch/anomaly")
def run_anomaly(run: Any) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        return train(run, Stack(), batch())


@scenario("torch/accumulation")
def run_accumulation(run: Any) -> Any:
    model = Stack()
    compiled = run.compile(model)
    for part in torch.randn(4, 1, 8, 32):
        compiled(part).square().mean().div(4).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@scenario("torch/retain_graph")
def run_retain(run: Any) -> Any:
    model, x = Stack(), batch()[0].requires_grad_()
    out = run.compile(model)(x)
    first = torch.autograd.grad(out.square().mean(), x, retain_graph=True)
    return {"first": first, "second": torch.autograd.grad(out.mean(), [x, *model.parameters()])}


@scenario("torch/train_eval_changes")
def run_modes(run: Any) -> Any:
    model, x = torch.nn.Sequential(Stack(), torch.nn.Dropout(0.5)), batch()[0]
    compiled = run.compile(model)
    model.eval()
    with torch.no_grad():
        first = compiled(x)
    model[0].train()
    compiled(x).mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    with torch.inference_mode():
        return {"eval": first, "gradients": grads, "inference": compiled(x).clone()}


@scenario("torch/frozen_parts")
def run_frozen(run: Any) -> Any:
    model = Stack()
    model.layers[0].requires_grad_(False)
    first = train(run, model, batch())
    model.layers[0].requires_grad_(True)
    model.head.requires_grad_(False)
    model.zero_grad()
    return {"first": first, "second": train(run, model, batch())}


@scenario("torch/changing_lengths")
def run_lengths(run: Any) -> Any:
    model = Stack()
    compiled, losses = run.compile(model), []
    for length in (8, 12, 5, 16):
        loss = compiled(torch.randn(2, length, 32)).square().mean()
        loss.backward()
        losses.append(loss)
    return {"losses": losses, "gradients": {n: p.grad for n, p in model.named_parameters()}}


@scenario("torch/dynamic_true")
def run_dynamic(run: Any) -> Any:
    model = Stack()
    compiled, losses = run.compile(model, dynamic=True), []
    for rows, length in ((2, 8), (3, 12), (1, 5)):
        loss = compiled(torch.randn(rows, length, 32)).square().mean()
        loss.backward()
        losses.append(loss)
    return {"losses": losses, "gradients": {n: p.grad for n, p in model.named_parameters()}}
