"""Rows of the tables of published runs as (model, settings, device, seconds): what each column means. A row that cannot
be read has a reason instead.
"""

from __future__ import annotations

import csv
import re

from benchmarks.published_ascend import ascend_run
from benchmarks.published_cells import Case, Unreadable, config_of
from benchmarks.published_gpu import gpu_run
from mindspeed_fx.errors import OptionError

FAMILIES = (
    "aquila baichuan bloom chatglm codegeex codellama deepseek gemma glm gpt-oss gpt grok hunyuan internlm "
    "longcat minicpm minimax mixtral mistral mpt nemotron phi codeqwen qwen1.5 qwen2.5 qwen2 qwen3 qwen seed telechat "
    "yi llama3 llama2 llama kimi"
).split()
HARDWARE = {
    "a100_40gb": "a100",
    "a100_80gb": "a100",
    "h100_80gb": "h100",
    "DGX-H100": "h100",
    "A100": "a100",
    "H100": "h100",
    "H200": "h200",
}


def read_cases(path: str) -> list[Case]:
    """The end-to-end and memory rows of a table."""
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    tokens = {(r["what"], r["shape_or_config"], r["source"]) for r in lines if r["unit"].startswith("tokens/s")}
    # A list by rank is of the run of the peak: its own source names the commit that first had such a file.
    peaks = {r["what"]: r["source"] for r in lines if r["kind"] == "memory_ci"}
    lists = [r for r in lines if r["kind"] == "memory_ci_ranks"]
    first_seen = {r["what"]: match[0] for r in lists if (match := re.search(r"(?<=\()20\d\d-\d\d", r["source"]))}
    cases = []
    for line in lines:
        if not _is_read(line):
            continue
        if line["kind"] == "memory_ci_ranks":
            line = {**line, "source": peaks.get(line["what"], line["source"])}
        config = config_of(line)
        case = Case(line["what"], kind_of(line, config), family_of(line["what"]), config=line["shape_or_config"])
        case.source_device = line["hardware"]
        case.source, case.unit, case.doubtful = line["source"], line["unit"], "note" in config
        case.first_seen = first_seen.get(line["what"], "9") if line["kind"].startswith("memory") else "9"
        case.low_precision = "fp8" in line["shape_or_config"].lower()
        try:
            twin = (line["what"], line["shape_or_config"], line["source"]) in tokens
            _fill(case, line, config, twin)
        except (Unreadable, OptionError) as error:
            case.reason = str(error).split(";")[0]
        cases.append(case)
    mark_contradictions(cases, [line["value"] for line in lines if _is_read(line)])
    return cases


def _is_read(line: dict[str, str]) -> bool:
    return bool(re.match(r"e2e_|memory", line["kind"])) and line["kind"] != "e2e_reference"


def mark_contradictions(cases: list[Case], values: list[str]) -> None:
    """Rows of which at most one can be right are doubtful: one value for a model under different settings, to the last
    digit of three or more, or one setting with values more than half apart.
    """
    by_value: dict[tuple, list[Case]] = {}
    by_config: dict[tuple, list[Case]] = {}
    for case, value in zip(cases, values):
        if case.run is None or case.kind.startswith("memory"):
            continue
        by_value.setdefault((case.what.split("(")[0], case.hardware, case.unit, value), []).append(case)
        by_config.setdefault((case.family, case.source_device, case.unit, case.config), []).append(case)
    for (_, _, _, value), same in by_value.items():
        if len({c.run for c in same}) > 1 and len(value.replace(".", "").rstrip("0")) > 3:
            for case in same:
                case.doubtful = True
    for same in by_config.values():
        if max(c.published for c in same) > 1.5 * min(c.published for c in same):
            for case in same:
                case.doubtful = True


def kind_of(line: dict[str, str], config: dict[str, str]) -> str:
    if line["kind"].startswith("memory"):
        return "memory by rank" if line["kind"] == "memory_ci_ranks" else "memory"
    if "lora" in line["what"].lower() or line["kind"] == "e2e_lora" or "lora_r" in config:
        return "lora time"
    return "ci time" if line["kind"] in ("e2e_ci", "e2e_ci_mm") and "NPU" not in line["hardware"][:0] else "time"


