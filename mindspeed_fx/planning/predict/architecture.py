"""A decoder-only transformer in numbers, as launch flags of Megatron describe it, and what it has of parameters.

architecture(["--num-layers", "32", "--hidden-size", "4096", ...])    # flags of a Megatron launch
architecture("llama3-8b")                                           # a published one, see architectures.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Sequence

from mindspeed_fx import arguments
from mindspeed_fx.errors import OptionError

NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned", "alibi", "none")


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model. Counts, but for names and switches."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int
    """Width of a dense layer's feed-forward part, after the gate's halving."""
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 0
    """0: hidden / heads."""
    gated: bool = True
    """SwiGLU or GeGLU: two products up instead of one."""
    tied: bool = False
    """The head's weight is the embedding's."""
    norm: str = "rms"
    """"rms" or "layer"."""
    positions: str = "rope"
    """"rope", "learned", "alibi" or "none"."""
    max_positions: int = 0
    """Learned positions that have a parameter."""
    window: int = 0
    """Keys that a query sees in layers with a window; 0: all."""
    window_share: float = 1.0
    """Share of layers that have the window."""
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of the experts that every token passes."""
    dense_layers: int = 0
    """Layers before the first one with experts."""
    q_lora: int = 0
    kv_lora: int = 0
    """Multi-head latent attention where not 0."""
    rope_dim: int = 64
    """Of latent attention: width of the part of a head that is rotated; ``head_dim`` is the other part."""
    v_dim: int = 0
    mtp_layers: int = 0
    """Layers that predict further tokens, each with a head."""

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("layers", "hidden", "heads", "vocab"), 1)
        arguments.check_fields("architecture", self, sizes, {"norm": NORMS, "positions": POSITIONS})

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def qk_dim(self) -> int:
        """Width of a query or key of one head."""
        return self.dim + (self.rope_dim if self.kv_lora else 0)

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.dim

    @property
    def moe_layers(self) -> int:
        return max(0, self.layers - self.dense_layers) if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        h, a = self.hidden, self.heads
        out = a * self.value_dim * h
        if self.kv_lora:
            query = h * self.q_lora + self.q_lora * a * self.qk_dim if self.q_lora else h * a * self.qk_dim
            shared = h * (self.kv_lora + self.rope_dim)
            return query + shared + self.kv_lora * a * (self.dim + self.value_dim) + out
        return h * (a + 2 * self.groups) * self.dim + out

    @property
    def dense_parameters(self) -> int:
        """Of one dense layer's feed-forward part."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.expert_ffn

    @property
    def shared_parameters(self) -> int:
        """Of a layer with experts, without them: shared ones and the router."""
        return (3 if self.gated else 2) * self.hidden * self.shared_ffn + self.hidden * self.experts

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, norms and biases not counted."""
        dense = self.layers - self.moe_layers
        moe = self.experts * self.expert_parameters + self.shared_parameters
        both = self.embedding_parameters * (1 if self.tied else 2) + self.max_positions * self.hidden
        blocks = self.layers * self.attention_parameters + dense * self.dense_parameters + self.moe_layers * moe
        return blocks + both + self.mtp_layers * (self.attention_parameters + (moe if self.experts else 0))

    def flops(self, seq: int, causal: float = 0.5) -> float:
        """Model FLOP of one token, forward and backward: 6 for each parameter that it meets, 12 for each score and
        width of a head.

        Args:
            causal: share of the scores that is counted: a half, or 1 as tables before 2024 count.
        """
        moe = self.top_k * self.expert_parameters + self.shared_parameters
        dense = self.layers - self.moe_layers
        weights = self.layers * self.attention_parameters + dense * self.dense_parameters + self.moe_layers * moe
        weights += self.embedding_parameters
        seen = causal * seq
        if self.window:
            seen = (1 - self.window_share) * seen + self.window_share * min(self.window, seen)
        scores = self.layers * self.heads * (self.qk_dim + self.value_dim) * seen
        return 6 * weights + 6 * scores


