"""The architectures of the zoo as people use them: whether each way of calling a model gives what it gives eager.

    python -m tests.zoo.uses [--use NAME[+NAME...] ...] [--options JSON] [--jobs 2] [NAME ...]

The match rate (table.py) makes every model simple, so that sites can be counted: attention by hand, no mask, no cache,
a loss inside. Here causal models are built with transformers' defaults and called in the ways of :data:`USES`, and what
they return, every gradient and every buffer are compared over two steps. One line for each: equal, differs (or what was
raised) or unbuilt, where eager PyTorch does not run or gives no numbers. What differs is told beside what differs with
torch's own backends, and with every weight moved a little.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from mindspeed_fx.compat import alike_layers
from tests.scenarios.compare import largest_of
from tests.zoo import architectures, table

Inputs = dict[str, Any]
Tensors = dict[str, torch.Tensor]
TOLERANCE = {"cpu": 1e-5, "npu": 1e-3}
"""Of a tensor's largest element, as the match rate's errors; for npu models are in float32, as its kernels are, and its
calls are emulated."""
ROUNDING = 6e-8
"""What every weight of eager PyTorch is moved by, to tell how far results of float32 parts move."""

LENGTHS, ROWS = (16, 11, 13), (2, 5, 3)
"""Tokens, and rows, of the batches of :func:`shortened` and :func:`regrouped`."""

# ---------------------------------------------------------------- how a model is called


def padded(inputs: Inputs) -> Inputs:
    """Padding to the right, as collators give it to a model that trains."""
    return _with_mask(inputs, slice(-5, None))


def padded_left(inputs: Inputs) -> Inputs:
    """Padding to the left. The first label after it is ignored: it would read a row that sees nothing."""
    inputs = _with_mask(inputs, slice(0, 5))
    if "labels" in inputs:
        inputs["labels"][0, 5] = -100
    return inputs


def _with_mask(inputs: Inputs, missing: slice) -> Inputs:
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, missing] = 0
    hidden = mask == 0
    labels = {"labels": inputs["labels"].masked_fill(hidden, -100)} if "labels" in inputs else {}
    return inputs | dict(input_ids=inputs["input_ids"].masked_fill(hidden, 0), attention_mask=mask) | labels


def packed(inputs: Inputs) -> Inputs:
    """Two documents in a row, told by positions that begin anew."""
    positions = torch.cat([torch.arange(6), torch.arange(inputs["input_ids"].shape[1] - 6)])[None]
    return {k: v[:1] if torch.is_tensor(v) else v for k, v in inputs.items()} | dict(position_ids=positions)


def embedded(inputs: Inputs) -> Inputs:
    """Embeddings with a gradient instead of ids (prompt tuning), made of these ids when the model is called."""
    return {k: v for k, v in inputs.items() if k != "input_ids"} | dict(inputs_embeds=torch.arange(3, 35).view(2, 16))


def unlabelled(inputs: Inputs) -> Inputs:
    """The loss is the caller's, of the logits."""
    return {k: v for k, v in inputs.items() if k != "labels"}


def counted(inputs: Inputs) -> Inputs:
    """With the number of tokens of all accumulated batches, as Trainer calls."""
    return inputs | dict(num_items_in_batch=torch.tensor(77))


def told_all(inputs: Inputs) -> Inputs:
    """Every layer's states are returned."""
    return inputs | dict(output_hidden_states=True)


def cached(inputs: Inputs) -> Inputs:
    """A cache is kept, which transformers does where it is told nothing."""
    return {k: v for k, v in inputs.items() if k != "use_cache"}


def shortened(inputs: Inputs) -> Inputs:
    """Three batches of three lengths (:func:`_batches` makes them): sizes are dynamic from the second on."""
    return inputs


def regrouped(inputs: Inputs) -> Inputs:
    """Three batches of two, five and three rows (:func:`_batches` makes them), as a last batch is smaller."""
    return inputs


def evaluated(inputs: Inputs) -> Inputs:
    """Evaluation without gradients."""
    return inputs


# ---------------------------------------------------------------- what is done with a model before


def frozen(model: torch.nn.Module) -> None:
    """Two of three parameters are frozen."""
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 == 1)


def checkpointed(model: torch.nn.Module) -> None:
    model.gradient_checkpointing_enable()  # type: ignore[operator]


def adapted(model: torch.nn.Module) -> None:
    """LoRA by hand: linear layers of the first layer have a second path; all else is frozen."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for linear in [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".0." in n]:
        kind: dict[str, Any] = dict(generator=generator, dtype=linear.weight.dtype)
        linear.lora_a = torch.nn.Parameter(torch.randn(4, linear.in_features, **kind) / 8)
        linear.lora_b = torch.nn.Parameter(torch.randn(linear.out_features, 4, **kind) / 8)
        linear.register_forward_hook(lambda m, x, y: y + F.linear(F.linear(x[0], m.lora_a), m.lora_b) * 0.5)


def dropping(model: torch.nn.Module) -> None:
    """Dropout of a tenth in every place that has one."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.1)


