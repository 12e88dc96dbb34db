"""Training steps of whole models on this machine's CPU: modelled after ``mindspeed-fx calibrate``, and measured.

    python -m benchmarks.calibrated_cpu [--rounds 7] [--models llama,...] [--seqs 512,2048] [--dtypes float32,bfloat16]
        [--table NAME] [--measured FILE]

Twelve models of Hugging Face, two layers, hidden 512, vocabulary 8192, 1024 tokens of 512 or one sequence of 2048;
forward and backward with the loss alone, compiled with the backend. The calibration knows none of them. The machine has
to be quiet. ``--measured`` takes the measured seconds from what an earlier run printed, and models every step anew.
"""

from __future__ import annotations

import logging
import pathlib
import re
import statistics
import time
import warnings

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mindspeed_fx  # noqa: F401
from benchmarks import common
from benchmarks.whole_models import LLAMA, VOCAB, Loss
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.planning.calibrate import calibrate, page
from mindspeed_fx.planning.calibrate.timing import wait_until_quiet
from mindspeed_fx.report import recorder
from mindspeed_fx.report.modelled import estimated

MODELS = "llama,mistral,qwen2,qwen3,gemma2,olmo2,phi3,cohere,granite,starcoder2,stablelm,gpt_neox"

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def build(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """A model of two layers that computes its loss."""
    config = AutoConfig.for_model(name, **LLAMA, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    attention = "eager" if name == "gemma2" else "sdpa"  # it caps its scores
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    model.loss_type = "ForCausalLM"
    return model


def measure(
    name: str, seq: int, dtype: torch.dtype, rounds: int, table: str, before: float | None = None
) -> tuple[float, float]:
    """(modelled, measured) seconds of one step; ``before``: measured already."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = build(name, dtype)
    ids = torch.randint(0, VOCAB, (max(1, 1024 // seq), seq))
    with recorder.collecting() if before is None else recorder.modelling() as graphs:
        compiled = torch.compile(Loss(model), backend="mindspeed")
        step = common.training_step(
            model, compiled, dict(input_ids=ids, labels=ids, use_cache=False), lambda loss: loss
        )
        step()
    modelled = sum(estimated(g, stage, table).seconds for g in graphs for stage in ("forward", "backward"))
    if before is not None:
        return modelled, before
    wait_until_quiet()
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return modelled, statistics.median(times[1:])


def measured_before(file: str) -> dict[tuple[str, str, int], float]:
    """(model, dtype, sequence) -> seconds, of the lines that this script printed."""
    line = re.compile(r"^(\S+)\s+(\S+)\s+(\d+) modelled .*measured\s+([\d.]+) ms", re.MULTILINE)
    rows = line.findall(pathlib.Path(file).read_text())
    return {(name, dtype, int(seq)): float(ms) / 1e3 for name, dtype, seq, ms in rows}


def main() -> None:
    args = common.arguments(
        rounds=7,
        models=MODELS,
        seqs="512,2048",
        dtypes="float32,bfloat16",
        seconds=60.0,
        table="",
        accept_noise=0,
        measured="",
    )
    if args.table:  # one that was made before
        table = hardware(args.table).name
    else:
        dtypes = tuple(args.dtypes.split(","))
        result = calibrate("cpu", seconds=args.seconds, dtypes=dtypes, accept_noise=bool(args.accept_noise))
        assert result is not None
        print(page.text(result))
        table = result.table.name
    errors, before = [], measured_before(args.measured) if args.measured else {}
    common.header("modelled and measured steps")
    for dtype in args.dtypes.split(","):
        for seq in map(int, args.seqs.split(",")):
            for name in args.models.split(","):
                known = before.get((name, dtype, seq))
                modelled, measured = measure(name, seq, getattr(torch, dtype), args.rounds, table, known)
                errors.append(modelled / measured - 1)
                print(
                    f"{name:<12}{dtype:<10}{seq:>6} modelled {modelled * 1e3:>9.1f} ms, measured "
                    f"{measured * 1e3:>9.1f} ms, error {errors[-1]:+.1%}",
                    flush=True,
                )
    within = sum(abs(e) <= 0.1 for e in errors) / len(errors)
    print(f"median error {statistics.median(map(abs, errors)):.1%}, {within:.0%} of {len(errors)} within 10 %")


if __name__ == "__main__":
    main()
