"""What a training run fixes beside the model: ranks, batch, memory savers, precision, operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_fx import arguments
from mindspeed_fx.errors import OptionError, nearest

FUSED = ("attention", "rms_norm", "swiglu", "rope", "matmul_add")
FRAMEWORKS = ("megatron", "legacy", "mindspore", "fsdp", "deepspeed")
PRECISIONS = ("float32", "bfloat16", "float16", "float8_e4m3fn")
RECOMPUTE = ("none", "selective", "full")
COUNTS = ("devices", "sequence", "microbatch", "tp", "pp", "vpp", "cp", "ep", "loss_chunks")
"""From 1 on; other numbers from 0."""
CHOICES: dict[str, tuple] = {
    "framework": FRAMEWORKS,
    "precision": PRECISIONS,
    "recompute": RECOMPUTE,
    "zero": (0, 1, 2, 3),
    "cp_kind": ("ring", "ulysses", "hybrid", "kv_allgather"),
    "dispatcher": ("alltoall", "allgather"),
    "offload": ("none", "attention", "activations", "optimizer"),
    "attention_kernel": ("current", "early"),
    "optimizer": ("adam", "momentum", "sgd"),
    "expert_memory": ("none", "level0", "level1"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of one run; sizes are counts."""

    devices: int
    sequence: int
    microbatch: int = 1
    """Sequences of one forward on one rank."""
    batch: int = 0
    """Sequences of a step on all ranks; 0: one microbatch on each data-parallel rank."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual stages of a rank."""
    forwards_first: bool = False
    """With virtual stages and as many microbatches as stages, all forwards run before the first backward (Megatron-core
    before 0.9)."""
    cp: int = 1
    cp_kind: str = "ring"
    ep: int = 1
    etp: int = 0
    """Ranks that divide each expert; 0: as tp."""
    dispatcher: str = "alltoall"
    zero: int = 0
    """1: optimizer states divided (Megatron's distributed optimizer), 2: gradients too, 3: parameters too."""
    shards: int = 0
    """Ranks over which ZeRO divides; 0: all data-parallel ones."""
    sequence_parallel: bool = True
    recompute: str = "none"
    recompute_layers: int = 0
    """With "full": layers of each virtual stage that are recomputed; 0: all of them."""
    recompute_per_rank: bool = False
    """``recompute_layers`` counts those of a rank, not of each of its virtual stages."""
    recompute_activation: bool = False
    """What the activation function made is recomputed."""
    dropout: bool = False
    """Hidden states are dropped out: two masks of a layer are kept."""
    recompute_norms: bool = False
    """What norms made is recomputed."""
    expert_memory: str = "none"
    """MindSpeed's zero memory of experts. "level0": permuted tokens and activations are made again, "level1": exchanged
    tokens too."""
    empty_layers: tuple[int, ...] = ()
    """Places of the pipeline's layout, from 0, that have no layer (Megatron's and MindSpeed's no-op layers)."""
    offload: str = "none"
    overlap_gradients: bool = False
    overlap_parameters: bool = False
    overlap_tp: bool = False
    """Products and collectives of tensor parallelism in pieces (CoC, MC2, async TP)."""
    tp_chunks: int = 0
    """How many pieces: of n, one waits for the other side (CoC's --coc-parallel-num); 0: so many that none counts."""
    precision: str = "bfloat16"
    float32_gradients: bool = True
    reuse_float32: bool = False
    """The 16-bit parameters lie in the memory of their float32 copies (MindSpeed's reuse-fp32-param)."""
    fused: tuple[str, ...] = FUSED
    gelu_chain: bool = False
    """The activation of a model without a gate runs as the kernels of its formula: Megatron's bias-GELU fusion where no
    compiler fuses it, as on an NPU."""
    attention_kernel: str = "current"
    """"current": the vendor's or FlashAttention 3; "early": FlashAttention 1 in Triton."""
    optimizer: str = "adam"
    framework: str = "megatron"
    lora: int = 0
    """Rank of adapters; 0: everything is trained."""
    loss_chunks: int = 1
    """Pieces in which the head and the loss are computed."""

    def __post_init__(self) -> None:
        arguments.check_fields("settings", self, dict.fromkeys(COUNTS, 1), CHOICES)
        if isinstance(self.fused, str) or not all(name in FUSED for name in self.fused):
            close = nearest(str(next((n for n in self.fused if n not in FUSED), "")), FUSED)
            arguments.refuse("settings", "fused", self.fused, f"a tuple is expected, of {', '.join(FUSED)}{close}")
        if isinstance(self.empty_layers, str) or not all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in self.empty_layers
        ):
            expected = "a tuple of whole numbers from 0 on is expected"
            arguments.refuse("settings", "empty_layers", self.empty_layers, expected)
        if self.devices % (self.tp * self.pp * self.cp):
            raise OptionError(
                f"settings: tp={self.tp} x pp={self.pp} x cp={self.cp} does not divide {self.devices} devices"
            )
        if (self.dp * self.cp) % max(1, self.ep * self.expert_tp // self.tp):
            raise OptionError(f"settings: ep={self.ep} does not divide dp x cp = {self.dp * self.cp}")
        if self.shards and (self.dp * self.cp) % self.shards:
            raise OptionError(f"settings: shards={self.shards} does not divide dp x cp = {self.dp * self.cp}")
        if self.batch and self.batch % (self.dp * self.microbatch):
            raise OptionError(
                f"settings: a batch of {self.batch} is no multiple of dp={self.dp} x microbatch={self.microbatch}"
            )

    @property
    def dp(self) -> int:
        return self.devices // (self.tp * self.pp * self.cp)

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def hidden_tp(self) -> float:
        """Share of the messages beside products that is sent while they run."""
        return 0.0 if not self.overlap_tp else 1 - 1 / self.tp_chunks if self.tp_chunks else 1.0

    @property
    def microbatches(self) -> int:
        return self.batch // (self.dp * self.microbatch) if self.batch else 1

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        return self.microbatches * self.microbatch * self.dp * self.sequence

    @property
    def copies(self) -> int:
        """Ranks that hold the same parameters, but for ZeRO."""
        return self.dp * self.cp

    @property
    def itemsize(self) -> int:
        return 4 if self.precision == "float32" else 2

    @property
    def dtype(self) -> str:
        """Of activations."""
        return "bfloat16" if self.precision.startswith("float8") else self.precision


def settings(values: "Settings | dict[str, Any]") -> Settings:
    """``values`` as :class:`Settings`.

    Raises:
        OptionError: unknown name, wrong value, or a mesh that does not divide what it has to.
    """
    if isinstance(values, Settings):
        return values
    arguments.check_names("settings", values, Settings)
    return Settings(**values)
