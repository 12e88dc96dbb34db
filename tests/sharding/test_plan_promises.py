"""What a plan says beside placements is done, kept and shown: recomputation and microbatches."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from mindspeed_fx.planning.search.layouts import MOST, microbatches
from mindspeed_fx.report import recorder
from mindspeed_fx.sharding.plan import Plan, ShardingError
from mindspeed_fx.sharding.presets import named_plan
from tests.sharding.llama import Llama
from tests.sharding.test_any_model import equal


def small(**more):
    torch.manual_seed(0)
    return Llama(**{"layers": 2, **more}).double()


def batch(rows=4, seq=16):
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randint(0, 64, (rows, seq), generator=generator) for _ in range(2))


# --------------------------------------------------------------------------- as data


@pytest.mark.parametrize("file", ["plan.yaml", "plan.json"])
def test_words_are_kept_and_compared(file, tmp_path):
    bare = named_plan("tp_sp", small())
    plan = dataclasses.replace(bare, recompute="norm+activation_function", microbatches=4)
    plan.save(tmp_path / file)
    loaded = Plan.load(tmp_path / file)
    assert (loaded.recompute, loaded.microbatches) == (
        "norm+activation_function",
        4,
    ) and loaded.as_dict() == plan.as_dict()
    assert "microbatches" in (text := bare.diff(plan)) and "norm+activation_function" in text
    assert not {"recompute", "microbatches"} & set(bare.as_dict())
    summed = named_plan("zero2", small()) + plan
    assert (summed.recompute, summed.microbatches) == ("norm+activation_function", 4)
    with pytest.raises(ShardingError, match="recompute is 'full' and 'norm"):
        dataclasses.replace(named_plan("zero2", small()), recompute="full") + plan


@pytest.mark.parametrize(
    "given,says",
    [
        ({"recompute": "fully"}, 'did you mean "full"'),
        ({"recompute": "auto"}, "recompute is 'auto'"),
        ({"recompute": 1}, "recompute is 1"),
        ({"recompute": "full+norm"}, "joined"),
        ({"recompute": "norm+norm"}, "joined"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"microbatches": True}, "microbatches is True"),
        ({"microbatches": "4"}, "microbatches is '4'"),
        ({"microbatches": 2.0}, "microbatches is 2.0"),
    ],
)
def test_bad_words(given, says):
    with pytest.raises(ShardingError) as error:
        Plan("mine", ("dp",), **given)
    assert says in str(error.value) and "mine" in str(error.value)


# --------------------------------------------------------------------------- recompute


@pytest.fixture
def trained():
    """``trained(plan, sizes, **options)``: bytes that rank 0 keeps for the backward beside parameters, and the passes'
    reports.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def run(plan, sizes, **options):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model, kept = mindspeed_fx.parallelize(small(layers=1), mesh, plan), {}

        def keep(t):
            if type(t) is torch.Tensor:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        torch._dynamo.reset()
        with recorder.collecting() as graphs:
            step = torch.compile(
                model,
                backend="mindspeed",
                fullgraph=True,
                dynamic=False,
                options={"codegen": "eager", "level": 1, **options},
            )
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                loss = step(*batch())
            loss.backward()
        parameters = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}
        dist.destroy_process_group()
        return (
            sum(n for where, n in kept.items() if where not in parameters),
            {r.report.name: r.report for g in graphs for r in g.runs},
            graphs[0].effective,
        )

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()