def marked(model: torch.nn.Module) -> None:
    """Layers are regions that Dynamo reads once (``torch.compiler.nested_compile_region``)."""
    kinds: dict[type, type] = {}
    for layers in [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]:
        for layer in layers:
            kind = type(layer)
            if kind not in kinds:
                region = torch.compiler.nested_compile_region(kind.forward)
                kinds[kind] = type(kind.__name__, (kind,), {"forward": region})
            layer.__class__ = kinds[kind]


CALLS: dict[str, Callable[[Inputs], Inputs]] = {
    f.__name__: f
    for f in (
        padded,
        padded_left,
        packed,
        embedded,
        unlabelled,
        counted,
        told_all,
        cached,
        shortened,
        regrouped,
        evaluated,
    )
}
CHANGES: dict[str, Callable[[torch.nn.Module], None]] = {
    f.__name__: f for f in (frozen, checkpointed, adapted, dropping, marked)
}
READ_ONCE = "read_once"
"""Two layers of a class are many, of which Dynamo reads one (``compat/alike_layers.py``)."""
USES = ("plain", *CALLS, *CHANGES, READ_ONCE)


# ---------------------------------------------------------------- the comparison


def step(run: Callable[..., Any], model: torch.nn.Module, inputs: Inputs, parts: list[str]) -> Tensors:
    """By name every floating tensor that two calls return, every gradient and, at the end, every buffer. Weights move
    between the calls and are put back."""
    found: Tensors = {}
    train = "evaluated" not in parts
    model.train(train)
    with kept_state(model):
        for number, given in enumerate(_batches(inputs, parts)):
            found |= {f"{number}: {name}": value for name, value in _call(run, model, given, train).items()}
        return found | {f"buffer {n}": b.clone() for n, b in model.named_buffers() if b.is_floating_point()}


def _batches(inputs: Inputs, parts: list[str]) -> list[Inputs]:
    """``inputs`` of each call, cut or repeated where the use says so."""
    lengths, rows = LENGTHS if "shortened" in parts else (), ROWS if "regrouped" in parts else ()

    def batch(number: int) -> Inputs:
        given = {k: v for k, v in inputs.items() if torch.is_tensor(v) and v.dim()}
        if lengths:
            given = {k: v[:, : lengths[number]] if v.dim() > 1 else v for k, v in given.items()}
        if rows:
            given = {k: torch.cat([v] * rows[number])[: rows[number]] for k, v in given.items()}
        return inputs | given

    return [batch(number) for number in range(len(lengths or rows) or 2)]


def _call(run: Callable[..., Any], model: torch.nn.Module, given: Inputs, train: bool) -> Tensors:
    """What one call returns, and its gradients, by which the weights are moved."""
    if "inputs_embeds" in given:
        with torch.no_grad():
            given["inputs_embeds"] = model.get_input_embeddings()(given["inputs_embeds"])  # type: ignore[operator]
        given["inputs_embeds"].requires_grad_()
    torch.manual_seed(1)  # some routers add noise
    with torch.set_grad_enabled(train):
        result = run(**given)
    values = [v.detach() for v in pytree.tree_leaves(dict(result)) if torch.is_tensor(v) and v.is_floating_point()]
    if (mask := given.get("attention_mask")) is not None:  # nobody reads what a padded token gives
        values = [v[mask.bool()] if v.shape[:2] == mask.shape else v for v in values]
    found = {f"result {i}": v.clone() for i, v in enumerate(values)}
    if not train:
        return found
    loss = getattr(result, "loss", None)
    (result.logits.logsumexp(-1).square().mean() + result.logits.std() if loss is None else loss).backward()
    if "inputs_embeds" in given:
        found["inputs_embeds"] = given["inputs_embeds"].grad
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name], p.grad = p.grad, None
            p.data.sub_(found[name], alpha=1e-3)
    return found