FLAGS = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--num-attention-heads": "heads",
    "--ffn-hidden-size": "ffn",
    "--num-query-groups": "kv_heads",
    "--kv-channels": "head_dim",
    "--num-experts": "experts",
    "--moe-router-topk": "top_k",
    "--moe-ffn-hidden-size": "expert_ffn",
    "--moe-shared-expert-intermediate-size": "shared_ffn",
    "--first-k-dense-replace": "dense_layers",
    "--q-lora-rank": "q_lora",
    "--kv-lora-rank": "kv_lora",
    "--qk-pos-emb-head-dim": "rope_dim",
    "--qk-head-dim": "head_dim",
    "--v-head-dim": "v_dim",
    "--mtp-num-layers": "mtp_layers",
    "--window-size": "window",
    "--sliding-window": "window",
    "--moe-intermediate-size": "expert_ffn",
    "--qk-nope-head-dim": "head_dim",
    "--qk-rope-head-dim": "rope_dim",
}
"""Flag of Megatron or MindSpeed-LLM, former names too -> field."""
VOCABULARY = ("--padded-vocab-size", "--vocab-size")


def values_of(flags: Sequence[str]) -> dict[str, str]:
    """Flag -> its value, "" for a switch."""
    result: dict[str, str] = {}
    for flag, value in zip(flags, (*flags[1:], "--")):
        if flag.startswith("--"):
            name, _, text = flag.partition("=")
            result[name] = text or ("" if value.startswith("--") else value)
    return result


def check_flags(flags: Any) -> None:
    """Words of a launch, as a shell passes them."""
    if isinstance(flags, str) or not isinstance(flags, Sequence) or not all(isinstance(w, str) for w in flags):
        raise OptionError(
            f"flags are {arguments.format_value(flags)}; a list of words is expected, as in "
            '["--num-layers", "32", "--hidden-size", "4096"]'
        )
    if flags and not flags[0].startswith("--"):
        raise OptionError(
            f"the launch begins with {flags[0]!r}, which is no flag; the arguments behind the script's name are "
            "expected, as in --num-layers 32"
        )


def check_numbers(texts: dict[str, str], flags: Iterable[str]) -> None:
    """Whole numbers, of which some flags take several.

    Raises:
        OptionError: one is none.
    """
    for flag in flags:
        text = texts.get(flag, "").split(",")[0]
        if text and not text.lstrip("-").isdigit():
            raise OptionError(f"{flag} is {text!r}: a whole number is expected")


def from_flags(flags: Sequence[str]) -> Architecture:
    """The model of a Megatron launch.

    Raises:
        OptionError: a size that no default stands for is missing.
    """
    check_flags(flags)
    texts = values_of(flags)
    check_numbers(texts, [*(f for f in FLAGS if f != "--window-size"), *VOCABULARY, "--n-shared-experts"])
    sizes: dict[str, Any] = {
        field: int(texts[flag].split(",")[0])
        for flag, field in FLAGS.items()
        if texts.get(flag, "").split(",")[0].lstrip("-").isdigit()
    }
    missing = [f for f in ("--num-layers", "--hidden-size", "--num-attention-heads") if f not in texts]
    if missing:
        raise OptionError(f"the launch has no {', '.join(missing)}: the model cannot be told from it")
    sizes["gated"] = "--swiglu" in texts or "--geglu" in texts
    sizes.setdefault("ffn", 4 * sizes["hidden"])
    sizes.setdefault("kv_heads", sizes["heads"])
    vocab = texts.get("--padded-vocab-size") or texts.get("--vocab-size") or "32000"
    if "--n-shared-experts" in texts and "shared_ffn" not in sizes:
        sizes["shared_ffn"] = int(texts["--n-shared-experts"]) * sizes.get("expert_ffn", sizes["ffn"])
    if sizes.get("experts"):
        sizes.setdefault("expert_ffn", sizes["ffn"])
        sizes["dense_layers"] = max(0, sizes.get("dense_layers", 0))
    layers = sizes["layers"] - len([n for n in texts.get("--noop-layers", "").split(",") if n])
    positions = texts.get("--position-embedding-type", "learned_absolute").removesuffix("_absolute")
    sizes |= {
        "layers": layers,
        "vocab": int(vocab),
        "tied": "--untie-embeddings-and-output-weights" not in texts,
        "norm": "rms" if texts.get("--normalization") == "RMSNorm" else "layer",
        "positions": "rope" if "--use-rotary-position-embeddings" in texts else positions,
    }
    if sizes["positions"] == "learned":
        sizes["max_positions"] = int(texts.get("--max-position-embeddings") or 0)
    return Architecture(**sizes)
