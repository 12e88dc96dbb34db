"""Rings of inner rings, modelled: attention over a sequence on machines of eight cards, by ranks of the inner ring.

    python -m benchmarks.ring_window

Keys and values of 8 heads of 128 in 16 bits, queries of 32 heads, causal, balanced: half of the scores of a block in
every step. Forward alone; nothing ran on a device.
"""

from __future__ import annotations

from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.cost.operators import Cost
from mindspeed_fx.cost.ring import ring_seconds

HEADS, KEYS, DIM = 32, 8, 128


def main() -> None:
    print(
        f"{'device':<12} {'sequence':>8} {'ranks':>5}  modelled ms by ranks of the inner ring; gain of the best over "
        "one ring"
    )
    for name in ("ascend910b2", "h100"):
        hw = hardware(name)
        for length, ranks in ((32768, 16), (65536, 16), (131072, 32), (32768, 32), (524288, 64)):
            rows = length // ranks
            step = float(Cost(matrix=2 * HEADS * rows * rows * DIM, dtype="bfloat16").seconds(hw))
            nbytes = 2 * KEYS * rows * DIM * 2
            times = {w: ring_seconds(step, nbytes, ranks, hw, w) for w in (1, 2, 4, 8, 16, 32, 64) if ranks % w == 0}
            best = min(times, key=times.__getitem__)
            print(
                f"{name:<12} {length:>8} {ranks:>5}  "
                + "  ".join(f"{w}: {t * 1e3:.3f}" for w, t in times.items())
                + f"  best {best}, {times[ranks] / times[best]:.2f}x"
            )


if __name__ == "__main__":
    main()
