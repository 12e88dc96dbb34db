"""MindSpeed's own fixture of adaptive recomputation (core/memory/adaptive_recomputing, the six cases of its test): one
transformer layer of eleven modules, every layer alike, MB and ms. What its solver answers, and the optimum of the same
model (an exact Pareto program over the 180 options of a layer), are written down beside it; two of its answers are over
its own budget."""

import pytest

from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem
from mindspeed_fx.passes.recompute.solve.budget_search import Search

MODULES = {  # name: (MB kept when it is not made again, MB kept when it is, ms of its forward)
    "layer": (3312, 64, 100.17907619476318),
    "input_layernorm": (384, 64, 1.9710063934326172),
    "attention": (1792, 80, 50.97508430480957),
    "query_key_value": (192, 64, 9.331226348876953),
    "rotary_emb": (0, 64, 1.7354487372802734),
    "triangle_attn": (1664, 208, 22.87912368774414),
    "dense": (64, 64, 8.333802223205566),
    "post_attention_layernorm": (384, 64, 1.8906593322753906),
    "mlp": (752, 64, 38.39600086212158),
    "gate_proj": (172, 64, 9.36591625213623),
    "up_proj": (172, 64, 8.879423141479492),
    "down_proj": (64, 172, 13.797521591186523),
}

STATIC = 16600

CASES = {  # (layers, pp, GB): (ms of upstream's answer, ms of the optimum)
    (10, 2, 52): (213.93, 184.77), (10, 2, 54): (187.19, 170.77), (32, 2, 52): (1914.55, 1888.80),
    (32, 2, 54): (1825.04, 1813.74), (32, 1, 52): (1022.14, 986.93), (32, 1, 54): (997.37, 944.50),
}  # fmt: skip


def ways() -> list[list[tuple[float, float]]]:
    """The ways of a layer as chains of (MB freed, ms more), each step possible only after the one before.

    Upstream counts a parent by its own row until one of its children is made again, then by the rows of its children;
    so the first child frees more than its own row says, and a child that frees nothing then is no way at all.
    """
    m = MODULES
    attention, mlp = m["attention"], m["mlp"]
    core = sum(m[c][0] for c in ("query_key_value", "rotary_emb", "dense")) + m["triangle_attn"][1]
    up = m["gate_proj"][0] + m["up_proj"][1] + m["down_proj"][0]
    chains = [[(m[n][0] - m[n][1], m[n][2])] for n in ("input_layernorm", "post_attention_layernorm")]
    for whole, first, kept, second in (
        (attention, "triangle_attn", core, "query_key_value"),
        (mlp, "up_proj", up, "gate_proj"),
    ):
        less = m[second][0] - m[second][1]
        chains.append(
            [
                (whole[0] - kept, m[first][2]),
                (less, m[second][2]),
                (kept - less - whole[1], whole[2] - m[first][2] - m[second][2]),
            ]
        )
    return chains


def fixture(layers: int) -> RematProblem:
    """That many layers as a step: every freed MB is a value that only the backward reads, made again right there.

    A step of a chain reads a token of the one before that cannot be saved, so whoever makes it again pays for the whole
    chain; the same token of all chains is read by what the whole layer frees beside.
    """
    rows: list[tuple[tuple[int, ...], int, float, bool]] = [
        ((), 0, 0.0, False)
    ]  # sources, bytes when kept, seconds, savable
    maker, needed = {}, []

    def call(reads, mb, ms):
        rows.append((tuple(reads), 0, ms * 1e-3, False))
        made = len(rows) - 1
        for size in (round(mb), 0):  # what is kept, and the token
            rows.append(((made,), size, 0.0, size > 0))
            maker[len(rows) - 1] = made
        needed.append(made + 1)
        return made + 2

    whole = MODULES["layer"]
    for _ in range(layers):
        tokens, freed, spent = [], 0.0, 0.0
        for chain in ways():
            token = 0
            for mb, ms in chain:
                token = call([token], mb, ms)
                freed, spent = freed + mb, spent + ms
            tokens.append(token)
        call(tokens, whole[0] - whole[1] - freed, whole[2] - spent)
        rows.append(((0,), whole[1], float("inf"), True))  # the layer's input
        needed.append(len(rows) - 1)
    cut = len(rows)
    for i in reversed(needed):
        rows.append(((i,), 0, 0.0, False))
    count = len(rows)
    full = [r[1] for r in rows]
    return RematProblem(
        sources=[r[0] for r in rows],
        root=list(range(count)),
        size=[0] * count,
        saved_bytes=full,
        seconds=[r[2] for r in rows],
        savable=[r[3] for r in rows],
        must_recompute=[False] * count,
        is_input=[i == 0 for i in range(count)],
        backward=list(range(cut, count)),
        needed=sorted(needed),
        returned=[],
        gradients=[count - 1],
        maker=maker,
    )


@pytest.mark.parametrize("layers, pp, gb", CASES)
def test_within_the_budget_and_never_worse_than_upstream(layers, pp, gb):
    budget = (gb * 1024 - STATIC) // pp
    schedule = fixture(layers)
    plan = Search(schedule).best(budget)
    upstream, optimum = CASES[layers, pp, gb]
    assert plan.bytes <= budget
    assert optimum * (1 - 1e-4) <= plan.seconds * 1e3 <= upstream
