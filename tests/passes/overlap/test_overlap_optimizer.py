"""Option "optimizer": parameters step inside the backward graph as torch.optim.AdamW steps them after it."""

import copy

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from tests import ranks

SETTINGS = {"codegen": "eager", "hardware": "h100", "optimizer": "backward"}


def model(dtype=torch.float64):
    torch.manual_seed(0)
    made = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    ).to(dtype)
    made[2].weight.requires_grad_(False)
    made[4].register_parameter("unused", torch.nn.Parameter(torch.ones(3, dtype=dtype)))
    return made


def adamw(m, **settings):
    """Two groups of unlike settings; the frozen weight is in one of them."""
    rest = [p for n, p in m.named_parameters() if n[0] != "0"]
    return torch.optim.AdamW(
        [{"params": m[0].parameters(), "betas": (0.8, 0.95)}, {"params": rest, "weight_decay": 0.3, "eps": 1e-4}],
        lr=0.1,
        foreach=False,
        **settings,
    )


def batch(k, dtype=torch.float64):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(k)).to(dtype)


def train(run, optimizer, steps, dtype=torch.float64):
    """Steps under a falling learning rate; what has a gradient afterwards is stepped by the optimizer itself."""
    for k in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.7**k
        run(batch(k, dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def close(m, reference, rtol=1e-12):
    for (name, p), q in zip(m.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(p, q[1], rtol=rtol, atol=rtol, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_steps_are_those_of_adamw(codegen):
    torch._dynamo.reset()
    m, reference = model(), model()
    before = copy.deepcopy(m)
    optimizer, rival = adamw(m), adamw(reference)
    mindspeed_fx.step_in_backward(optimizer)
    run = torch.compile(m, backend="mindspeed", options={**SETTINGS, "codegen": codegen})
    train(run, optimizer, [0, 1], dtype=torch.float64)
    train(reference, rival, [0, 1])
    close(m, reference)
    assert not any(
        torch.equal(p, q)
        for p, q, trained in zip(m.parameters(), before.parameters(), [1, 1, 0, 1, 1, 1, 0])
        if trained
    )
    assert (
        torch.equal(m[2].weight, before[2].weight)
        and torch.equal(m[4].unused, before[4].unused)
        and all(p.grad is None for p in m.parameters())
    )
    run(batch(7)).square().sum()  # forward alone steps nothing
    close(m, reference)
    # the state is the optimizer's own: saved, and loaded into another
    saved = copy.deepcopy(optimizer.state_dict())
    assert [int(s["step"]) for s in saved["state"].values()] == [2] * 5
    optimizer.load_state_dict(saved)
    train(run, optimizer, [2])
    train(reference, rival, [2])
    close(m, reference)


def test_bfloat16_is_within_twice_its_own_error():
    torch._dynamo.reset()
    exact, m, reference = model(), model(torch.bfloat16), model(torch.bfloat16)
    optimizer = adamw(m)
    mindspeed_fx.step_in_backward(optimizer)
    train(torch.compile(m, backend="mindspeed", options=SETTINGS), optimizer, range(3), torch.bfloat16)
    train(reference, adamw(reference), range(3), torch.bfloat16)
    train(exact, adamw(exact), range(3))
    for p, q, e in zip(m.parameters(), reference.parameters(), exact.parameters(), strict=True):
        assert (p.double() - e).norm() <= 2 * (q.double() - e).norm() + 1e-12


def test_steps_write_in_place_where_their_gradients_are_ready():
    torch._dynamo.reset()
    m = model()
    mindspeed_fx.step_in_backward(adamw(m))
    report = mindspeed_fx.explain(m, batch(0), options=SETTINGS)
    code = report.graphs[0].stages["backward"]
    assert len(report.sites("overlap.step")) == 5 and "functionalized" not in code and "copy_" not in code
    assert code.index("adamw_step") < code.rindex("aten.mm(") and "adamw_step" not in report.graphs[0].stages["forward"]
    assert "step in the backward" in report.effective_options["caches"]


def test_a_weight_steps_after_every_read_of_it():
    """A tied weight is read twice; the gradient of the input needs it as it was."""
    torch._dynamo.reset()
    weights = [
        torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(s)).double()) for s in (1, 1)
    ]
    own = torch.optim.Adam(weights[:1], lr=0.1, foreach=False)
    mindspeed_fx.step_in_backward(own)
    rival = torch.optim.Adam(weights[1:], lr=0.1, foreach=False)
    f = lambda x, w: torch.tanh(torch.tanh(x @ w) @ w.t()) @ w
    grads = []
    for run, w in ((torch.compile(f, backend="mindspeed", options=SETTINGS), weights[0]), (f, weights[1])):
        x = batch(3).requires_grad_()
        run(x, w).square().sum().backward()
        grads.append(x.grad)
    rival.step()
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-12)
    run = torch.compile(f, backend="mindspeed", options=SETTINGS)
    y = run(x, weights[0]) + run(x, weights[0])  # two forwards, two steps: not a sum of gradients
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.square().sum().backward()


def test_what_is_refused():
    m = model()
    parameters = lambda: list(model().parameters())
    for optimizer, match in (
        (torch.optim.SGD(parameters(), lr=0.1), "the optimizer is SGD; valid: torch.optim.AdamW"),
        (adamw(m, amsgrad=True), "group 0 has amsgrad=True"),
        (adamw(m, maximize=True), "group 0 has maximize=True"),
        (
            torch.optim.Adam(parameters(), weight_decay=0.1),
            "group 0 of Adam has weight_decay=0.1, added to the gradient",
        ),
        (torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, 2).t())]), r"shape \[2, 3\] in group 0 is not contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            mindspeed_fx.step_in_backward(optimizer)
    mindspeed_fx.step_in_backward(adamw(m))
    with pytest.raises(ValueError, match="is stepped by another optimizer"):
        mindspeed_fx.step_in_backward(adamw(m))
    with pytest.raises(OptionError, match='"optimizer" is \'backwards\'; valid: "backward"'):
        Options(optimizer="backwards")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="call mindspeed_fx.step_in_backward"):
        torch.compile(model(), backend="mindspeed", options=SETTINGS)(batch(0))