def test_recompute_of_a_plan_is_done(trained):
    """Less is kept the more is said, gathered activations are not kept, and a user's option goes first."""
    plan = {
        word: dataclasses.replace(named_plan("tp_sp", small(layers=1)), recompute=word)
        for word in (None, "norm+activation_function", "full")
    }
    kept = {word: trained(p, {"tp": 2}) for word, p in plan.items()}
    assert kept["full"][0] < kept["norm+activation_function"][0] < kept[None][0]
    assert kept["full"][0] < 0.5 * kept[None][0], (
        "between layers the residual stream in parts, and what is outside of layers"
    )
    for word in ("norm+activation_function", "full"):
        _, reports, effective = kept[word]
        assert reports["recompute.policy"].rewrites and effective["recompute"] == f"{word}, by the plan"
        assert [s.operator for s in reports["sharding.regather"].rewrites].count("all_gather") == 2
        assert not reports["sharding.verify"].skipped
    _, reports, effective = kept[None]
    assert (
        not reports["recompute.policy"].rewrites
        and not reports["sharding.regather"].rewrites
        and effective["recompute"] is None
    )
    _, reports, effective = trained(plan["full"], {"tp": 2}, recompute="none")
    assert (
        not reports["recompute.policy"].rewrites
        and not reports["sharding.regather"].rewrites
        and effective["recompute"] == "none"
    )


def test_zero3_gathers_again(trained):
    """The whole of a parameter is kept under zero2, and under zero3 gathered again."""
    kept = {stage: trained(named_plan(stage, small(layers=1)), {"dp": 2}) for stage in ("zero2", "zero3")}
    parameters = sum(p.numel() * 8 for p in small(layers=1).parameters() if p.ndim > 1)
    assert not kept["zero2"][1]["sharding.regather"].rewrites
    assert {s.operator for s in kept["zero3"][1]["sharding.regather"].rewrites} == {"all_gather"}
    assert kept["zero2"][0] - kept["zero3"][0] > 0.9 * parameters - small(layers=1).embed.weight.numel() * 8


# --------------------------------------------------------------------------- microbatches


def test_accumulated_steps_are_the_step_of_the_whole_batch():
    model, given = small(layers=1), batch(rows=6)
    whole = copy.deepcopy(model)
    loss = whole(*given)
    loss.backward()
    step = torch.compile(model, backend="mindspeed", options={"codegen": "eager"})
    for parts in (1, 3):
        model.zero_grad()
        mean = mindspeed_fx.accumulate(step, given[0], labels=given[1], microbatches=parts)
        assert abs(mean - loss) <= 1e-12 * abs(loss) and not mean.requires_grad
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert q.grad.abs().max() > 0 and (p.grad - q.grad).abs().max() <= 1e-12 * q.grad.abs().max()


@pytest.mark.parametrize(
    "parts,says",
    [
        (4, r"\"number 0\" of shape \(6, 16\) cannot be split into 4"),
        (0, "microbatches is 0"),
        (True, "microbatches is True"),
        (None, "microbatches is None"),
    ],
)
def test_steps_that_cannot_be_accumulated(parts, says):
    with pytest.raises(ShardingError, match=says):
        mindspeed_fx.accumulate(small(layers=1), *batch(rows=6), microbatches=parts)


def test_a_step_without_a_loss_is_refused():
    with pytest.raises(ShardingError, match=r"returned a tensor of shape \(2, 16, 32\)"):
        mindspeed_fx.accumulate(lambda ids: torch.zeros(*ids.shape, 32), batch()[0], microbatches=2)


def test_numbers_of_microbatches():
    assert (
        microbatches(1, 9) == [1, 3, 9]
        and microbatches(1, 18) == [1, 2, 3, 6, 9, 18]
        and microbatches(1, 21) == [1, 3, 7, 21]
    )
    assert (
        microbatches(4, 64) == [4, 8, 16, 64]
        and microbatches(2, 9) == [3, 9]
        and microbatches(4, 720) == [4, 8, 16, 720]
        and microbatches(8, 3) == [3]
    )
    for rows in (5040, 2**20, 720720):
        found = microbatches(1, rows)
        assert len(found) <= MOST + 1 and found[0] == 1 and found[-1] == rows and all(rows % m == 0 for m in found)


# --------------------------------------------------------------------------- of a search


def wide(rows, seq=4096, layers=8):
    """A Llama of useful width on the meta device, with its batch."""
    with torch.device("meta"):
        model = Llama(layers, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32768).bfloat16()
        return model, tuple(torch.zeros(rows, seq, dtype=torch.long) for _ in range(2))


