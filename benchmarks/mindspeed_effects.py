"""What MindSpeed's memory and pipeline features save, beside their closed forms.

    python -m benchmarks.mindspeed_effects

Bytes: of what a forward keeps for the backward (each storage once, weights aside), or of what an optimizer holds, of
small models of Megatron's. Bubbles: schedules of Megatron's chunks played action by action, in units of a chunk's
forward. Nothing is timed. The load-aware rows are of four gloo processes, of which one has all tokens.
"""

from __future__ import annotations

import copy
import json
import logging
import pathlib
import tempfile
import warnings

import torch

from benchmarks import common


def row(name: str, counted: float, closed_form: float, unit: str = "bytes") -> None:
    print(f"{name:<52}{counted:>14,.0f}{closed_form:>14,.0f} {unit:<6}{counted / closed_form:>9.4f}", flush=True)


def layers() -> None:
    from tests.megatron import kept_bytes, test_zero_memory

    for name, (counted, closed_form) in kept_bytes.ROWS.items():
        row(name, counted(), closed_form)
    for way in ("eager", "graph"):
        pairs = zip(test_zero_memory.saved_bytes(way), test_zero_memory.closed_forms(way), strict=True)
        for level, pair in enumerate(pairs):
            row(f"experts, zero memory level {level}, {way}", *pair)


def optimizers() -> None:
    from mindspeed_fx.megatron import host_states, residual
    from tests.megatron import optimizers as built

    for sharded in (False, True):
        kind = "distributed optimizer" if sharded else "replicated"
        plain, lean = built.build(sharded), built.build(sharded, residual.reuse_weights)
        swapped = built.build(sharded, lambda optimizer: host_states.swap_states(optimizer, 4))
        for pair in (plain, lean, swapped):
            built.train(*pair, 2)
        weights = sum(p.numel() for p in plain[0].parameters())
        row(f"one copy of weights, {kind}", built.held_bytes(plain) - built.held_bytes(lean), 2 * weights)
        keepers = swapped[1].chained_optimizers[0].keepers.values()
        assert not sum(k.device_bytes() for k in keepers)
        row(f"optimizer on the host, {kind}", sum(t.nbytes for k in keepers for t in k.host.values()), 12 * weights)


def late_gradients() -> None:
    from mindspeed_fx.compat import dynamo
    from mindspeed_fx.training.late_gradients import Queue, put_off

    rows, hidden, width = 256, 64, 256
    layer = torch.nn.Sequential(torch.nn.Linear(hidden, width), torch.nn.GELU(), torch.nn.Linear(width, hidden))
    whole, queue = copy.deepcopy(layer), Queue(swaps=True, smallest=1024)
    put_off(whole.parameters(), queue)
    dynamo.compile_alone(whole, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    for _ in range(3):
        whole(torch.randn(rows, hidden, requires_grad=True)).square().sum().backward()
    moved = [sum(host.nbytes for host, _ in entry.hosts.values()) for entry in queue.away]
    row("late gradients of two linears on the host", moved[0], 4 * rows * 2 * (hidden + width))


def bubbles() -> None:
    from mindspeed_fx.megatron.dualpipev.schedule import order_of
    from tests.megatron import test_nanopipe, test_ripipe
    from tests.passes.recompute import test_pipelining

    for ranks in (2, 4, 8):
        for ahead, closed_form in ((False, 4), (True, 3)):
            name = "recomputed ahead (ripipe)" if ahead else "recomputed in the backward"
            counted = test_ripipe.bubble(ranks, 2, 3 * ranks, 1, 2, ahead)
            row(f"{name}, {ranks} ranks", counted, closed_form * (ranks - 1), "F")
        for late, closed_form in ((False, 3), (True, 1)):
            orders = [test_nanopipe.events(ranks, rank, 2, 3 * ranks, late) for rank in range(ranks)]
            counted = test_nanopipe.seconds(orders, 2, late) - 18 * ranks
            name = "late gradients of weights (nano-pipe)" if late else "whole backwards"
            row(f"{name}, {ranks} ranks", counted, closed_form * (ranks - 1), "F")
        orders = [order_of(ranks, rank, 3 * ranks, True) for rank in range(ranks)]
        waits = test_pipelining.bubbles(orders, {"F": 1, "I": 1, "W": 1, "B": 2})
        row(f"DualPipeV, {ranks} ranks", max(waits), 2 * (ranks - 1), "F")


def loads() -> None:
    """A rank with four times its tokens keeps at most what it does in a balanced step."""
    from tests import ranks
    from tests.megatron import test_adaptive_memory

    for dispatcher in ("alltoall", "allgather"):
        for way in test_adaptive_memory.WAYS:
            with tempfile.TemporaryDirectory() as folder:
                ranks.spawn(test_adaptive_memory.on_rank, (pathlib.Path(folder), dispatcher, way), nprocs=4)
                kept = json.loads((pathlib.Path(folder) / "0.json").read_text())
            balanced = kept["False False"][2]
            row(f"overloaded, {dispatcher}, {way}, without the flag", kept["False True"][2], balanced)
            row(f"overloaded, {dispatcher}, {way}", kept["True True"][2], balanced)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import mindspeed_fx.megatron
    from tests.megatron.gpt_models import start

    common.header("counted, closed form, their ratio")
    loads()
    mindspeed_fx.megatron.apply()
    start()
    layers()
    optimizers()
    late_gradients()
    bubbles()


if __name__ == "__main__":
    main()
