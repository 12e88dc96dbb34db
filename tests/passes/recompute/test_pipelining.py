"""A backward in three graphs: the same bits in any order of the parts, under torch's own zero-bubble schedule too."""

import pytest
import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx.compat.pipelining import orders_of
from mindspeed_fx.errors import OptionError
from mindspeed_fx.partition.split import SplitError, split
from tests import ranks


class Layer(nn.Module):
    """A norm with a call that gives gradients of input and weight at once, two products, a residual."""

    def __init__(self, hidden=16):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 2 * hidden),
            nn.Linear(2 * hidden, hidden, bias=False),
        )

    def forward(self, x):
        return x + self.down(torch.sin(self.up(self.norm(x))))


def layers(seed, count=2):
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(count)))


def plain(model, batches, options):
    torch._dynamo.reset()
    run = torch.compile(model, backend="mindspeed", options={"codegen": "eager", **options})
    for x in batches:
        run(x).sin().sum().backward()
    found = [[x.grad for x in batches], [p.grad for p in model.parameters()]]
    for t in (*batches, *model.parameters()):
        t.grad = None
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("options", [{"recompute": "none"}, {"recompute": "full"}])
def test_the_parts_are_the_whole_in_any_order(options):
    model, batches = layers(0), [torch.randn(6, 16, requires_grad=True) for _ in range(3)]
    inputs, weights = plain(model, batches, options)
    assert all(g is not None and g.abs().sum() > 0 for g in (*inputs, *weights))
    part = mindspeed_fx.split_backward(model, options, ahead=True)
    for step in range(2):
        outs = [part(x) for x in batches]
        ahead = [part.recompute() for _ in range(4)]  # the backward is compiled when it first runs
        assert ahead == ([True] * 3 + [False] if step and options["recompute"] == "full" else [False] * 4)
        late = []
        for out in outs:
            out.sin().sum().backward()
            late.append(part.dw_builder())
        assert all(torch.equal(x.grad, g) for x, g in zip(batches, inputs, strict=True))
        assert all(p.grad is None for p in model.parameters())
        for run in late:
            run()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), weights, strict=True))
        for t in (*batches, *model.parameters()):
            t.grad = None
    with pytest.raises(RuntimeError, match="no backward has left gradients"):
        part.dw_builder()
    assert part.dropped == 0
    (graphs,) = part.graphs
    parts = graphs.parts
    assert bool(parts.recompute.makes) == (options["recompute"] == "full")
    assert not any("tangents" in n for n in parts.recompute.reads) and any("tangents" in n for n in parts.inputs.reads)
    products = {
        name: sum("mm" in str(n.target) for n in getattr(parts, name).gm.graph.nodes) for name in ("inputs", "weights")
    }
    assert products == {"inputs": 4, "weights": 4}  # one each way for each of four linears


def test_frozen_weights_and_inputs_without_gradient():
    model, x = layers(1), torch.randn(6, 16)
    model[0].up.weight.requires_grad_(False)
    _, weights = plain(model, [x], {})
    part = mindspeed_fx.split_backward(model)
    part(x).sin().sum().backward()
    part.dw_builder()()
    assert model[0].up.weight.grad is None
    assert all(
        a is b is None or torch.equal(a, b) for a, b in zip([p.grad for p in model.parameters()], weights, strict=True)
    )
    with torch.no_grad():
        assert torch.equal(part(x), model(x))
    with pytest.raises(RuntimeError, match="ahead=True"):
        part.recompute()


def test_what_cannot_be_split():
    with pytest.raises(OptionError, match='"codegen" is \'inductor\'; valid for a backward in parts: "eager"'):
        mindspeed_fx.split_backward(layers(0), {"codegen": "inductor"})

    def backward(saved, tangents_1):
        saved.mul_(2)
        return saved * tangents_1

    with pytest.raises(SplitError, match="writes in place"):
        gm = torch.fx.symbolic_trace(backward)
        for n in gm.graph.find_nodes(op="call_method", target="mul_"):
            n.op, n.target = "call_function", torch.ops.aten.mul_.Tensor
        split(gm, [])


SCHEDULES = {
    "plain": ("ScheduleInterleaved1F1B", {0: (0, 2), 1: (1, 3)}),
    "zero bubble": ("ScheduleInterleavedZeroBubble", {0: (0, 2), 1: (1, 3)}),
    "v": ("ScheduleDualPipeV", {0: (0, 3), 1: (1, 2)}),
}
"""Torch's schedule, and the stages of each rank."""