def test_a_bucket_is_one_step(fake_world, monkeypatch):
    from mindspeed_fx.graph.collectives import is_start
    from mindspeed_fx.passes.overlap.model.costs import transfer

    def communication_alone(gm, hardware, fused):
        return lambda node: (float(transfer(node, hardware).seconds), "wire") if is_start(node) else (0.0, "")

    for module in ("bucket", "chunking.chunk_search"):  # the first pass hands its tasks on
        monkeypatch.setattr(f"mindspeed_fx.passes.overlap.{module}.cost_of", communication_alone)
    torch._dynamo.reset()
    m = model()
    mindspeed_fx.step_in_backward(adamw(m))
    report = mindspeed_fx.explain(m, batch(0), options={**SETTINGS, "data_parallel": "world", "overlap_memory": "1MiB"})
    sites = [s.operator for s in report.sites("overlap.bucket")]
    buckets = [int(s.split(" of ")[1].split(",")[0]) for s in sites if s.startswith("all_reduce")]
    assert buckets and [int(s.split()[3]) for s in sites if s.startswith("one step")] == buckets, sites
    assert report.graphs[0].stages["backward"].count("mindspeed.adamw_step(") == 5 - sum(buckets) + len(buckets)


def two_ranks(rank, store):
    torch.set_num_threads(1)
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for codegen in ("eager", "inductor"):
        m, reference = model(), model()
        optimizer, rival = adamw(m), adamw(reference)
        mindspeed_fx.step_in_backward(optimizer)
        run = torch.compile(
            m,
            backend="mindspeed",
            options={**SETTINGS, "codegen": codegen, "data_parallel": "world", "overlap_memory": "1MiB"},
        )
        other = DistributedDataParallel(reference, find_unused_parameters=True)
        for k in range(3):
            run(batch(10 * k + rank)).square().sum().backward()
            rival.zero_grad()
            other(batch(10 * k + rank)).square().sum().backward()
            reference[4].unused.grad = None  # DistributedDataParallel gives it zeros
            rival.step()
        close(m, reference)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_as_distributed_data_parallel(tmp_path):
    ranks.spawn(two_ranks, (str(tmp_path / "store"),), nprocs=2)
