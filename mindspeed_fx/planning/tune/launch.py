"""A launch read for tuning: its model, its settings, which of them have to stay as they are, and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Sequence

from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.planning.predict.architecture import (
    FLAGS,
    VOCABULARY,
    Architecture,
    check_flags,
    check_numbers,
    values_of,
)
from mindspeed_fx.planning.predict.architectures import architecture
from mindspeed_fx.planning.predict.launch_flags import SIZES, settings_from_flags
from mindspeed_fx.planning.predict.settings import Settings
from mindspeed_fx.planning.tune.words import with_flag, without_flag

SEARCHED = ("tp", "pp", "vpp", "cp", "ep", "microbatch", "recompute", "swap", "zero", "overlap")
"""What is searched, as ``--fix`` names it; dp is what the others leave of the devices."""

LAYOUT = ("pp", "vpp")
"""Names that a layout of layers or a schedule fixes."""
HOLDS: dict[str, tuple[str, ...]] = {
    "--noop-layers": LAYOUT,
    "--num-layer-list": LAYOUT,
    "--pipeline-num-transformer-layers": LAYOUT,
    "--pipeline-model-parallel-layout": LAYOUT,
    "--decoder-first-pipeline-num-layers": LAYOUT,
    "--decoder-last-pipeline-num-layers": LAYOUT,
    "--schedules-method": LAYOUT,
    "--use-nanopipe": LAYOUT,
    "--use-multiparameter-pipeline-model-parallel": LAYOUT,
    "--variable-seq-lengths": LAYOUT,
    "--moe-fb-overlap": (*LAYOUT, "swap"),
    "--recompute-in-bubble": (*LAYOUT, "recompute", "swap"),
    "--recompute-in-advance": (*LAYOUT, "recompute"),
    "--tp-2d": ("tp", "cp"),
    "--unaligned-linear": ("tp",),
    "--moe-tp-extend-ep": ("tp", "ep"),
    "--use-custom-fsdp": ("tp", "pp", "vpp", "cp", "ep", "swap", "zero", "overlap"),
    "--use-torch-fsdp2": ("tp", "pp", "vpp", "cp", "ep", "swap", "zero", "overlap"),
    "--layerzero": ("tp", "pp", "vpp", "cp", "ep", "swap", "zero", "overlap"),
    "--reset-attention-mask": ("cp",),
    "--reset-position-ids": ("cp",),
    "--enable-dsa-indexer": ("cp",),
    "--enable-mla-absorb": ("cp",),
    "--compress-ratios": ("cp", "tp"),
    "--linear-num-key-heads": ("cp", "tp"),
    "--attention-mask-type": ("cp",),
    "--use-ulysses-allgather-kv": ("cp",),
    "--ulysses-degree-in-cp": ("cp",),
    "--cp-window-size": ("cp",),
    "--moe-zero-memory": ("recompute",),
    "--recompute-modules": ("recompute",),
    "--distribute-saved-activations": ("recompute", "tp"),
    "--swap-optimizer": ("swap", "zero", "overlap"),
    "--swap-layer-input": ("swap",),
    "--smart-swap": ("swap",),
    "--mla-swap-core-attn-out": ("swap",),
}
"""Flag -> what it fixes: with another value it would have to change too, or is another feature."""
NOT_MODELLED = (
    "--enable-dsa-indexer",
    "--compress-ratios",
    "--linear-num-key-heads",
    "--swap-attention",
    "--swap-layer-input",
    "--smart-swap",
    "--moe-zero-memory",
    "--recompute-norm",
    "--recompute-mla-up-proj",
    "--recompute-in-bubble",
    "--recompute-in-advance",
    "--moe-fb-overlap",
    "--moe-alltoall-overlap-comm",
    "--schedules-method",
    "--tp-2d",
    "--layerzero",
)
"""Flags whose effect on time or memory the prediction has not, or not whole."""
SWAPS = {"attention": "--swap-attention", "optimizer": "--swap-optimizer"}
"""What waits in host memory -> its flag."""
ALGORITHMS = {"ring": "megatron_cp_algo", "ulysses": "ulysses_cp_algo"}
RECOMPUTE_FLAGS = (
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-activations",
    "--enable-recompute-layers-per-pp-rank",
)
VIRTUAL_FLAGS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")


@dataclass
class Launch:
    """What :func:`read_launch` reads."""

    words: list[str]
    texts: dict[str, str]
    """Flag -> its value."""
    model: Architecture
    settings: Settings
    held: dict[str, str] = field(default_factory=dict)
    """Name of ``SEARCHED`` -> why it stays as it is."""

    @property
    def layers(self) -> int:
        """As the flag counts them: layers that do nothing with the others."""
        return int(self.texts["--num-layers"])

    @property
    def not_modelled(self) -> list[str]:
        return [flag for flag in NOT_MODELLED if flag in self.texts]

    @property
    def swaps(self) -> tuple[str, ...]:
        """Values of ``offload`` that may be tried."""
        if "swap" in self.held:
            return (self.settings.offload,)
        keeps_states = "--reuse-fp32-param" in self.texts or self.texts.get("--optimizer", "adam") != "adam"
        return ("none", *(kind for kind in SWAPS if kind != "optimizer" or not keeps_states))

    def words_of(self, run: Settings) -> list[str]:
        """The launch's words with the settings of ``run``; what is as it was stays word for word."""
        old, words = self.settings, self.words
        for flag, name in SIZES.items():
            if name != "etp" and getattr(run, name) != getattr(old, name):
                words = with_flag(words, flag, str(getattr(run, name)))
        if run.expert_tp != old.expert_tp and run.expert_tp != run.tp or "--expert-tensor-parallel-size" in self.texts:
            words = with_flag(words, "--expert-tensor-parallel-size", str(run.expert_tp))
        if run.cp > 1 and (run.cp_kind != old.cp_kind or old.cp == 1):
            words = with_flag(words, "--context-parallel-algo", ALGORITHMS[run.cp_kind])
        if (run.pp, run.vpp) != (old.pp, old.vpp):
            for flag in VIRTUAL_FLAGS:
                if run.vpp == 1 or flag != VIRTUAL_FLAGS[0]:
                    words = without_flag(words, flag)
            if run.vpp > 1:
                words = with_flag(words, VIRTUAL_FLAGS[0], str(self.layers // run.pp // run.vpp))
        if run.tp > 1 and run.sequence_parallel and "--sequence-parallel" not in self.texts:
            words = with_flag(words, "--sequence-parallel", None)
        if (run.recompute, run.recompute_layers) != (old.recompute, old.recompute_layers):
            words = self._recompute(words, run)
        for kind, flag in SWAPS.items():
            if (run.offload == kind) != (old.offload == kind):
                words = with_flag(words, flag, None) if run.offload == kind else without_flag(words, flag)
        for flag, name in (
            ("--use-distributed-optimizer", "zero"),
            ("--overlap-grad-reduce", "overlap_gradients"),
            ("--overlap-param-gather", "overlap_parameters"),
        ):
            if getattr(run, name) != getattr(old, name):
                words = with_flag(words, flag, None) if getattr(run, name) else without_flag(words, flag)
        return list(words)

    def _recompute(self, words: Sequence[str], run: Settings) -> list[str]:
        if run.recompute == "none":
            for flag in RECOMPUTE_FLAGS:
                words = without_flag(words, flag)
            return list(words)
        for flag in RECOMPUTE_FLAGS[3:]:
            words = without_flag(words, flag)
        count = run.recompute_layers or self.layers // (run.pp * run.vpp)
        for flag, value in zip(RECOMPUTE_FLAGS, ("full", "block", str(count))):
            words = with_flag(words, flag, value)
        return list(words)


def read_launch(words: Sequence[str], devices: int, fixed: Sequence[str] = ()) -> Launch:
    """Model and settings of a launch.

    Args:
        words: arguments of the entry script, as a shell passes them.
        fixed: names of ``SEARCHED`` that the user keeps.

    Raises:
        OptionError: sizes that are missing, no numbers, or do not divide each other.
    """
    check_flags(words)
    texts = values_of(words)
    if not texts:
        raise OptionError("no arguments of a launch script: give them after --")
    numbers = (*SIZES, *FLAGS, *VIRTUAL_FLAGS, *VOCABULARY, "--recompute-num-layers")
    check_numbers(texts, [flag for flag in numbers if flag != "--window-size"])
    for flag in ("--seq-length", "--global-batch-size"):
        if not texts.get(flag):
            raise OptionError(f"the launch has no {flag}: a step cannot be compared without it")
    for name in fixed:
        if name not in SEARCHED:
            raise OptionError(f"--fix {name}: valid: {', '.join(SEARCHED)}{nearest(name, SEARCHED)}")
    if devices < 1:
        raise OptionError(f"--devices {devices}: a number from 1 on is expected")
    held = {name: flag for flag, names in HOLDS.items() if flag in texts for name in names}
    if not texts.get("--context-parallel-algo", "ulysses").startswith(("ulysses", "megatron")):
        held.setdefault("cp", "--context-parallel-algo")
    if "--use-flash-attn" not in texts:
        held.setdefault("cp", "no --use-flash-attn")
    if texts.get("--optimizer", "adam") != "adam":
        held.setdefault("zero", "--optimizer")
    held |= dict.fromkeys(fixed, "--fix")
    try:
        settings = settings_from_flags(words, devices)
    except OptionError as error:
        raise OptionError(f"the launch does not fit on {devices} devices: {error}") from None
    if "--context-parallel-algo" not in texts:  # MindSpeed's default
        settings = dataclasses.replace(settings, cp_kind="ulysses")
    return Launch(list(words), texts, architecture(words), settings, held)
