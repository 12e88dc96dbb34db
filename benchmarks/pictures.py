"""The pictures of README.md and docs/: each made from printed results, from the package's own lists, or from a report.

    python -m benchmarks.pictures [--out docs/pictures] [NAME ...]

``page.png`` is taken by chromium, the others are SVG and need nothing but the package. Colours are
those that the colour-blind tell apart (Okabe and Ito), and nothing is said by a colour alone.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from mindspeed_fx.report.svg import element, rect, text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
INK, FAINT, PAPER, PLAIN = "#1b1b1b", "#6b6b6b", "#ffffff", "#e4e4e4"
COLOURS = {
    "norms": "#56b4e9",
    "rotations": "#f0e442",
    "attention": "#e69f00",
    "gates": "#009e73",
    "losses": "#cc79a7",
    "products": "#b8c4e0",
}
"""Of families of operators; text on each is dark."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; default: all")
    parser.add_argument("--out", default=str(ROOT / "docs" / "pictures"))
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(PICTURES)
    if unknown:
        parser.error(f"no picture {', '.join(sorted(unknown))}; pictures are {', '.join(PICTURES)}")
    for name in arguments.names or PICTURES:
        print(make(name, Path(arguments.out)))


def make(name: str, folder: Path) -> Path:
    """Write one picture."""
    folder.mkdir(parents=True, exist_ok=True)
    made = PICTURES[name]()
    path = folder / name
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        path.write_text(made + "\n")
    return path


# ---------------------------------------------------------------- from printed results


def measured_rows() -> list[tuple[str, float, float]]:
    """(model, time and peak memory in parts of Inductor's) of the single models that the README's table begins with."""
    rows = []
    for file, model in (("megatron_gpt", "Megatron-core GPT"), ("hf_llama", "Hugging Face Llama")):
        lines = (RESULTS / f"2026-11-21-{file}.txt").read_text()
        titles = re.findall(r"^# (.*'layers'.*)$", lines, re.MULTILINE)
        ratios = re.findall(r"^inductor .*?([\d.]+), [\d.]+, ([\d.]+)$", lines, re.MULTILINE)
        for title, (time, peak) in zip(titles, ratios, strict=True):
            sequence = re.search(r"'seq': (\d+)", title)
            attention = re.search(r"attn_implementation=(\w+)", title)
            kind = {"eager": ", attention by hand", "sdpa": ", SDPA"}[attention[1]] if attention else ""
            assert sequence is not None
            rows.append((f"{model}, {sequence[1]} tokens{kind}", float(time), float(peak)))
    return rows


def draw_measured() -> str:
    """Time and peak memory of a training step beside Inductor's."""
    left, scale, parts = 350.0, 420.0, []
    rows = measured_rows()
    height = 64.0 + 46 * len(rows)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + share * scale
        colour, width = (INK, 2) if share == 1 else ("#cfcfcf", 1)
        parts.append(element("line", x1=x, y1=40.0, x2=x, y2=height - 14, stroke=colour, stroke_width=width))
        parts.append(text(x, 32.0, f"{share:g}" if share < 1 else "Inductor = 1", INK, text_anchor="middle"))
    for i, (name, time, peak) in enumerate(rows):
        y = 52.0 + 46 * i
        parts.append(text(left - 10, y + 17, name, INK, text_anchor="end", font_size=12))
        for offset, value, colour, word, ink in (
            (0, time, "#0072b2", "time", PAPER),
            (16, peak, "#e69f00", "memory", INK),
        ):
            parts.append(rect(left, y + offset, value * scale, 14.0, colour))
            parts.append(text(left + value * scale - 6, y + offset + 11, f"{word} {value:.2f}", ink, text_anchor="end"))
    parts.append(text(14.0, 32.0, "a training step on two CPU cores, 2026-11-21", FAINT))
    return _paper(830, height, parts, "Time and peak memory of a training step in parts of Inductor's")


