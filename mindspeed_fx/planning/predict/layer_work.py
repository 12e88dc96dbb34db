"""The kernels and messages of one layer for one microbatch on one rank, forward and backward.

Kernels are costs of :mod:`mindspeed_fx.cost.operators`, messages are collectives of
:mod:`mindspeed_fx.cost.collectives`. ``n`` tokens of a microbatch are on a rank after context parallelism divides the
sequence; with sequence parallelism a norm sees ``n / tp`` of them. Counts of passes over an activation are those of
Megatron's modules: a fused operator reads its inputs and writes its outputs once, an unfused one is the chain of
pointwise kernels that its Python code launches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from mindspeed_fx.cost.operators import Cost, Spec, attention, product
from mindspeed_fx.planning.predict.architecture import Architecture
from mindspeed_fx.planning.predict.settings import Settings


@dataclass(frozen=True)
class Kernel:
    part: str
    cost: Cost
    times: float = 1.0
    chained: float = 0.0
    """Bytes of ``cost`` between the kernels of a chain: written by one, read by the next."""
    alive: float = 0.0
    """Bytes of the chain's tensors that are alive at once: where a cache holds them, ``chained`` stay in it."""


@dataclass(frozen=True)
class Message:
    part: str
    kind: str
    """A collective of :data:`mindspeed_fx.cost.collectives.KINDS`."""
    nbytes: float
    group: str
    """Dimension of the mesh: "tp", "cp", "ep", "dp", "expert_dp", "pp"."""
    hidden: float = 0.0
    """Share that is sent while kernels run."""


@dataclass
class Work:
    """What runs in one pass."""

    kernels: list[Kernel] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def add(self, part: str, cost: Cost, times: float = 1.0) -> None:
        self.kernels.append(Kernel(part, cost, times))

    def send(self, part: str, kind: str, nbytes: float, group: str, hidden: float = 0.0) -> None:
        self.messages.append(Message(part, kind, nbytes, group, hidden))

    def stream(self, part: str, nbytes: float, launches: int = 1, chained: float = 0.0, alive: float = 0.0) -> None:
        """Pointwise kernels that move ``nbytes`` in all."""
        cost = Cost(read=nbytes / 2, write=nbytes / 2, launches=launches)
        self.kernels.append(Kernel(part, cost, chained=chained, alive=alive))

    @property
    def launches(self) -> float:
        return sum(k.cost.launches * k.times for k in self.kernels) + len(self.messages)


@dataclass
class LayerWork:
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)


UNFUSED = {
    # bytes of each element and kernels: fused forward, fused backward, unfused forward, unfused backward
    "rms_norm": ((4, 1), (8, 2), (30, 6), (44, 12)),
    "layer_norm": ((4, 1), (8, 2), (4, 1), (8, 2)),
    "rope": ((4, 1), (4, 1), (18, 5), (20, 6)),
    "swiglu": ((6, 1), (10, 1), (10, 3), (24, 5)),
    "gelu": ((4, 1), (6, 1), (46, 10), (92, 20)),
}
"""Of 16-bit activations, counted from Megatron-core's modules: an unfused RMSNorm casts, squares, averages, scales,
casts back and multiplies; RoPE multiplies by cosine and sine, turns halves and adds; SwiGLU splits, activates and
multiplies; a bias and the tanh formula of GELU are ten kernels, its gradient nineteen and the bias's sum. An element of
SwiGLU is one of its output."""
ALIVE = {"rms_norm": 8, "layer_norm": 4, "rope": 6, "swiglu": 8, "gelu": 8}
"""Bytes of each element of what a kernel of such a chain reads and writes: float32 in and out of a norm, two operands
and a result of a rotation, both halves and two results of a SwiGLU, and what waits beside a GELU's three."""
SOFTMAX_BYTES = (4, 6)
"""Bytes of each score that unfused attention moves beside its products, forward and backward: one kernel scales, masks
and divides (Megatron's masked-softmax fusion, torch_npu's npu_scaled_masked_softmax), one does the gradient."""
ACCUMULATED_BYTES = (8, 10)
"""Bytes of each gradient of a weight that is added to float32: by the product itself, which reads and writes the sum,
and by a kernel behind it, which reads 16 bits beside."""
ACCUMULATED_IN_16_BITS = (4, 6)
"""The same of sums in the gradient's own type (float16, or Megatron's --grad-reduce-in-bf16)."""
LOSS_BYTES = (34, 14)
"""Bytes of each logit in Megatron's vocabulary-parallel cross-entropy, forward and backward: cast to float32, maximum,
difference, exponential, sum, division; gradient and cast back."""
MICRO_OPERATORS = (12, 16)
"""Kernels of a layer that are neither products nor counted above, forward and backward: transposes, casts, views that
copy, random states. Counted in a Megatron-core trace; they matter where the host is the bottleneck."""