def family_of(what: str) -> str:
    name = re.sub(r"^(finetune|pretrain|tune|dpo|simpo|reward|train|trl|ppo|full|lora|orm|prm)_", "", what.lower())
    name = name.replace("gpt oss", "gpt-oss").replace("llama-3", "llama3").replace("llama_", "llama")
    return next((f for f in FAMILIES if f in name), "other")


def _fill(case: Case, line: dict[str, str], config: dict[str, str], twin: bool) -> None:
    unit = line["unit"]
    if line["hardware"].startswith("DGX-") and unit.startswith("model TFLOP"):
        raise Unreadable("model TFLOP/s of a run whose tokens/s has a row, by a formula that changed between releases")
    if "note" in config and "not a MFU" in config["note"]:
        raise Unreadable("printed TFLOP/s that its own note calls no measure")
    case.hardware = _device(line["hardware"])
    if any(
        w in case.what.lower()
        for w in (
            "vl",
            "vit_",
            "swin",
            "t5_",
            "mimo",
            "nemotron5-h",
            "next",
            "mae_",
            "mamba",
            "deepseek32",
            "deepseek4",
            "dsa",
            "longcat",
        )
    ):
        raise Unreadable("a vision part, an encoder, or layers other than plain attention and feed-forward")
    if "Ascend" in line["hardware"] or "Atlas" in line["hardware"] or "910" in line["hardware"]:
        case.model, case.run = ascend_run(case, config)
    else:
        case.model, case.run = gpu_run(case, line, config)
    if case.kind == "memory by rank":
        ranks = [float(x) * 2**20 for x in line["value"].split("/") if x]
        if len(ranks) % case.run.pp:
            raise Unreadable("a list of other length than the stages divide")
        each = len(ranks) // case.run.pp
        case.stages = tuple(max(ranks[i * each : (i + 1) * each]) for i in range(case.run.pp))
    case.published = published_value(case, line, unit, twin)


def _device(name: str) -> str:
    if "A3" in name or "910C" in name:
        return "ascend910c"
    if "A2" in name or "910B" in name:
        return "ascend910b2"
    if name.startswith("H100"):
        return "h100"
    if name not in HARDWARE:
        raise Unreadable(f"no table of the cost model for {name}")
    return HARDWARE[name]


def published_value(case: Case, line: dict[str, str], unit: str, twin: bool) -> float:
    """Seconds of a step, or bytes."""
    run, model = case.run, case.model
    if line["kind"] == "memory_ci_ranks":
        return max(float(x) for x in line["value"].split("/") if x) * 2**20
    value = float(line["value"])
    if unit.startswith("MB"):
        return value * 2**20
    if unit.startswith("GiB"):
        return value * 2**30
    each = run.tokens / run.devices
    if unit.startswith("tokens/s"):
        return each / value
    if unit in ("ms/step", "s/step"):
        return value / (1e3 if unit.startswith("ms") else 1)
    if unit.startswith("samples/s"):
        return run.tokens / run.sequence / value / (run.devices if "NPU" in unit else 1)
    if "TFLOP" in unit:
        if run.framework == "legacy":
            raise Unreadable("printed TFLOP/s of the legacy models, of which tokens/s of the same run are 2.4 times")
        if model.experts or model.kv_lora:
            raise Unreadable("printed TFLOP/s of a model with experts: its formula is not known")
        return each * model.flops(run.sequence, 1.0 if "printed" in unit else 0.5) / (value * 1e12)
    if unit == "% MFU":
        if "params" in config_of(line):
            params = float(config_of(line)["params"])
            flops = 6 * params + 12 * model.layers * model.hidden * run.sequence
            peak = {"h100": 989.4e12, "a100": 312e12}[case.hardware]
            if case.low_precision:
                peak = 1978.9e12
            return each * flops / (value / 100 * peak)
        raise Unreadable("MFU of a peak that is not stated")
    raise Unreadable(f"unit {unit}")