def draw_budget() -> str:
    """Measured peaks over the budget, ours and torch's."""
    lines = (RESULTS / "2026-11-22-memory_budget.txt").read_text()
    block = re.search(r"# 8 layers.*?torch: not monotone", lines, re.DOTALL)
    assert block is not None
    rows = [tuple(map(float, m)) for m in re.findall(r"^ +([\d.]+) +([\d.]+) +([\d.]+) ", block[0], re.MULTILINE)]
    left, top, width, height, most = 60.0, 40.0, 560.0, 240.0, 80.0

    def place(fraction: float, megabytes: float) -> tuple[float, float]:
        return left + fraction * width, top + height * (1 - megabytes / most)

    parts = []
    for megabytes in range(0, 81, 20):
        y = place(0, megabytes)[1]
        parts.append(element("line", x1=left, y1=y, x2=left + width, y2=y, stroke="#cfcfcf"))
        parts.append(text(left - 8, y + 4, f"{megabytes} MB", INK, text_anchor="end"))
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(text(place(fraction, 0)[0], top + height + 18, f"{fraction:g}", INK, text_anchor="middle"))
    for column, colour, word, dash in ((2, "#0072b2", "mindspeed", None), (1, "#d55e00", "torch", "5 4")):
        points = [place(row[0], row[column]) for row in rows]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        line = element("polyline", points=drawn, fill="none", stroke=colour, stroke_width=2, stroke_dasharray=dash)
        parts.append(line)
        for x, y in points:
            dot = element("circle", cx=x, cy=y, r=3.5, fill=colour)
            parts.append(dot if column == 2 else rect(x - 3.5, y - 3.5, 7.0, 7.0, colour))
        x, y = points[-1]
        parts.append(text(x + 10, y + (10 if column == 1 else -2), word, colour, font_size=13))
    parts.append(text(left, 22.0, "measured peak of a step, without gradients of parameters, 2026-11-22", FAINT))
    parts.append(text(left + width / 2, top + height + 38, "memory_budget (a fraction)", INK, text_anchor="middle"))
    return _paper(740, 330, parts, "Measured peak memory over the budget: ours rises with it, torch's does not")


# ---------------------------------------------------------------- from the package's own lists


def draw_pipeline() -> str:
    """Stages of a compilation, with the passes of each."""
    from mindspeed_fx.passes.manager import PASSES, STAGES

    words = {
        "captured": "before autograd: one spelling, fused operators",
        "joint": "forward and backward in one graph",
        "partition": "what the forward saves, what is recomputed",
        "partitioned": "forward and backward: collectives, products",
        "lowered": "kernels of the target in place of operators",
    }
    parts, y = [], 14.0
    parts += _box(y, 'torch.compile(model, backend="mindspeed")', "Dynamo's graph of the model", PLAIN)
    for stage in STAGES:
        families: dict[str, int] = {}
        for row in PASSES:
            if row.stage == stage:
                family = row.name.split(".")[0]
                families[family] = families.get(family, 0) + 1
        y += 62
        counted = ", ".join(f"{n} {family}" for family, n in families.items())
        parts += _arrow(y) + _box(y, f"{stage}: {words[stage]}", counted, COLOURS["norms"])
    y += 62
    parts += _arrow(y) + _box(y, "codegen", "Inductor, or the graph as it is, or torch_npu's graphs", PLAIN)
    return _paper(560, y + 56, parts, "The stages of a compilation and the number of passes in each")


def _box(y: float, title: str, below: str, colour: str) -> list[str]:
    return [
        rect(20.0, y, 520.0, 42.0, colour, rx=6),
        text(34.0, y + 18, title, INK, font_size=13, font_weight="bold"),
        text(34.0, y + 34, below, INK, font_size=12),
    ]


def _arrow(y: float) -> list[str]:
    return [element("path", d=f"M280 {y - 19:.1f} v13 m-5 -5 l5 6 l5 -6", fill="none", stroke=INK, stroke_width=1.5)]


# ---------------------------------------------------------------- from reports of a small model


def small_model() -> tuple[Any, dict[str, Any]]:
    """A Llama of Hugging Face with one small layer, and its inputs."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    config._attn_implementation = "eager"  # written out, as most models of a paper's repository have it
    torch.manual_seed(0)
    ids = torch.randint(512, (2, 64))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def draw_rewrite() -> str:
    """The operators of a layer's forward, before and after."""
    import mindspeed_fx
    from mindspeed_fx.report.families import FAMILIES

    model, inputs = small_model()
    report = mindspeed_fx.explain(model, **inputs, options={"codegen": "eager", "hardware": "cpu"})
    record = report.graphs[0]
    family_of = {name: family for family, names in FAMILIES.items() for name in names}
    families: dict[str, str] = {}
    operators: dict[str, str] = {}
    for run in record.runs:
        family = family_of.get(run.report.name)
        for site in run.report.rewrites:
            if family in COLOURS and run.stage == "captured":
                operators[site.operator.split("::")[-1]] = family
                for node in site.nodes:
                    families.setdefault(node, family)
    inside = "model.layers.0"
    before = [
        (c.operator, families.get(c.name, "")) for c in record.calls["captured"].calls if c.module.startswith(inside)
    ]
    after = [
        (c.operator, operators.get(re.sub(r"_flash$|_blocked$", "", c.operator.split(".")[-1]), ""))
        for c in record.calls["forward"].calls
        if c.module.startswith(inside)
    ]
    return _chips([("one layer as it was written", before), ("after the passes", after)])