RING_OPERATORS = (24, 20)
"""Kernels of one step of a ring beside attention's own, forward and backward: keys and values put together and taken
apart, halves of queries and outputs, the outputs' weights, their sum, sends. Counted from MindSpeed's ring."""
RING_BYTES = (12, 8)
"""Bytes of each element of a ring step's output that its sum with the steps before moves: two float32 operands and one
result, and the gradients that are added."""


class LayerBuilder:
    """See the module; one for each (model, settings)."""

    def __init__(self, model: Architecture, run: Settings):
        self.model, self.run = model, run
        self.tokens = run.microbatch * run.sequence / run.cp
        self.own_tokens = self.tokens / (run.tp if run.sequence_parallel else 1)
        self.size = run.itemsize
        self.matrix_dtype = run.precision

    # ---------------------------------------------------------------- kernels

    def product(self, work: LayerWork, part: str, m: float, n: float, k: float, trained: bool = True) -> None:
        """``m`` tokens times a weight [k, n] and its two gradients."""
        work.forward.add(part, self._matmul(m, n, k))
        work.backward.add(part, self._matmul(m, k, n))
        if trained and not self.run.lora:
            work.backward.add(part, self._matmul(k, n, m))
            self._accumulate(work, n * k)
        if self.run.lora and part in ("attention products", "dense products"):
            self._adapter(work, m, n, k)

    def _accumulate(self, work: LayerWork, elements: float) -> None:
        """A weight's gradient added to its sum; frameworks without a buffer of sums have none in 16 bits."""
        fused = "matmul_add" in self.run.fused
        nbytes = ACCUMULATED_BYTES if self.run.float32_gradients else ACCUMULATED_IN_16_BITS
        if self.run.float32_gradients or self.run.framework in ("megatron", "legacy"):
            work.backward.stream("gradients", nbytes[not fused] * elements, launches=0 if fused else 1)

    def _adapter(self, work: LayerWork, m: float, n: float, k: float) -> None:
        """A product's low-rank neighbour, x A B added to x W: its products, and the sums of what both make."""
        rank = self.run.lora
        for shape in ((m, rank, k), (m, n, rank)):
            work.forward.add("adapters", self._matmul(*shape))
        for shape in ((m, rank, n), (rank, n, m), (m, k, rank), (k, rank, m)):
            work.backward.add("adapters", self._matmul(*shape))
        work.forward.stream("adapters", 3 * self.size * m * n, 2)
        work.backward.stream("adapters", 3 * self.size * m * k, 2)

    def _matmul(self, m: float, n: float, k: float) -> Cost:
        m, n, k = (max(1, int(x)) for x in (m, n, k))
        width, dtype = self.size, self.matrix_dtype
        return product(Spec((m, n), dtype, width), k, Spec((m, k), dtype, width), Spec((k, n), dtype, width))

    def pointwise(self, work: LayerWork, name: str, elements: float, forward_only: bool = False) -> None:
        is_fused = name in self.run.fused if name != "gelu" else not self.run.gelu_chain
        fused, own = UNFUSED[name][:2], UNFUSED[name][:2] if is_fused else UNFUSED[name][2:]
        scale = elements * self.size / 2
        for phase, (nbytes, count), (least, _) in zip((work.forward, work.backward), own, fused):
            if phase is work.forward or not forward_only:
                phase.stream("vector", nbytes * scale, count, (nbytes - least) * scale, ALIVE[name] * scale)

    def _norm(self, work: LayerWork, elements: float) -> None:
        self.pointwise(work, "rms_norm" if self.model.norm == "rms" else "layer_norm", elements)

    def _residual(self, work: LayerWork, elements: float) -> None:
        work.forward.stream("vector", 3 * self.size * elements)
        work.backward.stream("vector", 3 * self.size * elements)

    # ---------------------------------------------------------------- tensor parallelism

    def into(self, work: LayerWork, width: float) -> None:
        """Around a column-parallel product: activations are gathered, their gradients reduced."""
        nbytes = self.tokens * width * self.size
        if self.run.tp == 1:
            return
        hidden = self.run.hidden_tp
        if self.run.sequence_parallel:
            work.forward.send("tp", "all_gather", nbytes, "tp", hidden)
            work.backward.send("tp", "all_gather", nbytes, "tp", True)
            work.backward.send("tp", "reduce_scatter", nbytes, "tp", True)
        else:
            work.backward.send("tp", "all_reduce", nbytes, "tp", True)

    def out_of(self, work: LayerWork, width: float) -> None:
        """Around a row-parallel product."""
        nbytes = self.tokens * width * self.size
        if self.run.tp == 1:
            return
        hidden = self.run.hidden_tp
        if self.run.sequence_parallel:
            work.forward.send("tp", "reduce_scatter", nbytes, "tp", hidden)
            work.backward.send("tp", "all_gather", nbytes, "tp", hidden)
        else:
            work.forward.send("tp", "all_reduce", nbytes, "tp", hidden)

    # ---------------------------------------------------------------- attention

    def attention(self, work: LayerWork) -> None:
        model, run, n = self.model, self.run, self.tokens
        heads, groups = model.heads / run.tp, max(1.0, model.groups / run.tp)
        self._norm(work, self.own_tokens * model.hidden)
        self.into(work, model.hidden)
        if model.kv_lora:
            self._latent_projections(work, heads)
        else:
            self.product(work, "attention products", n, (heads + 2 * groups) * model.dim, model.hidden)
        if model.positions == "rope":
            rotated = model.rope_dim if model.kv_lora else model.dim
            self.pointwise(work, "rope", n * (heads + groups) * rotated)
        self._context_messages(work, heads, groups)
        if "attention" in run.fused:
            self._flash(work, heads, groups)
        else:
            self._unfused_scores(work, heads)
        self.product(work, "attention products", n, model.hidden, heads * model.value_dim)
        self.out_of(work, model.hidden)
        self._residual(work, self.own_tokens * model.hidden)
        for phase, count in zip((work.forward, work.backward), MICRO_OPERATORS):
            phase.stream("vector", 0, count)

    def _latent_projections(self, work: LayerWork, heads: float) -> None:
        model, n = self.model, self.tokens
        down = self.own_tokens
        if model.q_lora:
            self.product(work, "attention products", down, model.q_lora, model.hidden)
            self.product(work, "attention products", n, heads * model.qk_dim, model.q_lora)
            self._norm(work, down * model.q_lora)
        else:
            self.product(work, "attention products", n, heads * model.qk_dim, model.hidden)
        self.product(work, "attention products", down, model.kv_lora + model.rope_dim, model.hidden)
        self.product(work, "attention products", n, heads * (model.dim + model.value_dim), model.kv_lora)
        self._norm(work, down * model.kv_lora)
        # Keys are put together of a part of each head's own and a part that all heads share; values are padded.
        work.forward.stream("vector", 3 * self.size * n * heads * model.qk_dim, 4)
        work.backward.stream("vector", 4 * self.size * n * heads * model.qk_dim, 6)

    def _context_messages(self, work: LayerWork, heads: float, groups: float) -> None:
        """Ulysses exchanges heads for tokens, a ring hands keys and values on while it computes."""
        run, model = self.run, self.model
        if run.cp == 1:
            return
        q, kv = (self.tokens * x * model.qk_dim * self.size for x in (heads, groups))
        if run.cp_kind in ("ulysses", "hybrid"):
            for nbytes in (q, kv, kv, q):
                work.forward.send("cp", "all_to_all", nbytes, "cp")
                work.backward.send("cp", "all_to_all", nbytes, "cp")
        elif run.cp_kind == "kv_allgather":
            work.forward.send("cp", "all_gather", 2 * kv * run.cp, "cp")
            work.backward.send("cp", "all_gather", 2 * kv * run.cp, "cp")
            work.backward.send("cp", "reduce_scatter", 2 * kv * run.cp, "cp")
        else:
            for _ in range(run.cp - 1):
                work.forward.send("cp", "send_recv", 2 * kv, "cp", True)
                work.backward.send("cp", "send_recv", 4 * kv, "cp", True)
                # One step's output and sums join those of the steps before it, in float32.
                joined = self.tokens * heads * model.value_dim
                work.forward.stream("cp", RING_BYTES[0] * joined, RING_OPERATORS[0])
                work.backward.stream("cp", RING_BYTES[1] * joined, RING_OPERATORS[1])

    def _flash(self, work: LayerWork, heads: float, groups: float) -> None:
        model, run = self.model, self.run
        window = [(1.0, 0)]
        if model.window and model.window < run.sequence:
            window = [(model.window_share, model.window), (1 - model.window_share, 0)]
        for share, width in window:
            if not share:
                continue
            # With the sequence divided, a rank's queries see half of all keys on average, as without.
            causal = run.cp == 1 or run.cp_kind in ("ulysses", "hybrid")
            if causal:
                q_heads, k_heads, queries, keys = heads / run.cp, groups / run.cp, run.sequence, run.sequence
            else:
                q_heads, k_heads, queries, keys = heads, groups, run.sequence // run.cp, run.sequence // 2
            dtype = run.dtype
            q_heads, k_heads = max(1, round(q_heads)), max(1, round(k_heads))
            q = Spec((run.microbatch, q_heads, queries, model.qk_dim), dtype, self.size)
            k = Spec((run.microbatch, k_heads, keys, model.qk_dim), dtype, self.size)
            v = Spec((run.microbatch, k_heads, keys, model.value_dim), dtype, self.size)
            out = Spec((run.microbatch, q_heads, queries, model.value_dim), dtype, self.size)
            grads = [dataclasses.replace(t) for t in (q, k, v)]
            costs = (
                attention(out, q, k, v, causal, window=width),
                attention(grads, q, k, v, causal, out, out, window=width, backward=True),
            )
            for phase, cost in zip((work.forward, work.backward), costs):
                # That of a ring stands for all of its steps, causal ones and others: no shape that was measured.
                phase.add("attention", cost if causal else dataclasses.replace(cost, shape=cost.shape[:2]), share)

    def _unfused_scores(self, work: LayerWork, heads: float) -> None:
        model, run = self.model, self.run
        queries = run.sequence // run.cp
        scores = run.microbatch * heads * queries * run.sequence
        m = run.microbatch * heads * queries
        for _ in range(2):
            work.forward.add("attention", self._matmul(m, run.sequence, model.dim))
            for _ in range(2):
                work.backward.add("attention", self._matmul(m, run.sequence, model.dim))
        work.forward.stream("attention", SOFTMAX_BYTES[0] * scores, 6)
        work.backward.stream("attention", SOFTMAX_BYTES[1] * scores, 8)

    # ---------------------------------------------------------------- feed-forward

    def dense(self, work: LayerWork) -> None:
        self._norm(work, self.own_tokens * self.model.hidden)
        self.into(work, self.model.hidden)
        self._feed_forward(work, "dense products", self.tokens, self.model.ffn / self.run.tp)
        self.out_of(work, self.model.hidden)
        self._residual(work, self.own_tokens * self.model.hidden)

    def _feed_forward(self, work: LayerWork, part: str, n: float, width: float) -> None:
        self.product(work, part, n, (2 if self.model.gated else 1) * width, self.model.hidden)
        self.pointwise(work, "swiglu" if self.model.gated else "gelu", n * width)
        self.product(work, part, n, self.model.hidden, width)

    def experts(self, work: LayerWork) -> None:
        """A layer's experts: router, permutation, exchange, grouped products, and all of it backwards."""
        model, run = self.model, self.run
        h, own = model.hidden, self.own_tokens
        self._norm(work, own * h)
        self.product(work, "router", own, model.experts, h)
        work.forward.stream("router", 40 * own * model.experts, 25)
        work.backward.stream("router", 40 * own * model.experts, 25)
        etp = run.expert_tp
        sent = own * model.top_k  # rows of a rank for all experts
        rows_here = sent * etp / (1 if run.sequence_parallel or run.tp == 1 else run.tp)
        if run.dispatcher == "allgather":
            for phase in (work.forward, work.backward):
                phase.send("ep", "all_gather", own * run.ep * h * self.size, "ep")
                phase.send("ep", "reduce_scatter", own * run.ep * h * (self.size + 2), "ep")
        else:
            for phase in (work.forward, work.backward):
                for _ in range(2):
                    phase.send("ep", "all_to_all", sent * h * self.size, "ep", run.overlap_tp)
        if etp > 1:
            for phase in (work.forward, work.backward):
                phase.send("tp", "all_gather", rows_here * h * self.size, "tp")
                phase.send("tp", "reduce_scatter", rows_here * h * self.size, "tp")
        # Permute, sort by local expert, and both undone with the weights of the router.
        work.forward.stream("permutation", 4 * 2 * sent * h * self.size, 20)
        work.backward.stream("permutation", 4 * 2 * sent * h * self.size, 20)
        self._grouped(work, rows_here)
        if model.shared_ffn:
            self.into(work, h)
            self._feed_forward(work, "dense products", self.tokens, model.shared_ffn / run.tp)
            self.out_of(work, h)
        self._residual(work, own * h)

    def _grouped(self, work: LayerWork, total: float) -> None:
        model, run = self.model, self.run
        local = max(1.0, model.experts / run.ep)
        each, width = max(1, int(total / local)), int(model.expert_ffn / run.expert_tp)
        inner = LayerWork()
        self._feed_forward(inner, "expert products", each, width)
        for source, target in ((inner.forward, work.forward), (inner.backward, work.backward)):
            for kernel in source.kernels:
                # One launch for all experts of the rank, and the products' shapes are those of one expert.
                target.add("expert products", dataclasses.replace(kernel.cost, launches=0), local)
                target.stream("expert products", 0, kernel.cost.launches)
