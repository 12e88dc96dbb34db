"""Random training steps as numbers, for the planner's tests and benchmarks."""

import random

from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem


def step(seed: int, most: int) -> tuple[RematProblem, float]:
    """(a step of up to ``most`` forward nodes with skips, views, a gradient for most nodes; modelled seconds of it)."""
    rng = random.Random(seed)
    count = rng.randint(4, most)
    sources, root, size, seconds = [()], [0], [0], [0.0]

    def node(reads, bytes_, time, of=None):
        sources.append(tuple(sorted(set(reads))))
        root.append(len(root) if of is None else root[of])
        size.append(bytes_ if of is None else 0)
        seconds.append(time)
        return len(sources) - 1

    for i in range(1, count + 1):
        if i > 1 and rng.random() < 0.1:
            node([i - 1], 0, 0.0, of=i - 1)
        else:
            node(
                [rng.randrange(max(0, i - 4), i) for _ in range(rng.choice((1, 1, 2)))],
                64 * rng.choice((1, 2, 4, 8, 16)),
                rng.choice((1, 2, 5, 10, 20)) * 1e-6,
            )
    gradient = node([], 64, 0.0)
    backward, needed, gradients = [gradient], set(), []
    for i in range(count, 0, -1):
        reads = [] if rng.random() < 0.3 else [i] if rng.random() < 0.4 else [a for a in sources[i] if a]
        needed |= set(reads)
        gradient = node([*reads, gradient], size[i], 2 * seconds[i])
        backward.append(gradient)
        if rng.random() < 0.4:
            backward.append(node([*reads, gradient], 64, seconds[i]))
            gradients.append(backward[-1])
    numbers = range(len(sources))
    made = RematProblem(
        sources=sources,
        root=root,
        size=size,
        saved_bytes=size,
        seconds=seconds,
        savable=[0 < i <= count and root[i] == i for i in numbers],
        must_recompute=[False for _ in numbers],
        is_input=[i == 0 for i in numbers],
        backward=backward,
        needed=sorted(needed),
        returned=[count],
        gradients=[*gradients, gradient],
    )
    return made, sum(seconds)


def layered(seed: int, layers: int, most: int = 6) -> tuple[RematProblem, float]:
    """(a step of ``layers`` layers of up to ``most`` operations and a residual sum, all alike, all reading one table;
    modelled seconds of it).
    """
    rng = random.Random(seed)
    count = rng.randint(2, most)
    # What an operation reads: -1 the layer before, -2 the table, others of its own layer.
    reads = [sorted({rng.choice([-2, *range(max(-1, i - 3), i)]), max(-1, i - 1)}) for i in range(count)] + [
        [-1, count - 1]
    ]
    width = 64 * rng.choice((2, 4, 8))
    bytes_ = [64 * rng.choice((1, 2, 4, 8, 16)) for _ in range(count)] + [width]
    time = [rng.choice((1, 2, 5, 10, 20)) * 1e-6 for _ in range(count)] + [1e-6]
    used = [rng.random() > 0.2 for _ in range(count + 1)]
    weights = [rng.random() < 0.4 for _ in range(count + 1)]
    sources, size, seconds = [(), (0,), (0,)], [0, 64, width], [0.0, 1e-6, 1e-6]
    of: list[list[int]] = []
    for _ in range(layers):
        start = len(sources)
        below = start - 1
        of.append([{-1: below, -2: 1}.get(a, start + a) for row in reads for a in row])
        for row in reads:
            sources.append(tuple(sorted({-1: below, -2: 1}.get(a, start + a) for a in row)))
        size += bytes_
        seconds += time
    last = len(sources) - 1
    forward, backward, needed, gradients = len(sources), [], set(), []
    gradient = last
    for layer in reversed(range(layers)):
        for i in reversed(range(count + 1)):
            node = 3 + layer * (count + 1) + i
            own = list(sources[node]) if used[i] else []
            needed |= set(own)
            sources.append(tuple(sorted({*own, gradient})))
            gradient = len(sources) - 1
            backward.append(gradient)
            size.append(bytes_[i])
            seconds.append(2 * time[i])
            if weights[i]:
                sources.append(tuple(sorted({*own, gradient})))
                backward.append(len(sources) - 1)
                gradients.append(len(sources) - 1)
                size.append(64)
                seconds.append(time[i])
    needed.add(last)
    numbers = range(len(sources))
    made = RematProblem(
        sources=sources,
        root=list(numbers),
        size=size,
        saved_bytes=size,
        seconds=seconds,
        savable=[0 < i < forward for i in numbers],
        must_recompute=[False for _ in numbers],
        is_input=[i == 0 for i in numbers],
        backward=backward,
        needed=sorted(needed),
        returned=[last],
        gradients=[*gradients, gradient],
    )
    return made, sum(seconds)
