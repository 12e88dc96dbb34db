"""MindSpeed's flags of context parallelism, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_fx.megatron.run_arguments import training_arguments

ULYSSES, RING, HYBRID = "ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo"
ADAPTIVE, HYBRID_ADAPTIVE, GATHER = "adaptive_cp_algo", "hybrid_adaptive_cp_algo", "kvallgather_cp_algo"
ALGORITHMS = (ULYSSES, RING, HYBRID, ADAPTIVE, HYBRID_ADAPTIVE, GATHER)
KEPT = (None, "full", "half")
COMM_TYPES = {"a2a": (ULYSSES,), "all_gather": (GATHER,), "a2a+p2p": (HYBRID,)}
"""Megatron's ``--cp-comm-type``, which TransformerEngine reads: the algorithms that are the same. "p2p" is the default,
so that it says nothing.
"""


@dataclass(frozen=True)
class Settings:
    """How attention sees a divided sequence.

    Args:
        algorithm: of ``--context-parallel-algo``.
        ranks: ``--context-parallel-size``.
        ulysses: ranks that exchange heads, neighbours.
        window: ranks of an inner ring; ``ring`` of them where there is one ring.
        gathers_keys: keys and values are gathered; else they go round.
        gathers_heads: ``--use-ulysses-allgather-kv``: keys and values are gathered where queries exchange heads.
        kept: ``--context-parallel-kv-cache-policy``: what the backward of a ring has from the forward.
        interval: ``--context-parallel-cache-interval``.
    """

    algorithm: str
    ranks: int
    ulysses: int
    window: int
    gathers_keys: bool
    gathers_heads: bool
    kept: str | None
    interval: int

    @property
    def ring(self) -> int:
        """Groups of ``ulysses`` ranks."""
        return self.ranks // self.ulysses

    def keeps(self, layer: int) -> str | None:
        """What the backward of ``layer`` (counted from 1) has of other ranks' keys and values from the forward."""
        return self.kept if (layer - 1) % (self.interval + 1) == 0 else None


def read_settings(config: Any) -> Settings:
    """From attributes of Megatron's config, else from its arguments, else MindSpeed's defaults.

    Raises:
        ValueError: a flag with a value that cannot be, in one line with the valid ones.
    """
    ranks = int(config.context_parallel_size)
    algorithm = _setting(config, "context_parallel_algo", ULYSSES)
    _check_member("--context-parallel-algo", algorithm, ALGORITHMS)
    _check_comm_type(config, algorithm)
    kept = _setting(config, "context_parallel_kv_cache_policy", None)
    _check_member("--context-parallel-kv-cache-policy", kept, KEPT)
    ulysses = _ulysses_degree(config, algorithm, ranks)
    window = int(_setting(config, "cp_window_size", 1) or 1)
    rings = ranks // ulysses
    if algorithm in (RING, HYBRID) and (window < 1 or rings % window):
        raise ValueError(
            f"--cp-window-size {window} does not divide the {rings} ranks of the ring; valid: {_divisors(rings)}"
        )
    return Settings(
        algorithm=algorithm,
        ranks=ranks,
        ulysses=ulysses,
        window=window if window > 1 else rings,
        gathers_keys=algorithm in (ADAPTIVE, HYBRID_ADAPTIVE, GATHER),
        gathers_heads=bool(_setting(config, "use_ulysses_allgather_kv", False)),
        kept=kept,
        interval=int(_setting(config, "context_parallel_cache_interval", 0) or 0),
    )


def _ulysses_degree(config: Any, algorithm: str, ranks: int) -> int:
    if algorithm not in (HYBRID, HYBRID_ADAPTIVE):
        return ranks if algorithm == ULYSSES else 1
    degree = _setting(config, "ulysses_degree_in_cp", None)
    valid = [n for n in range(2, ranks) if ranks % n == 0]
    if degree in valid:
        return int(degree)
    raise ValueError(
        f"--ulysses-degree-in-cp {degree} with --context-parallel-algo {algorithm} and --context-parallel-size "
        f"{ranks}; valid: {', '.join(map(str, valid)) or f'none, use {ULYSSES} or {RING}'}"
    )


def check_layer(settings: Settings, heads: int, tensor_ranks: int, softmax_type: str) -> None:
    """Raise ValueError where an attention layer cannot be divided so, in one line.

    Args:
        heads: attention heads on each tensor-parallel rank.
        tensor_ranks: ``--tensor-model-parallel-size``.
        softmax_type: "vanilla", or with a further score for each head.
    """
    algorithm, u = settings.algorithm, settings.ulysses
    if heads % u:
        flag = "--context-parallel-size" if algorithm == ULYSSES else "--ulysses-degree-in-cp"
        raise ValueError(
            f"{flag} {u} with --context-parallel-algo {algorithm} exchanges heads: the {heads} that "
            f"--num-attention-heads {heads * tensor_ranks} leaves each of {tensor_ranks} tensor-parallel ranks do not "
            f"divide by it; valid: {_divisors(heads)}, or --context-parallel-algo {RING}"
        )
    if u > 1 and softmax_type != "vanilla":
        raise ValueError(
            f"--softmax-type {softmax_type} with --context-parallel-algo {algorithm}: a score of its own for each head "
            f"does not move with the heads; valid: {RING}, {GATHER}"
        )


def _check_member(flag: str, value: Any, valid: tuple[Any, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{flag} {value}; valid: {', '.join(str(v) for v in valid if v is not None)}")


def _check_comm_type(config: Any, algorithm: str) -> None:
    kinds = getattr(config, "cp_comm_type", None) or "p2p"
    for kind in set([kinds] if isinstance(kinds, str) else kinds):
        if kind != "p2p" and algorithm not in COMM_TYPES.get(kind, ()):
            valid = " or ".join(f"--context-parallel-algo {a}" for a in COMM_TYPES.get(kind, ALGORITHMS))
            raise ValueError(
                f"--cp-comm-type {kind} is read by TransformerEngine, and --context-parallel-algo is {algorithm}; "
                f"valid: {valid} without --cp-comm-type"
            )


def _divisors(n: int) -> str:
    return ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)


def _setting(config: Any, name: str, default: Any) -> Any:
    for source in (config, training_arguments()):
        if hasattr(source, name):
            return getattr(source, name)
    return default
