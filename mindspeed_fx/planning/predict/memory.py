"""Peak bytes of a rank: parameters, gradients, optimizer states, activations, working buffers.

Megatron's semantics. A stage holds the activations of the microbatches that wait for their backward: stage i of p under
1F1B ``min(p - i, m)`` (Narayanan et al. 2021), with v virtual stages ``2 (p - i - 1) + (v - 1) p + 1`` chunks of
1 / (p v) of the layers. What a layer keeps is counted tensor by tensor from Megatron-core's modules with flash
attention, as in Korthikanti et al. 2022. The optimizer's step has the states of all parameters and one float32 buffer
of the largest parameter.

Tests that print the peak after the first step (Megatron does) have no moments in their forward and backward: the
optimizer makes them after it. :attr:`Memory.first_step` is that peak.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_fx.planning.predict.architecture import Architecture
from mindspeed_fx.planning.predict.settings import Settings
from mindspeed_fx.planning.predict.stages import Chunk, is_all_warmup, layout, most_alive
from mindspeed_fx.planning.predict.step_work import lora_parameters

ROUNDING = 2**20 * 2
"""Bytes: what the caching allocator rounds large blocks to (torch's and torch_npu's)."""
STATISTICS = {"npu": 64, "cuda": 4, "cpu": 4}
"""Bytes of each query and head that flash attention keeps: npu_fusion_attention two statistics of eight float32, others
one."""
LOGIT_BYTES = {"legacy": 14, "fsdp": 14, "deepspeed": 14, "megatron": 6}
"""Bytes of each logit at the loss: the 16-bit logits and a float32 copy, in which exponentials and gradient are written
(Megatron-core's vocabulary-parallel cross-entropy); the legacy models and torch's cross-entropy make each anew."""
MASK_BYTES = (6, 2)
"""Bytes of each query and key of a whole attention mask, while it is made and while it is kept: MindSpeed's hybrid
context parallelism has one on every rank. From three of its tests at 32 and 64 thousand tokens, within 3 %."""
WORKSPACE = 50 * 2**20
"""Bytes of workspaces of libraries and small tensors; from the vendor's tests, 30 to 70 MiB."""
GATHERED_INPUTS = 1
"""Whole inputs of a layer's column-parallel linears that fused products and collectives (MC2) keep beside the divided
ones. From two of MindSpeed-LLM's tests at tp 8, within 3 %."""
SCATTERED = (12, 8)
"""Bytes of each element of a rank's rows and of the gathered tokens while the all-gather dispatcher adds the rows up:
an int64 index and a float32 copy of each row's element, a float32 and two 16-bit copies of each gathered one. Counted
from the operators it calls; of two tests within 10 %."""
MASK_OF_DROPOUT = {"npu": 1 / 8, "cuda": 1, "cpu": 1}
"""Bytes of each element in the mask that dropout keeps: torch_npu's are bits."""
STATES = {"adam": 8, "momentum": 4, "sgd": 0}


@dataclass
class Memory:
    """Bytes."""

    peak: float
    """Of a steady step, on the fullest rank."""
    first_step: float
    parts: dict[str, float] = field(default_factory=dict)
    """Of the peak."""
    ranks: list[float] = field(default_factory=list)
    """``first_step`` of each pipeline stage."""
    steady: list[float] = field(default_factory=list)
    """``peak`` of each pipeline stage."""


@dataclass
class _Layer:
    """Bytes of one microbatch in one layer."""

    kept: float
    input: float
    working: float


class MemoryModel:
    """See the module."""

    def __init__(self, model: Architecture, run: Settings, target: str = "npu"):
        self.model, self.run, self.target = model, run, target
        self.stages = layout(model, run)
        self.tokens = run.microbatch * run.sequence / run.cp
        self.own = self.tokens / (run.tp if run.sequence_parallel else 1)
        self.size = run.itemsize

    # ---------------------------------------------------------------- activations

    def _attention_kept(self) -> tuple[float, float]:
        """Bytes kept outside and inside of the attention operator."""
        model, run, n, b = self.model, self.run, self.tokens, self.size
        heads, groups = model.heads / run.tp, max(1.0, model.groups / run.tp)
        norm = (1 if run.recompute_norms else 2) * self.own * model.hidden * b
        if model.kv_lora:
            norm += self.own * (2 * model.q_lora + 2 * model.kv_lora + model.rope_dim) * b
            groups = heads
            # The vendor's kernel takes values as wide as keys: padded ones are kept, and its output beside what is cut.
            padding = n * heads * (model.qk_dim - model.value_dim) * b
            norm += (2 * padding + n * heads * model.value_dim * b) if self.target == "npu" else 0.0
        qkv = n * (heads * model.qk_dim + groups * (model.qk_dim + model.value_dim)) * b
        rotated = 0.0 if "rope" in run.fused else n * (heads + groups) * model.dim * b
        out = n * heads * model.value_dim * b
        if "attention" in run.fused:
            inside = n * heads * STATISTICS[self.target]
        else:
            inside = run.microbatch * heads * (run.sequence / run.cp) * run.sequence * b
        return norm + rotated, qkv + out + inside

    def _feed_forward_kept(self, rows: float, width: float) -> float:
        gate = 2 if self.model.gated else 1
        unfused = 1 if self.model.gated and "swiglu" not in self.run.fused else 0
        out = 0 if self.run.recompute_activation else 1
        return rows * width * (gate + unfused + out) * self.size

    def _experts_kept(self, rows: float, level: str = "") -> float:
        """Tokens permuted, exchanged and sorted by expert, what the experts keep, and what they return; of zero memory
        what the exchange returned and the first product (level 0), or nothing but what is returned (level 1)."""
        model, run, b = self.model, self.run, self.size
        gate = 2 if model.gated else 1
        width = model.expert_ffn / run.expert_tp
        own = rows * model.hidden * b / run.expert_tp
        level = level or run.expert_memory
        if level == "level1":
            return own
        if level == "level0":
            return own + rows * (model.hidden + gate * width) * b
        return 2 * own + rows * model.hidden * b + self._feed_forward_kept(rows, width)

    def layer(self, moe: bool) -> _Layer:
        model, run, b = self.model, self.run, self.size
        residual = self.own * model.hidden * b
        kept, inside = self._attention_kept()
        kept += 2 * self.own * model.hidden * MASK_OF_DROPOUT[self.target] if run.dropout else 0.0
        if run.overlap_tp and not run.tp_chunks and run.sequence_parallel and self.target == "npu":
            kept += (self.tokens - self.own) * model.hidden * b * GATHERED_INPUTS
        kept += 0.0 if "rms_norm" in run.fused or model.norm != "rms" else 2 * 4 * self.own * model.hidden
        kept += 0.0 if run.offload == "attention" else inside
        gate = 3 if model.gated else 2
        widest = self.tokens * max(model.ffn / run.tp * gate, 3 * model.hidden) * b
        if not moe:
            kept += (1 if run.recompute_norms else 2) * residual
            kept += self._feed_forward_kept(self.tokens, model.ffn / run.tp)
        else:
            rows = self.own * model.top_k * run.expert_tp
            kept += (1 if run.recompute_norms else 2) * residual + self._experts_kept(rows)
            kept += self._feed_forward_kept(self.tokens, model.shared_ffn / run.tp) if model.shared_ffn else 0.0
            if run.dispatcher == "allgather":
                kept += self.own * run.ep * model.hidden * b
            widest = rows * max(model.expert_ffn / run.expert_tp * gate, 2 * model.hidden) * b
            if run.dispatcher == "allgather":
                widest = max(
                    widest, rows * model.hidden * SCATTERED[0] + self.own * run.ep * model.hidden * SCATTERED[1]
                )
            if run.expert_memory != "none":  # what the backward makes again
                widest += self._experts_kept(rows, "none") - self._experts_kept(rows)
        gathered = self.tokens * model.hidden * b if run.tp > 1 and run.sequence_parallel else 0.0
        return _Layer(kept, residual, widest + 2 * gathered)

    def chunk_kept(self, chunk: Chunk) -> float:
        """Bytes that one microbatch keeps in a chunk: of recomputed layers, the first ones, their input."""
        dense_again = min(chunk.again, chunk.dense)
        kept = 0.0
        for count, again, is_moe in (
            (chunk.dense, dense_again, False),
            (chunk.moe, chunk.again - dense_again, True),
        ):
            if count:
                layer = self.layer(is_moe)
                kept += (count - again) * layer.kept + again * layer.input
        return kept

    def stage_activations(self, rank: int) -> tuple[float, float]:
        """Bytes kept on a stage by the microbatches in flight, and of buffers."""
        model, run, stage = self.model, self.run, self.stages[rank]
        weights = [self.chunk_kept(c) for c in stage.chunks]
        weights[-1] += stage.mtp * self.layer(bool(model.experts)).kept
        kept = most_alive(run, rank, weights)
        working = 0.0
        for is_moe in (False, True):
            if any(c.moe if is_moe else c.dense for c in stage.chunks):
                layer = self.layer(is_moe)
                working = max(working, layer.working + (layer.kept if any(c.again for c in stage.chunks) else 0.0))
        if rank == run.pp - 1:
            each = LOGIT_BYTES.get(run.framework, LOGIT_BYTES["megatron"]) * self.size / 2
            logits = self.tokens * model.vocab / run.tp / run.loss_chunks * each
            head = (logits + 3 * self.tokens * model.hidden * self.size) * (1 + stage.mtp)
            return kept, max(working, head * (run.microbatches if is_all_warmup(run) else 1))
        return kept, working

    # ---------------------------------------------------------------- parameters

    def stage_parameters(self, stage: int) -> tuple[float, float, float]:
        """Parameters on a rank outside of experts, in experts, and of the largest tensor."""
        model, run = self.model, self.run
        own_layers = self.stages[stage]
        dense, moe, mtp = own_layers.dense, own_layers.moe, own_layers.mtp
        if model.experts:
            moe += mtp
        else:
            dense += mtp
        layers = dense + moe
        own = layers * model.attention_parameters + dense * model.dense_parameters + moe * model.shared_parameters
        own += mtp * 2 * model.hidden**2  # the projection of a token and its hidden state
        own += 2 * layers * model.hidden
        table = model.embedding_parameters
        if stage == 0:
            own += table + model.max_positions * model.hidden
        if stage == run.pp - 1 and (run.pp > 1 or not model.tied):
            own += table
        if mtp and run.pp > 1:  # further tokens are embedded where they are predicted
            own += table
        experts = moe * model.experts * model.expert_parameters / (run.ep * run.expert_tp)
        gate = 2 if model.gated else 1
        largest = gate * model.hidden * model.ffn / run.tp
        if stage in (0, run.pp - 1):
            largest = max(largest, table / run.tp)
        if experts:
            largest = max(largest, model.experts / run.ep * gate * model.hidden * model.expert_ffn / run.expert_tp)
        return own / run.tp, experts, largest

    def predict(self) -> Memory:
        """The peak over stages and phases."""
        run = self.run
        stages = [self._stage(stage) for stage in range(run.pp)]
        ranks = [m.first_step for m in stages]
        fullest = max(stages, key=lambda m: m.peak)
        return Memory(fullest.peak, max(ranks), fullest.parts, ranks, [m.peak for m in stages])

    def _stage(self, stage: int) -> Memory:
        run = self.run
        own, experts, largest = self.stage_parameters(stage)
        expert_ranks = max(1, run.copies * run.tp // (run.ep * run.expert_tp))
        weights = gradients = masters = moments = 0.0
        updated: list[float] = []
        for count, ranks in ((own, run.copies), (experts, expert_ranks)):
            shards = min(run.shards or ranks, ranks) if run.zero else 1
            trained = count
            if run.lora:
                trained = lora_parameters(self.model, run) if count is own else 0.0
            weights += count * self.size / (shards if run.zero == 3 else 1)
            each = 4 if run.float32_gradients or self.size == 4 else 2
            gradients += trained * each / (shards if run.zero >= 2 else 1)
            updated.append(trained / shards)
            masters += trained * (4 if self.size == 2 else 0) / shards
            moments += trained * STATES[run.optimizer] / shards
        if run.reuse_float32:
            weights = max(0.0, weights - masters / 2)
        if run.offload == "optimizer":
            masters = moments = 0.0
        kept, working = self.stage_activations(stage)
        if run.zero == 3:
            working += 2 * (own + experts) * self.size / max(1, self.model.layers)
        static = weights + gradients + masters
        update = static + moments + self._update_buffer((updated[0], updated[1]), largest)
        making, mask = (n * float(run.sequence) ** 2 * (run.cp_kind == "hybrid" and run.cp > 1) for n in MASK_BYTES)
        working += mask
        peak = max(static + moments + max(kept + working, making), update) + WORKSPACE
        first = max(static + max(kept + working, making), update) + WORKSPACE
        parts = {
            "parameters": weights,
            "gradients": gradients,
            "optimizer": masters + moments,
            "activations": kept,
            "buffers": peak - weights - gradients - masters - moments - kept,
        }
        return Memory(_rounded(peak), _rounded(first), parts)

    def _update_buffer(self, shares: tuple[float, float], largest: float) -> float:
        """Bytes that the optimizer's step has beside its states: a float32 copy of the largest gradient, or of the part
        of it in a rank's share; float16 gradients become float32 ones all at once.

        Args:
            shares: parameters outside of experts and in experts that a rank updates.
        """
        if self.run.precision == "float16" and not self.run.float32_gradients:
            return 4 * sum(shares)
        return 4 * min(largest, max(shares))


def _rounded(nbytes: float) -> float:
    return -(-nbytes // ROUNDING) * ROUNDING


def peak_memory(model: Architecture, run: Settings, target: str = "npu") -> Memory:
    """Peak bytes of the fullest rank of a run.

    Args:
        target: "npu", "cuda" or "cpu": what its flash attention keeps.
    """
    return MemoryModel(model, run, target).predict()