@contextlib.contextmanager
def kept_state(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards the weights are as they were, and the buffers, such as a batch norm's means."""
    before = [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip((*model.parameters(), *model.buffers()), before, strict=True):
                p.copy_(value)


def difference(expected: Tensors, found: Tensors) -> tuple[float, str]:
    """The largest difference, relative to the tensor's largest element or, where that is more, to 1e-4 of the step's,
    and of what. A gradient of zeros is none."""
    for name in sorted(expected.keys() ^ found.keys()):
        if (expected | found)[name].any():
            return float("inf"), f"{name} appeared or disappeared"
    steps = {name.split(":")[0] for name in expected}
    floor = {s: max((largest_of(v) for n, v in expected.items() if n.split(":")[0] == s), default=0.0) for s in steps}
    worst = (0.0, "")
    for name in expected.keys() & found.keys():
        want, have = expected[name], found[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            return float("inf"), f"{name}: {have.dtype} {tuple(have.shape)} for {want.dtype} {tuple(want.shape)}"
        if not torch.equal(want.isfinite(), have.isfinite()):
            return float("inf"), f"{name} is infinite or not a number in other places"
        scale = max(largest_of(want), 1e-4 * floor[name.split(":")[0]], 1e-30)
        worst = max(worst, (largest_of(have - want) / scale, name))
    return worst


def build(name: str, parts: list[str]) -> tuple[torch.nn.Module, Inputs]:
    """A model changed as ``parts`` say, and what they call it with."""
    if "/" in name:
        model, inputs = architectures.made(name, {})
    else:
        try:
            model, inputs = architectures.build(name, attention="sdpa")
        except ValueError:  # a model that has no such attention
            model, inputs = architectures.build(name)
    for part in parts:
        CHANGES.get(part, lambda model: None)(model)
        inputs = CALLS.get(part, lambda inputs: inputs)(inputs)
    return model, inputs


def one(name: str, use: str, options: Mapping[str, Any], seconds: int = 300) -> tuple[str, str]:
    """:func:`compared` in a process of its own: nothing but the result is told, in so many seconds."""
    table.quiet()
    with table.time_limit(seconds):
        return compared(name, use, options)


def compared(name: str, use: str, options: Mapping[str, Any] = {}) -> tuple[str, str]:
    """("equal", "unbuilt" or "differs", what is known of it) of a model used in ``use``, ways of :data:`USES` with +
    between them. A difference that one of torch's own backends has as well, or the rounding of weights, is equal; what
    fails is not, and the text tells whether theirs fail, too."""
    parts, options = use.split("+"), {"codegen": "eager", "target": "cpu", **options}
    fewest = 2 if READ_ONCE in parts else alike_layers.FEWEST

    def through(backend: str, **settings: Any) -> Tensors:
        torch._dynamo.reset()
        with unittest.mock.patch.object(alike_layers, "FEWEST", fewest):
            return step(torch.compile(model, backend=backend, **settings), model, inputs, parts)

    try:
        model, inputs = build(name, parts)
        if options["target"] == "npu":
            model = model.float()
        expected = step(model, model, inputs, parts)
        if any(v.isnan().any() for v in expected.values()):
            return "unbuilt", "eager PyTorch's values are not numbers"
    except Exception as error:  # noqa: BLE001  the model is not ours
        return "unbuilt", table.one_line(error)
    try:
        far, what = difference(expected, through("mindspeed", options=options))
        if far <= TOLERANCE[options["target"]]:
            return "equal", f"{far:.0e}"
    except Exception as error:  # noqa: BLE001
        far, what = float("inf"), table.one_line(error)
    others = {"moved": moved(model, inputs, parts, expected)} if far < float("inf") else {}
    for backend in ("eager", "aot_eager"):
        others[backend] = float("inf")
        with contextlib.suppress(Exception):
            others[backend] = difference(expected, through(backend))[0]
    text = f"{far:.0e} {what} (" + ", ".join(f"{k} {v:.0e}" for k, v in others.items()) + ")"
    return ("equal" if any(far <= other < float("inf") for other in others.values()) else "differs"), text


def moved(model: torch.nn.Module, inputs: Inputs, parts: list[str], expected: Tensors) -> float:
    """How far eager PyTorch's values move with every weight."""
    generator = torch.Generator().manual_seed(3)
    with kept_state(model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + ROUNDING * torch.randn(p.shape, generator=generator).to(p.dtype))
        return difference(expected, step(model, model, inputs, parts))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", help="by default all causal models of transformers")
    parser.add_argument("--use", action="append", help=f"{', '.join(USES)}; several with +; each by itself by default")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--options", type=json.loads, default={}, help='of the backend; "codegen" is eager by default')
    args = parser.parse_args()
    for part in {part for use in args.use or () for part in use.split("+")} - {*USES}:
        parser.error(f"--use {part}: valid: {', '.join(USES)}")
    spawn, counts = multiprocessing.get_context("spawn"), Counter[str]()
    with concurrent.futures.ProcessPoolExecutor(args.jobs, spawn, torch.set_num_threads, (1,)) as pool:
        work = [(n, use) for use in args.use or USES for n in args.architectures or architectures.names()]
        waiting = {pool.submit(one, *case, args.options): case for case in work}
        for done in concurrent.futures.as_completed(waiting):
            name, use = waiting[done]
            kind, text = done.result()
            counts[kind] += 1
            print(f"{kind:8} {use:12} {name:24} {text}", flush=True)
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()))


if __name__ == "__main__":
    main()
