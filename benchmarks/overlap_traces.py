"""Task graphs of training steps, built from model dimensions through the cost model.

Program order is that of an eager framework without overlap: every collective is waited for where it starts. Work is
counted per rank for one micro-batch, forward and backward of all layers; pointwise work is one kernel that reads and
writes what it must. Times are modelled: launch + max(FLOP / rate, bytes / rate), collectives from cost/collectives.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_fx.cost.collectives import collective
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Buffer, Task, TaskGraph

BF16, F32 = 2, 4


@dataclass(frozen=True)
class Dense:
    """A Llama-like model."""

    name: str
    layers: int
    hidden: int
    asap_lengths: int
    kv_heads: int
    ffn: int
    vocab: int = 128256


LLAMA_8B = Dense("Llama-8B", 32, 4096, 32, 8, 14336)
LLAMA_70B = Dense("Llama-70B", 80, 8192, 64, 8, 28672)


class Trace:
    """Collects tasks and buffers; a value is the index of the task that made it."""

    def __init__(self, device: str):
        self.hw = hardware(device)
        self.tasks: list[Task] = []
        self.size: list[int] = []
        self.kept: set[int] = set()
        self.reads: dict[int, set[int]] = {}

    def work(
        self,
        name: str,
        needs: tuple[int, ...],
        *,
        flops: float = 0.0,
        moved: float = 0.0,
        out: float = 0.0,
        kept: bool = False,
    ) -> int:
        """A kernel; ``moved`` and ``out`` are bytes."""
        hw = self.hw
        seconds = float(hw.launch) + max(flops / hw.matrix_rate("bfloat16"), (moved + out) / hw.memory_rate)
        return self._add(Task(name, seconds, COMPUTE, tuple(sorted(set(needs)))), out, kept)

    def comm(
        self,
        name: str,
        kind: str,
        needs: tuple[int, ...],
        size: float,
        ranks: int,
        *,
        group: str,
        out: float,
        per_node: int | None = None,
        kept: bool = False,
    ) -> int:
        """A collective over ``size`` bytes (as cost/collectives.py counts), and its wait; returns the wait."""
        result = collective(kind, size, ranks, self.hw, per_node)
        start = self._add(
            Task(name, float(result.seconds), result.tier, tuple(sorted(set(needs))), group, kind), out, kept
        )
        wait = self._add(Task(f"{name}.wait", 0.0, COMPUTE, (start,), kind="wait"), 0, False)
        for n in needs:  # the transfer reads its input until it is waited for
            self.reads.setdefault(n, set()).add(wait)
        return wait

    def product(
        self,
        name: str,
        needs: tuple[int, ...],
        m: float,
        k: float,
        n: float,
        *,
        out_bytes: int = BF16,
        kept: bool = False,
    ) -> int:
        return self.work(
            name, needs, flops=2 * m * k * n, moved=BF16 * (m * k + k * n), out=out_bytes * m * n, kept=kept
        )

    def _add(self, task: Task, out: float, kept: bool) -> int:
        self.tasks.append(task)
        self.size.append(int(out))
        if kept:
            self.kept.add(len(self.tasks) - 1)
        return len(self.tasks) - 1

    def graph(self) -> TaskGraph:
        users = TaskGraph(self.tasks).users
        buffers = []
        for i, size in enumerate(self.size):
            if not size:
                continue
            readers = set(users[i]) | self.reads.get(i, set())
            for r in users[i]:
                if self.tasks[r].kind == "wait":
                    readers |= set(users[r]) | self.reads.get(r, set())
            buffers.append(Buffer(i, size, tuple(sorted(readers - {i})), i in self.kept))
        return TaskGraph(self.tasks, buffers)


def tensor_parallel(
    model: Dense, device: str, *, tp: int = 8, tokens: int = 8192, chunks: int = 4, dp: int = 8
) -> TaskGraph:
    """Megatron tensor and sequence parallelism in a machine, gradients reduced over machines; ``chunks`` of CoC (1:
    none).
    """
    t, h, f = Trace(device), model.hidden, model.ffn / tp
    q, kv = h / tp, h * model.kv_heads / model.asap_lengths / tp
    shard = tokens / tp
    piece = shard / chunks

    def gathered_product(name: str, x: int, columns: float, extra: tuple[int, ...] = ()) -> tuple[list[int], list[int]]:
        gathers, products = [], []
        for c in range(chunks):
            g = t.comm(
                f"{name}.gather{c}",
                "all_gather",
                (x,),
                BF16 * piece * tp * h,
                tp,
                group="tp",
                out=BF16 * piece * tp * h,
            )
            gathers.append(g)
            products.append(t.product(f"{name}.mm{c}", (g, *extra), piece * tp, h, columns))
        return gathers, products

    def scattered_product(name: str, x: tuple[int, ...], inner: float, columns: float) -> tuple[int, ...]:
        return tuple(
            t.comm(
                f"{name}.scatter{c}",
                "reduce_scatter",
                (t.product(f"{name}.mm{c}", x, piece * tp, inner, columns),),
                BF16 * piece * tp * columns,
                tp,
                group="tp",
                out=BF16 * piece * columns,
            )
            for c in range(chunks)
        )

    def attention_flops(k: float) -> float:
        return k * 2 * 2 * tokens * tokens / 2 * q

    saved = []
    x = t.work("embed", (), moved=BF16 * shard * h, out=BF16 * shard * h)
    for layer in range(model.layers):
        n = f"l{layer}"
        norm1 = t.work(f"{n}.norm1", (x,), moved=BF16 * shard * h, out=BF16 * shard * h)
        _, qkv = gathered_product(f"{n}.qkv", norm1, q + 2 * kv)
        rope = t.work(f"{n}.rope", tuple(qkv), moved=BF16 * tokens * (q + kv), out=BF16 * tokens * (q + 2 * kv))
        attn = t.work(
            f"{n}.attention",
            (rope,),
            flops=attention_flops(1),
            moved=BF16 * tokens * (q + 2 * kv),
            out=BF16 * tokens * q,
        )
        o = scattered_product(f"{n}.out", (attn,), q, h)
        mid = t.work(f"{n}.add1", (x, *o), moved=2 * BF16 * shard * h, out=BF16 * shard * h)
        norm2 = t.work(f"{n}.norm2", (mid,), moved=BF16 * shard * h, out=BF16 * shard * h)
        _, up = gathered_product(f"{n}.up", norm2, 2 * f)
        act = t.work(f"{n}.swiglu", tuple(up), moved=BF16 * tokens * 2 * f, out=BF16 * tokens * f)
        d = scattered_product(f"{n}.down", (act,), f, h)
        saved.append((x, norm1, rope, attn, mid, norm2, tuple(up), act))
        x = t.work(f"{n}.add2", (mid, *d), moved=2 * BF16 * shard * h, out=BF16 * shard * h)
    grad = t.work(
        "loss",
        (x,),
        flops=3 * 2 * tokens * h * model.vocab / tp,
        moved=BF16 * h * model.vocab / tp,
        out=BF16 * shard * h,
    )

    def backward_of_row(name: str, g: int, x_: int, inner: float, layer_grads: list[int]) -> list[int]:
        """Row-parallel product: the gathered gradient serves dX and dW."""
        gathers, dx = gathered_product(f"{name}.dx", g, inner)
        layer_grads.append(t.product(f"{name}.dw", (*gathers, x_), inner, tokens, h, out_bytes=BF16))
        return dx

    def backward_of_column(
        name: str, g: tuple[int, ...], shard_in: int, columns: float, layer_grads: list[int]
    ) -> tuple[int, ...]:
        """Column-parallel product: the input is gathered again for dW while dX is made and scattered."""
        again = t.comm(
            f"{name}.regather", "all_gather", (shard_in,), BF16 * tokens * h, tp, group="tp", out=BF16 * tokens * h
        )
        dx = scattered_product(f"{name}.dx", g, columns, h)
        layer_grads.append(t.product(f"{name}.dw", (*g, again), columns, tokens, h, out_bytes=BF16))
        return dx

    for layer in reversed(range(model.layers)):
        n, grads = f"b{layer}", []
        x0, norm1, rope, attn, mid, norm2, up, act = saved[layer]
        dact = backward_of_row(f"{n}.down", grad, act, f, grads)
        dup = t.work(f"{n}.swiglu", (*dact, *up), moved=BF16 * tokens * 3 * f, out=BF16 * tokens * 2 * f)
        dnorm2 = backward_of_column(f"{n}.up", (dup,), norm2, 2 * f, grads)
        dmid = t.work(f"{n}.norm2", (*dnorm2, mid, grad), moved=3 * BF16 * shard * h, out=BF16 * shard * h)
        dattn = backward_of_row(f"{n}.out", dmid, attn, q, grads)
        dqkv = t.work(
            f"{n}.attention",
            (*dattn, rope, attn),
            flops=attention_flops(2.5),
            moved=BF16 * tokens * 4 * q,
            out=BF16 * tokens * (q + 2 * kv),
        )
        drope = t.work(f"{n}.rope", (dqkv,), moved=BF16 * tokens * (q + 2 * kv), out=BF16 * tokens * (q + 2 * kv))
        dnorm1 = backward_of_column(f"{n}.qkv", (drope,), norm1, q + 2 * kv, grads)
        grad = t.work(f"{n}.norm1", (*dnorm1, x0, dmid), moved=3 * BF16 * shard * h, out=BF16 * shard * h)
        if dp > 1:
            size = BF16 * (h * (q + 2 * kv) + q * h + 3 * f * h)
            t.comm(
                f"{n}.grads", "reduce_scatter", tuple(grads), size, dp, group="dp", out=size / dp, per_node=1, kept=True
            )
    return t.graph()


def zero3(model: Dense, device: str, *, ranks: int = 16, tokens: int = 8192, parts: int = 2) -> TaskGraph:
    """ZeRO-3: parameters gathered per layer (in ``parts``) before use, again in the backward, gradients scattered."""
    t, h, f = Trace(device), model.hidden, model.ffn
    kv = h * model.kv_heads / model.asap_lengths
    sizes = (h * (h + 2 * kv) + h * h, 3 * h * f)
    products = (((h, h + 2 * kv), (h, h)), ((h, 2 * f), (f, h)))
    pieces = [s / (parts / 2) for s in sizes for _ in range(max(parts // 2, 1))] if parts > 1 else [sum(sizes)]

    def gather(name: str) -> list[int]:
        return [
            t.comm(f"{name}.gather{n}", "all_gather", (), BF16 * s, ranks, group="dp", out=BF16 * s)
            for n, s in enumerate(pieces)
        ]

    def half(weights: list[int], which: int) -> tuple[int, ...]:
        return (
            tuple(weights)
            if len(weights) == 1
            else tuple(weights[: len(weights) // 2] if which == 0 else weights[len(weights) // 2 :])
        )

    x = t.work("embed", (), moved=BF16 * tokens * h, out=BF16 * tokens * h)
    saved = []
    for layer in range(model.layers):
        n, w = f"l{layer}", gather(f"l{layer}")
        saved.append(x)
        (k1, n1), (k2, n2) = products[0]
        norm = t.work(f"{n}.norm1", (x,), moved=BF16 * tokens * h, out=BF16 * tokens * h)
        qkv = t.product(f"{n}.qkv", (norm, *half(w, 0)), tokens, k1, n1)
        attn = t.work(
            f"{n}.attention",
            (qkv,),
            flops=2 * 2 * tokens * tokens / 2 * h,
            moved=BF16 * tokens * n1,
            out=BF16 * tokens * h,
        )
        mid = t.product(f"{n}.out", (attn, x, *half(w, 0)), tokens, k2, n2)
        (k1, n1), (k2, n2) = products[1]
        norm2 = t.work(f"{n}.norm2", (mid,), moved=BF16 * tokens * h, out=BF16 * tokens * h)
        up = t.product(f"{n}.up", (norm2, *half(w, 1)), tokens, k1, n1)
        act = t.work(f"{n}.swiglu", (up,), moved=BF16 * tokens * n1, out=BF16 * tokens * f)
        x = t.product(f"{n}.down", (act, mid, *half(w, 1)), tokens, k2, n2)
    grad = t.work(
        "loss", (x,), flops=3 * 2 * tokens * h * model.vocab, moved=BF16 * h * model.vocab, out=BF16 * tokens * h
    )
    for layer in reversed(range(model.layers)):  # full recompute of the layer, as ZeRO-3 is usually run
        n, w, x0 = f"b{layer}", gather(f"b{layer}"), saved[layer]
        flops = 2 * tokens * sum(sizes)
        again = t.work(
            f"{n}.attention.again",
            (x0, *half(w, 0)),
            flops=flops * sizes[0] / sum(sizes) + 2 * tokens * tokens * h,
            moved=BF16 * 4 * tokens * h,
            out=BF16 * tokens * 4 * h,
        )
        again2 = t.work(
            f"{n}.mlp.again",
            (again, *half(w, 1)),
            flops=flops * sizes[1] / sum(sizes),
            moved=BF16 * tokens * 2 * f,
            out=BF16 * tokens * 3 * f,
        )
        dx = t.work(
            f"{n}.mlp.dx",
            (grad, again2, *half(w, 1)),
            flops=flops * sizes[1] / sum(sizes),
            moved=BF16 * tokens * 3 * f,
            out=BF16 * tokens * h,
        )
        dw2 = t.work(
            f"{n}.mlp.dw",
            (grad, again2),
            flops=flops * sizes[1] / sum(sizes),
            moved=BF16 * tokens * 3 * f,
            out=BF16 * sizes[1],
        )
        grad = t.work(
            f"{n}.attention.dx",
            (dx, again, *half(w, 0)),
            flops=flops * sizes[0] / sum(sizes) + 5 * tokens * tokens * h,
            moved=BF16 * tokens * 4 * h,
            out=BF16 * tokens * h,
        )
        dw1 = t.work(
            f"{n}.attention.dw",
            (dx, again),
            flops=flops * sizes[0] / sum(sizes),
            moved=BF16 * tokens * 4 * h,
            out=BF16 * sizes[0],
        )
        for dw, s, part in ((dw2, sizes[1], "mlp"), (dw1, sizes[0], "attention")):
            t.comm(
                f"{n}.{part}.scatter",
                "reduce_scatter",
                (dw,),
                BF16 * s,
                ranks,
                group="dp",
                out=BF16 * s / ranks,
                kept=True,
            )
    return t.graph()


def experts(device: str, *, layers: int = 16, ep: int = 32, tokens: int = 4096, batches: int = 2) -> TaskGraph:
    """DeepSeek-V3-like layers: latent attention, 256 experts of which 8 a token, one shared; all-to-all over ``ep``
    ranks. Row-independent work is cut along the tokens into ``batches`` (1: none), as pipe-experts and Ampipe do."""
    t, h, expert, top = Trace(device), 7168, 2048, 8
    m = tokens / batches
    attention_weights = h * 1536 + 1536 * 128 * 192 + h * 576 + 512 * 128 * 256 + 128 * 128 * h

    def layer_forward(name: str, x: int) -> tuple[int, tuple[int, ...]]:
        attn = t.work(
            f"{name}.attention",
            (x,),
            flops=2 * m * attention_weights + 2 * 2 * m * tokens / 2 * 128 * 160,
            moved=BF16 * (attention_weights + 4 * m * h),
            out=BF16 * m * h,
        )
        route = t.work(f"{name}.router", (attn,), flops=2 * m * h * 256, moved=BF16 * m * h, out=BF16 * m * top * h)
        sent = t.comm(
            f"{name}.dispatch", "all_to_all", (route,), BF16 * m * top * h, ep, group="ep", out=BF16 * m * top * h
        )
        shared = t.work(
            f"{name}.shared",
            (attn,),
            flops=2 * m * 3 * h * expert,
            moved=BF16 * (3 * h * expert + 2 * m * h),
            out=BF16 * m * h,
        )
        result = t.work(
            f"{name}.experts",
            (sent,),
            flops=2 * m * top * 3 * h * expert,
            moved=BF16 * (256 / ep * 3 * h * expert + 2 * m * top * h),
            out=BF16 * m * top * h,
        )
        back = t.comm(
            f"{name}.combine", "all_to_all", (result,), BF16 * m * top * h, ep, group="ep", out=BF16 * m * top * h
        )
        out = t.work(f"{name}.add", (back, shared, attn), moved=BF16 * (top + 2) * m * h, out=BF16 * m * h)
        return out, (x, attn, sent)

    def layer_backward(name: str, g: int, saved: tuple[int, ...]) -> int:
        x, attn, sent = saved
        spread = t.work(f"{name}.add", (g,), moved=BF16 * m * h, out=BF16 * m * top * h)
        dmade = t.comm(
            f"{name}.combine", "all_to_all", (spread,), BF16 * m * top * h, ep, group="ep", out=BF16 * m * top * h
        )
        dshared = t.work(
            f"{name}.shared.dx",
            (g, attn),
            flops=2 * m * 3 * h * expert,
            moved=BF16 * (3 * h * expert + 2 * m * h),
            out=BF16 * m * h,
        )
        t.work(
            f"{name}.shared.dw",
            (g, attn),
            flops=2 * m * 3 * h * expert,
            moved=BF16 * 2 * m * h,
            out=BF16 * 3 * h * expert,
            kept=True,
        )
        dsent = t.work(
            f"{name}.experts.dx",
            (dmade, sent),
            flops=2 * m * top * 3 * h * expert,
            moved=BF16 * 256 / ep * 3 * h * expert,
            out=BF16 * m * top * h,
        )
        t.work(
            f"{name}.experts.dw",
            (dmade, sent),
            flops=2 * m * top * 3 * h * expert,
            moved=BF16 * 2 * m * top * h,
            out=BF16 * 256 / ep * 3 * h * expert,
            kept=True,
        )
        droute = t.comm(
            f"{name}.dispatch", "all_to_all", (dsent,), BF16 * m * top * h, ep, group="ep", out=BF16 * m * top * h
        )
        dattn = t.work(
            f"{name}.router",
            (droute, dshared, g, attn),
            flops=2 * 2 * m * h * 256,
            moved=BF16 * (top + 3) * m * h,
            out=BF16 * m * h,
        )
        dx = t.work(
            f"{name}.attention.dx",
            (dattn, x),
            flops=2 * m * attention_weights + 2.5 * 2 * 2 * m * tokens / 2 * 128 * 160,
            moved=BF16 * attention_weights,
            out=BF16 * m * h,
        )
        t.work(
            f"{name}.attention.dw",
            (dattn, x),
            flops=2 * m * attention_weights,
            moved=BF16 * 4 * m * h,
            out=BF16 * attention_weights,
            kept=True,
        )
        return dx

    xs = [t.work(f"embed{b}", (), moved=BF16 * m * h, out=BF16 * m * h) for b in range(batches)]
    saved: list[list[tuple[int, ...]]] = []
    for layer in range(layers):
        rows = []
        for b in range(batches):
            xs[b], keep = layer_forward(f"l{layer}.{b}", xs[b])
            rows.append(keep)
        saved.append(rows)
    gs = [
        t.work(f"loss{b}", (xs[b],), flops=3 * 2 * m * h * 129280 / 8, moved=BF16 * h * 129280 / 8, out=BF16 * m * h)
        for b in range(batches)
    ]
    for layer in reversed(range(layers)):
        for b in range(batches):
            gs[b] = layer_backward(f"b{layer}.{b}", gs[b], saved[layer][b])
    return t.graph()