@pytest.mark.parametrize("rows", [9, 18, 21])
def test_odd_batches_are_planned_and_what_is_found_is_told(rows, tmp_path):
    pytest.importorskip("scipy")
    plan = mindspeed_fx.plan(*wide(rows * 8, 32768), mesh={"dp": 8}, hardware="ascend910b2", memory="56GiB")
    assert rows % plan.microbatches == 0 and plan.microbatches == plan.layout.microbatches > 1 and not plan.unsupported
    assert (
        plan.row()["runs"] == f"by accumulate, {plan.microbatches} parts"
        and f"mindspeed_fx.accumulate(step, *args, microbatches={plan.microbatches})" in str(plan)
    )
    plan.save(tmp_path / "plan.yaml")
    for other in (Plan.load(tmp_path / "plan.yaml"), pickle.loads(pickle.dumps(plan))):
        assert type(other) is Plan and (other.recompute, other.microbatches) == (plan.recompute, plan.microbatches)


def test_a_plan_that_fits_by_recomputation_says_so():
    pytest.importorskip("scipy")
    from mindspeed_fx.planning.search.branch_and_bound import branch_and_bound
    from mindspeed_fx.planning.search.searched_plan import SearchedPlan

    free = mindspeed_fx.plan(*wide(1), mesh={"tp": 8}, hardware="ascend910b2")
    known, fixed = free.searched, {"pp": 1, "dp": 1, "cp": 1, "ep": 1, "tp": 8}
    for word in ("norm+activation_function", "full"):
        limit = free.memory - 1
        made = branch_and_bound(known.problem, known.prices.hw, 8, limit, keep=1, fixed=fixed, recompute=(word,))
        plan = SearchedPlan.of(dataclasses.replace(known, outcome=made), made.solutions[0])
        assert plan.recompute == word == Plan.from_dict(plan.as_dict()).recompute and word in str(plan)
        assert plan.memory < free.memory and plan.solution.parts["recompute"] > 0
    assert free.layout.recompute == "none" and free.recompute is None
    piped = mindspeed_fx.plan(*wide(8), mesh={"pp": 2, "tp": 4}, hardware="ascend910b2", keep=1)
    assert piped.row()["runs"] == f"as stages, schedule of {piped.microbatches}" and "pipeline_stage" in str(piped)
    alone = mindspeed_fx.plan(*wide(1), devices=1, hardware="ascend910b2", memory="1000GiB")
    assert alone.sizes == {"dp": 1} and alone.row()["runs"] == "yes"


@pytest.mark.parametrize(
    "mesh,rows,seq,memory,what",
    [
        ({"dp": 2}, 2, 512, "4GiB", "of parameters, gradients and optimizer states"),
        ({"tp": 2}, 1, 65536, "6GiB", "while "),
    ],
)
def test_what_does_not_fit_is_named_with_the_numbers_of_the_whole(mesh, rows, seq, memory, what):
    pytest.importorskip("scipy")
    with torch.device("meta"):
        model, args = (
            Llama(4, hidden=2048, heads=16, kv_heads=8, ffn=8192, vocab=65536).bfloat16(),
            [torch.zeros(rows, seq, dtype=torch.long) for _ in range(2)],
        )
    with pytest.raises(ShardingError) as error:
        mindspeed_fx.plan(model, args, mesh=mesh, hardware="ascend910b2", memory=memory, pipeline=False)
    text = str(error.value)
    assert (
        text.startswith(
            f"no plan for 2 ascend910b2 fits in {float(memory[:-3]):.1f} GiB; the least demanding that was tried ("
        )
        and what in text
        and "\n" not in text
    )
    needs, *parts = (float(n) for n in re.findall(r"(?:needs |: |, )([\d.]+)(?= GiB| of | while)", text))
    assert needs > float(memory[:-3]) and abs(sum(parts) - needs) < 0.3, text


