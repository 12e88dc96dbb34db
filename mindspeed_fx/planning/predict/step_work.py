"""The kernels and messages of a whole step, stage by stage; see :mod:`layer_work` for one layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_fx.cost.operators import Cost
from mindspeed_fx.planning.predict.architecture import Architecture
from mindspeed_fx.planning.predict.layer_work import LOSS_BYTES, LayerBuilder, LayerWork, Work
from mindspeed_fx.planning.predict.settings import Settings

UPDATE_BYTES = {"adam": 46, "momentum": 26, "sgd": 14}
"""Bytes that the optimizer moves for each parameter it has: norm and clipping of the gradient (8), Adam on float32
copies (read gradient, copy and two moments, write three), the 16-bit copy (6), zeroing the gradient (4)."""


@dataclass
class StepWork:
    """What a rank does; seconds come from :mod:`timing`."""

    dense: LayerWork
    moe: LayerWork
    head: LayerWork
    embedding: LayerWork
    parameters: float
    """On the fullest rank, experts not counted."""
    expert_parameters: float
    update: Work = field(default_factory=Work)
    sync: Work = field(default_factory=Work)
    """Gradients' reductions and parameters' gathers of one step (ZeRO 0 to 2)."""
    layer_gather: Work = field(default_factory=Work)
    """With ZeRO 3: of one layer, in one pass."""
    layer_reduce: Work = field(default_factory=Work)


def stage_layers(model: Architecture, run: Settings) -> float:
    """Layers of the fullest stage, the head counted as none."""
    total = model.layers + model.mtp_layers
    return max(1, -(-total // (run.pp * run.vpp))) * run.vpp if run.pp > 1 else total


def step_work(model: Architecture, run: Settings) -> StepWork:
    """The work of ``run``, independent of the device."""
    builder = LayerBuilder(model, run)
    dense, moe, head, embedding = (LayerWork() for _ in range(4))
    builder.attention(dense)
    builder.dense(dense)
    if model.experts:
        builder.attention(moe)
        builder.experts(moe)
    _head(builder, head)
    _embedding(builder, embedding)
    share = stage_layers(model, run) / max(1, model.layers + model.mtp_layers)
    dense_layers = model.layers - model.moe_layers
    own = model.attention_parameters * (model.layers + model.mtp_layers) + dense_layers * model.dense_parameters
    own += (model.moe_layers + model.mtp_layers * bool(model.experts)) * model.shared_parameters
    tables = model.embedding_parameters * (2 if run.pp == 1 and not model.tied else 1)
    tables += model.max_positions * model.hidden
    local = (own * share + tables) / run.tp
    experts = model.experts * model.expert_parameters * (model.moe_layers + model.mtp_layers) * share
    experts /= run.ep * run.expert_tp
    result = StepWork(dense, moe, head, embedding, local, experts)
    _synchronize(result, model, run)
    return result


def _head(builder: LayerBuilder, work: LayerWork) -> None:
    model, run = builder.model, builder.run
    builder._norm(work, builder.own_tokens * model.hidden)
    builder.into(work, model.hidden)
    width = model.vocab / run.tp
    builder.product(work, "head", builder.tokens, width, model.hidden)
    scale = builder.size / 2
    work.forward.stream("loss", LOSS_BYTES[0] * builder.tokens * width * scale, 12)
    work.backward.stream("loss", LOSS_BYTES[1] * builder.tokens * width * scale, 6)
    if run.tp > 1:
        for _ in range(3):
            work.forward.send("tp", "all_reduce", 4 * builder.tokens, "tp")


def _embedding(builder: LayerBuilder, work: LayerWork) -> None:
    elements = builder.tokens * builder.model.hidden
    work.forward.stream("vector", 3 * builder.size * elements, 4)
    work.backward.stream("vector", 6 * elements, 4)
    if builder.run.tp > 1:
        kind = "reduce_scatter" if builder.run.sequence_parallel else "all_reduce"
        work.forward.send("tp", kind, elements * builder.size, "tp")


def _synchronize(result: StepWork, model: Architecture, run: Settings) -> None:
    """Gradients over the ranks that hold copies, parameters back, and the optimizer between."""
    adapters = lora_parameters(model, run) if run.lora else 0.0
    layers = model.layers + model.mtp_layers
    for count, trained, group, ranks in (
        (result.parameters, adapters or result.parameters, "dp", run.copies),
        (
            result.expert_parameters,
            0.0 if run.lora else result.expert_parameters,
            "expert_dp",
            max(1, run.copies * run.tp // (run.ep * run.expert_tp)),
        ),
    ):
        shards = min(run.shards or ranks, ranks) if run.zero else 1
        gradient = trained * (4 if run.float32_gradients or run.itemsize == 4 else 2)
        if run.zero == 3 and count:
            result.layer_gather.send("dp", "all_gather", count * run.itemsize / layers, group, True)
            result.layer_reduce.send("dp", "reduce_scatter", gradient / layers, group, True)
        elif ranks > 1 and run.zero and trained:
            result.sync.send("dp", "reduce_scatter", gradient, group, run.overlap_gradients)
            result.sync.send("dp", "all_gather", trained * run.itemsize, group, run.overlap_parameters)
        elif ranks > 1 and trained:
            result.sync.send("dp", "all_reduce", gradient, group, run.overlap_gradients)
        if trained:
            nbytes = UPDATE_BYTES[run.optimizer] * trained / shards
            result.update.add("optimizer", Cost(read=nbytes / 2, write=nbytes / 2, launches=40))


def lora_parameters(model: Architecture, run: Settings) -> float:
    """Of adapters on the attention's and feed-forward products of the fullest rank."""
    a = model.hidden + (model.heads + 2 * model.groups) * model.dim + model.hidden + model.heads * model.dim
    b = model.hidden + (2 if model.gated else 1) * model.ffn + model.hidden + model.ffn
    return run.lora * (a + b) * stage_layers(model, run) / run.tp