def worker(rank, store, kinds):
    torch.set_num_threads(1)
    import torch.distributed as dist
    from torch.distributed import pipelining

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    x, target = (torch.randn(8, 16, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    loss = lambda out, wanted: ((out - wanted) ** 2).mean()  # noqa: E731
    found = {}
    for kind in kinds:
        name, places = SCHEDULES[kind]
        models = [layers(10 + s, 1) for s in places[rank]]
        if kind == "plain":
            parts = [torch.compile(m, backend="mindspeed", options={"codegen": "eager"}) for m in models]
        else:
            parts = [mindspeed_fx.split_backward(m) for m in models]
        builders = [p.dw_builder if kind != "plain" else None for p in parts]
        stages = [
            pipelining.PipelineStage(p, s, 4, torch.device("cpu"), dw_builder=b)
            for p, s, b in zip(parts, places[rank], builders)
        ]
        schedule = getattr(pipelining.schedules, name)(stages, 4, loss_fn=loss)
        losses = []
        given = (x,) if 0 in places[rank] else ()
        last = dict(target=target, losses=losses) if 3 in places[rank] else {}
        for _ in range(2):
            for m in models:
                m.zero_grad()
            schedule.step(*given, **last)
        own = {s: [p.grad for p in m.parameters()] for s, m in zip(places[rank], models)}, losses
        everybody = [None, None]
        dist.all_gather_object(everybody, own)
        found[kind] = everybody[0][0] | everybody[1][0], everybody[0][1] + everybody[1][1]
        order = [str(a) for a in schedule.pipeline_order[rank] if a]
        if kind == "zero bubble":
            assert len([a for a in order if "W" in a]) == 8, order  # four microbatches, two stages
        if kind == "v":
            assert any("OVERLAP_F_B" in a for a in order) and any("W" in a for a in order), order
    wanted, losses = found.pop("plain")
    for gradients, other in found.values():
        for s in range(4):
            for a, b in zip(wanted[s], gradients[s], strict=True):
                assert a.abs().sum() > 0 and torch.equal(a, b)
        assert len(losses) == 4 and all(torch.equal(a, b) for a, b in zip(losses, other, strict=True))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero bubble", "v"])
def test_torchs_schedules_of_late_weights_over_two_processes_are_the_plain_one_to_the_bit(kind, tmp_path):
    ranks.spawn(worker, args=(str(tmp_path / "store"), ["plain", kind]), nprocs=2)


def bubbles(of_ranks: list[list], durations: dict[str, int]) -> list[int]:
    """Time in which each rank waits; a forward beside a backward lasts as long as both."""
    last, done = 2 * len(of_ranks) - 1, {}
    place, clock, work = ([0] * len(of_ranks) for _ in range(3))

    def needs(kind: str, stage: int, number: int) -> tuple[str, int, int] | None:
        if kind == "F":
            return ("F", stage - 1, number) if stage else None
        if kind == "W":
            return "I", stage, number
        return ("I", stage + 1, number) if stage < last else ("F", last, number)

    while any(place[r] < len(of_ranks[r]) for r in range(len(of_ranks))):
        before = sum(place)
        for r, actions in enumerate(of_ranks):
            while place[r] < len(actions):
                parts = actions[place[r]]
                wanted = [n for n in (needs(*p) for p in parts) if n is not None]
                if any(n not in done for n in wanted):
                    break
                seconds = sum(durations[kind] for kind, *_ in parts)
                clock[r] = max([clock[r], *(done[n] for n in wanted)]) + seconds
                work[r] += seconds
                done |= {("I" if kind == "B" else kind, *rest): clock[r] for kind, *rest in parts}
                place[r] += 1
        assert sum(place) > before, "ranks wait for each other"
    return [max(clock) - w for w in work]


@pytest.mark.parametrize("forward, inputs, weights", [(1, 1, 1), (2, 2, 1), (4, 4, 3)])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_bubble_of_dualpipev_by_event_order(count, forward, inputs, weights):
    """(p - 1)(F&B + B - 3 W), DeepSeek's closed form, where F&B is a forward beside a backward, here one after the
    other."""
    both = inputs + weights
    durations = {"F": forward, "I": inputs, "W": weights, "B": both}
    for microbatches in (2 * count, 3 * count):
        orders = orders_of("DualPipeV", count, 2 * count, microbatches)
        waits = bubbles(orders, durations)
        assert max(waits) == (count - 1) * (forward + both + both - 3 * weights), waits