def deepseek(rows, seq, **sizes):
    transformers = pytest.importorskip("transformers", minversion="5")

    class Step(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids, labels):
            return self.model(input_ids=ids, labels=labels, use_cache=False).loss

    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)).bfloat16()
        return Step(model).train(), tuple(torch.zeros(rows, seq, dtype=torch.long) for _ in range(2))


@pytest.mark.slow
def test_every_large_value_of_deepseek_is_divided_with_the_batch():
    """Latent attention splits and rotates by pieces, and the router scatters: what no rule knew was counted whole on
    every rank.
    """
    pytest.importorskip("scipy")
    from mindspeed_fx.planning.search.model_graph import trace_model

    rows, seq = 6, 10
    model, args = deepseek(
        rows,
        seq,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        qk_nope_head_dim=8,
    )
    problem = trace_model(model, args, {})
    large = [
        (n.op, v.shape)
        for n in problem.nodes
        for v in n.outs
        if math.prod(v.shape) >= rows * seq and not any(problem.batch in dim for dim in v.dims)
        if any(use.value.parameter is None for use in n.uses)  # a weight's cast has no batch
    ]
    # a token's choices are sorted by expert over all tokens, and cast to be counted: their only dimension is sorted
    assert len(problem.nodes) > 40
    assert {op for op, _ in large} == {"sort", "to"} and {shape for _, shape in large} == {(rows * seq * 2,)}, large
    assert len(repr(problem.nodes[0])) < 5000


@pytest.mark.slow
@pytest.mark.parametrize("devices", [128, 512])
def test_deepseek_v3_is_planned_or_what_does_not_fit_is_named(devices):
    """671 billion parameters of 16 bytes: 78 GiB of states on each of 128 devices, 19.5 on each of 512."""
    pytest.importorskip("scipy")
    model, args = deepseek(512, 4096)
    if devices == 128:
        with pytest.raises(
            ShardingError,
            match=r"fits in 57.6 GiB; the least demanding that was tried \(.*\) needs .* of parameters, gradients and "
            r"optimizer states",
        ):
            mindspeed_fx.plan(model, args, devices=devices, hardware="ascend910b2")
        return
    plan = mindspeed_fx.plan(model, args, devices=devices, hardware="ascend910b2", keep=1)
    assert plan.memory <= 57.6 * 2**30 and plan.layout.ep > 1


@pytest.mark.parametrize(
    "sizes,batch,mesh,says",
    [
        ({}, (3, 16), {"dp": 2}, "batch of 3 padded to 4 for 2 ranks of dp x ep (+33.3%)"),
        ({}, (4, 99), {"cp": 2}, "sequence of 99 padded to 100 for 2 ranks of cp (+1.0%)"),
        pytest.param(
            dict(vocab=1021),
            (3, 99),
            {"dp": 2, "cp": 2, "tp": 2},
            "1021 padded to 1022 for 2 ranks of tp (+0.1%)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_ranks_cannot_share_is_padded_and_priced(sizes, batch, mesh, says):
    """A searched plan says what it pads, and runs."""
    model = Llama(2, **sizes).double()
    ids, labels = (torch.randint(0, 60, batch) for _ in range(2))
    plan = mindspeed_fx.plan(model, (ids, labels), mesh=mesh, hardware="ascend910b2")
    assert f"padded: {says}" in str(plan).splitlines() and plan.keep_whole and not plan.unsupported
    result = equal(model, plan.sizes, plan, ids, labels)
    assert result.padded and not result.whole


def test_padding_has_its_time():
    """Three rows on two devices take as long as four."""
    model, seconds = Llama(1, hidden=256, ffn=1024), {}
    for rows in (2, 3, 4):
        args = tuple(torch.zeros(rows, 512, dtype=torch.long) for _ in range(2))
        seconds[rows] = mindspeed_fx.plan(model, args, mesh={"dp": 2}, zero="never", hardware="ascend910b2").seconds
    assert seconds[2] < seconds[3] == seconds[4]