def _chips(sides: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Two panels of operators in the order of running, a label each."""
    parts, bottom, wide, columns = [], 0.0, 118.0, 3
    for side, (title, calls) in enumerate(sides):
        left = 20.0 + side * (columns * wide + 40)
        parts.append(text(left, 26.0, f"{title}: {len(calls)} operators", INK, font_size=14, font_weight="bold"))
        for i, (operator, family) in enumerate(calls):
            name = operator.split(".")[-1]
            is_product = name in ("mm", "linear", "addmm", "bmm")
            colour = COLOURS.get(family or ("products" if is_product else ""), PLAIN)
            x, y = left + i % columns * wide, 40.0 + i // columns * 27
            parts.append(rect(x, y, wide - 8, 22.0, colour, rx=4))
            parts.append(text(x + 8, y + 15, name if len(name) < 17 else name[:16] + "\u2026", INK))
            bottom = max(bottom, y + 22)
    x = 20.0
    for family in ("norms", "rotations", "attention", "gates", "products"):
        parts.append(rect(x, bottom + 18, 14.0, 14.0, COLOURS[family], rx=3))
        parts.append(text(x + 20, bottom + 29, family, INK, font_size=12))
        x += 34 + 8 * len(family)
    parts.append(text(x, bottom + 29, "grey: everything else", FAINT, font_size=12))
    label = "; ".join(f"{title}: {len(calls)} operators" for title, calls in sides)
    return _paper(40 + 2 * (columns * wide) + 40, bottom + 46, parts, label)


def draw_plan() -> str:
    """What a plan sends: the picture of the audit, of a decoder of one layer on four ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import mindspeed_fx

    model, inputs = small_model()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model = mindspeed_fx.parallelize(model, mesh, "tp_sp")
        torch._dynamo.reset()
        options = {"codegen": "eager", "hardware": "cpu"}
        report = mindspeed_fx.explain(model, **inputs, options=options)
    finally:
        dist.destroy_process_group()
    drawn = [run.report.files["plan.svg"] for run in report.graphs[0].runs if "plan.svg" in run.report.files]
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn[-1]).groups())
    return _paper(width, height, [drawn[-1].strip()], "Modules of a layer, their placements, and what is sent there")


def _screenshot(width: int, height: int) -> bytes:
    """The page of the small model's graph, taken by chromium."""
    import mindspeed_fx

    model, inputs = small_model()
    report = mindspeed_fx.explain(model, **inputs, options={"codegen": "eager", "hardware": "cpu"})
    with tempfile.TemporaryDirectory() as folder:
        report.save(folder)
        page = next(Path(folder).rglob("report.html"))
        return take_screenshot(f"file://{page}", width, height, Path(folder))


def take_screenshot(address: str, width: int, height: int, folder: Path) -> bytes:
    """A PNG of a page.

    Raises:
        FileNotFoundError: chromium is not installed.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError("chromium is not installed, which takes the pictures of pages")
    shot = folder / "shot.png"
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
    words += ["--no-first-run", f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"]
    words += ["--virtual-time-budget=8000", f"--screenshot={shot}", address]
    subprocess.run([chromium, *words], check=True, capture_output=True, timeout=120)
    return shot.read_bytes()


def _paper(width: float, height: float, parts: list[str], label: str) -> str:
    """The picture on white, so that it can be read on a dark page too."""
    return element(
        "svg",
        "".join([rect(0.0, 0.0, float(width), float(height), PAPER, rx=8), *parts]),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
        font_family="system-ui, sans-serif",
        font_size=11,
        role="img",
        aria_label=label,
    )


PICTURES: Mapping[str, Callable[[], str | bytes]] = {
    "rewrite.svg": draw_rewrite,
    "measured.svg": draw_measured,
    "budget.svg": draw_budget,
    "pipeline.svg": draw_pipeline,
    "plan.svg": draw_plan,
    "page.png": lambda: _screenshot(1200, 900),
}
"""File under docs/pictures/ -> what makes it."""

FROM_REPORTS = ("rewrite.svg", "plan.svg", "page.png")
"""Those that compile a model first."""

if __name__ == "__main__":
    main()
