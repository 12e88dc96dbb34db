"""What four gloo processes find of torch's optimizers under plans; test_optimizers.py runs it and reads the results."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

RANKS = 4
PLANS = {
    "tp": {"tp": 4},
    "tp_sp": {"tp": 4},
    "tp_2d": {"tp_x": 2, "tp_y": 2},
    "zero1": {"dp": 4},
    "zero2": {"dp": 4},
    "zero3": {"dp": 4},
    "zero3+tp_sp": {"dp": 2, "tp": 2},
}
OPTIMIZERS = {
    "SGD": ("SGD", {}),
    "SGD momentum": ("SGD", dict(momentum=0.9, dampening=0.1, weight_decay=0.1)),
    "SGD nesterov": ("SGD", dict(momentum=0.9, nesterov=True)),
    "SGD fused": ("SGD", dict(momentum=0.9, fused=True)),
    "Adam": ("Adam", {}),
    "Adam amsgrad": ("Adam", dict(amsgrad=True, weight_decay=0.1)),
    "Adam foreach": ("Adam", dict(foreach=True)),
    "Adam fused": ("Adam", dict(fused=True)),
    "Adam maximize": ("Adam", dict(maximize=True)),
    "AdamW": ("AdamW", {}),
    "AdamW foreach": ("AdamW", dict(foreach=True, amsgrad=True)),
    "AdamW fused": ("AdamW", dict(fused=True)),
    "AdamW tensor lr": ("AdamW", dict(lr=torch.tensor(0.1))),
    "AdamW capturable": ("AdamW", dict(capturable=True)),
    "AdamW differentiable": ("AdamW", dict(differentiable=True)),
    "Adagrad": ("Adagrad", dict(lr_decay=0.1)),
    "Adagrad foreach": ("Adagrad", dict(foreach=True)),
    "Adagrad fused": ("Adagrad", dict(fused=True)),
    "Adadelta": ("Adadelta", {}),
    "Adadelta foreach": ("Adadelta", dict(foreach=True)),
    "Adamax": ("Adamax", {}),
    "Adamax foreach": ("Adamax", dict(foreach=True)),
    "ASGD": ("ASGD", {}),
    "ASGD foreach": ("ASGD", dict(foreach=True)),
    "NAdam": ("NAdam", dict(weight_decay=0.1, decoupled_weight_decay=True)),
    "NAdam foreach": ("NAdam", dict(foreach=True)),
    "RAdam": ("RAdam", {}),
    "RAdam foreach": ("RAdam", dict(foreach=True)),
    "RMSprop": ("RMSprop", dict(centered=True, momentum=0.9)),
    "RMSprop foreach": ("RMSprop", dict(foreach=True)),
    "Rprop": ("Rprop", {}),
    "Rprop foreach": ("Rprop", dict(foreach=True)),
    "Muon": ("Muon", dict(weight_decay=0.1)),
    "Muon match": ("Muon", dict(adjust_lr_fn="match_rms_adamw", nesterov=False)),
    "Adafactor": ("Adafactor", {}),
    "Adafactor foreach": ("Adafactor", dict(foreach=True)),
    "LBFGS": ("LBFGS", dict(max_iter=2)),
    "SparseAdam": ("SparseAdam", {}),
}


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def steps(model, gradients, name, settings, between=None):
    """Three steps; whole parameters and states afterwards."""
    parameters = [p for p in model.parameters() if name != "Muon" or p.ndim == 2]
    optimizer = getattr(torch.optim, name)(parameters, **{"lr": 0.05, **settings})
    for gradient in gradients:
        for n, p in model.named_parameters():
            own = gradient[n].clone()
            p.grad = (
                distribute_tensor(own, p.device_mesh, p.placements, src_data_rank=None)
                if isinstance(p, DTensor)
                else own
            )
        if between:
            between(model)
        optimizer.step(lambda: torch.zeros(()))
    state = [whole(v) for p in parameters for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [whole(p).detach() for p in model.parameters()], state


def apart(found, expected):
    """The largest difference, relative to each tensor's largest element."""
    assert len(found) == len(expected)
    differences = [((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(found, expected)]
    return max(differences, default=0.0)


def compare(reference, model, start, gradients, name, settings, between=None):
    """What a row of the table gives: {"apart": number}, or {"error": ...} beside {"alone": what one device raises}."""
    results = []
    for m in (reference, model):
        m.load_state_dict(start[m is model])
        try:
            results.append(steps(m, gradients, name, settings, between))
        except Exception as e:
            results.append(f"{type(e).__name__}: {e}")
    alone, divided = results
    if isinstance(divided, str) or isinstance(alone, str):
        texts = [r if isinstance(r, str) else "" for r in results]
        return {"alone": texts[0], "error": texts[1]}
    moved = apart(alone[0], [start[0][n] for n, _ in reference.named_parameters()])
    return {"apart": apart(divided[0], alone[0]), "state": apart(divided[1], alone[1]), "moved": moved}


CLIPPED = {
    "clip_grad_norm_": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    "clip_grad_norm_ 1": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=1.0),
    "clip_grad_norm_ inf": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=float("inf")),
    "clip_grad_norm_ foreach": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, foreach=True),
    "clip_grad_value_": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.001),
    "clip_grads_with_norm_": lambda m: torch.nn.utils.clip_grads_with_norm_(
        m.parameters(), 0.01, torch.nn.utils.get_total_norm([p.grad for p in m.parameters()])
    ),
}


def worker(rank, store, out, plans):
    import mindspeed_fx
    from tests.sharding.llama import Llama

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    reference = Llama(layers=1, hidden=8, heads=4, ffn=16, vocab=16).double()
    generator = torch.Generator().manual_seed(5)
    gradients = [
        {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in reference.named_parameters()}
        for _ in range(3)
    ]
    results = {}
    for plan in plans:
        mesh = PLANS[plan]
        mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        model = mindspeed_fx.parallelize(copy.deepcopy(reference), mesh, plan)
        start = [{k: v.clone() for k, v in m.state_dict().items()} for m in (reference, model)]
        for row, (name, settings) in OPTIMIZERS.items():
            results[f"{plan}|{row}"] = compare(reference, model, start, gradients, name, settings)
        for row, clip in CLIPPED.items():
            results[f"{plan}|{row}"] = compare(reference, model, start, gradients, "SGD", {}, clip)
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()
