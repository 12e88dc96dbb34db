"""Match rate over model architectures: how many of the sites that a model has are fused, and whether it still agrees.

    python tests/zoo/table.py [--write docs/match_rate.md] [architecture ...]

Each architecture runs one training step with random weights, eager and compiled (``codegen="eager"``); sites are counted
by tests/zoo/sites.py while it runs in eager mode.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import pathlib
import signal
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import architectures
import torch
from sites import CountSites

import mindspeed_fx

PASSES = ("fusion.attention", "fusion.rms_norm", "fusion.layer_norm", "fusion.rope", "fusion.swiglu", "fusion.glu", "fusion.cross_entropy")
ALSO = {"fusion.swiglu": ("fusion.clipped_swiglu", "fusion.weighted_swiglu")}
"""Passes that fuse sites of another kind with something more."""
OPTIONS = {"codegen": "eager"}
SECONDS = 300  # per architecture


@dataclass
class Row:
    """One architecture."""

    name: str
    graphs: int = 0
    fused: dict[str, int] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
    error: float = 0.0
    """Largest difference of a parameter's gradient, relative to its largest element or, where that is larger, to 1e-4 of
    the largest element of all gradients: what is left when everything cancels is rounding."""
    reasons: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return all(self.fused.get(p, 0) >= self.sites.get(p, 0) for p in PASSES)


def check(name: str, model: torch.nn.Module, inputs: dict[str, Any]) -> Row:
    """Run ``name``, as :func:`architectures.build` made it, eager and compiled."""
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with CountSites() as counted:
        loss = model(**inputs).loss
    loss.backward()
    expected = _take_gradients(model)
    report = mindspeed_fx.explain(model, **inputs, options=OPTIONS)
    model.zero_grad()
    torch._dynamo.reset()
    torch.manual_seed(1)  # some routers add noise
    compiled = torch.compile(model, backend="mindspeed", options=OPTIONS)(**inputs).loss
    compiled.backward()
    have = _take_gradients(model)
    if have.keys() != expected.keys():
        raise AssertionError(f"gradients of {sorted(have.keys() ^ expected.keys())} appeared or disappeared")
    floor = 1e-4 * max(g.abs().max().item() for g in expected.values())
    error = max(((have[n] - g).abs().max() / g.abs().max().clamp_min(floor)).item() for n, g in expected.items())
    error = max(error, abs(compiled.item() - loss.item()) / abs(loss.item()))
    reasons = Counter(f"{p.removeprefix('fusion.')}: {s.reason}" for p in PASSES for s in report.skipped(p))
    counts = {p: sum(report.counts.get(q, 0) for q in (p, *ALSO.get(p, ()))) for p in PASSES}
    texts = [f"{text} ({n} times)" if n > 1 else text for text, n in sorted(reasons.items())]
    breaks = sorted({f"graph break: {str(b).split('Explanation:')[0].strip()}" for b in report.break_reasons})
    return Row(name, report.graph_count, counts, {p: counted.counts[p] for p in PASSES}, error, texts + breaks)


def _take_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def markdown(rows: list[Row], unbuilt: dict[str, str], failed: dict[str, str]) -> str:
    """The page."""
    import transformers

    titles = [p.removeprefix("fusion.") for p in PASSES]
    complete = sum(r.complete for r in rows)
    lines = [
        "# Match rate",
        "",
        f"Written by `python tests/zoo/table.py --write docs/match_rate.md` on {datetime.date.today()}: torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        f"Each cell is *fused / sites in the model*. {complete} of {len(rows)} architectures are fused completely. *error* is the largest difference of a loss or",
        "gradient, relative to its largest element; models that compute parts of themselves in float32 differ in float32's last places.",
        "",
        "| architecture | graphs | " + " | ".join(titles) + " | error | misses |",
        "|---|---|" + "---|" * (len(titles) + 2),
    ]
    for r in rows:
        cells = [f"{r.fused[p]}/{r.sites[p]}" if r.fused[p] or r.sites[p] else "" for p in PASSES]
        lines.append(f"| {r.name} | {r.graphs} | " + " | ".join(cells) + f" | {r.error:.0e} | {'; '.join(r.reasons).replace('|', '/')} |")
    if failed:
        lines += ["", "## Failed", "", *(f"- {n}: {e}" for n, e in failed.items())]
    if unbuilt:
        lines += ["", "## Not tried", "", "These do not run one eager training step with the small configuration.", "", *(f"- {n}: {e}" for n, e in unbuilt.items())]
    return "\n".join(lines) + "\n"


def _fails_with_aot_eager(model: torch.nn.Module, inputs: dict[str, Any]) -> bool:
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="aot_eager")(**inputs).loss.backward()
    except Exception:  # noqa: BLE001
        return True
    return False


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:160]}"


def _too_slow(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", help="names as transformers spells them; all by default")
    parser.add_argument("--write", help="Markdown file; standard output by default")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGALRM, _too_slow)
    rows, unbuilt, failed = [], {}, {}
    for name in args.architectures or architectures.names():
        signal.alarm(SECONDS)
        try:
            model, inputs = architectures.build(name)
            model(**inputs).loss.backward()
        except Exception as error:  # noqa: BLE001  any reason at all: the model is not ours
            unbuilt[name] = _one_line(error)
            continue
        try:
            rows.append(check(name, model, inputs))
        except Exception as error:  # noqa: BLE001  goes into the table
            failed[name] = _one_line(error) + (" (so does torch's own aot_eager backend)" if _fails_with_aot_eager(model, inputs) else "")
        finally:
            signal.alarm(0)
        print(name, failed.get(name) or rows[-1], flush=True)
    text = markdown(rows, unbuilt, failed)
    if args.write:
        pathlib.Path(args.write).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
