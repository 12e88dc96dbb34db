"""Match rate over model architectures: how many of the sites that a model has are fused, and whether it still agrees.

    python -m tests.zoo.table [--write docs/match_rate.md [--update]] [--jobs 2] [--narrow] [--from litgpt=DIR] [--from
    torchtitan=DIR] [architecture ...]

Each architecture runs one training step with random weights, eager and compiled (``codegen="eager"``); sites are
counted by tests/zoo/sites.py while it runs in eager mode. ``--narrow`` adds a column for bfloat16. ``--update`` keeps
the rows of the file that are not run again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import logging
import multiprocessing
import pathlib
import re
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from tests.zoo.step import OPTIONS, PASSES, Row, check, in_bfloat16

__all__ = ["OPTIONS", "PASSES", "Row", "check", "in_bfloat16"]
SECONDS = 300  # per architecture
CAPTURE = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
"""Dynamo's settings under which what depends on data breaks no graph; off by default."""
WHOLE = "whole in "


def markdown(table: dict[str, str], unbuilt: dict[str, str], failed: dict[str, str]) -> str:
    """The page, from rows of it by name."""
    import transformers

    titles = [p.removeprefix("fusion.") for p in PASSES]
    complete = sum(_is_complete(row) for row in table.values())
    captured = sum(WHOLE in row for row in table.values())
    lines = [
        "# Match rate",
        "",
        f"Written by `python -m tests.zoo.table --write docs/match_rate.md` on {datetime.date.today()}: torch "
        f"{torch.__version__}, transformers {transformers.__version__}.",
        "",
        f"Each cell is *fused / sites in the model*, in the graphs as often as they run. {complete} of {len(table)} "
        f"architectures are fused completely, {captured} more with "
        f"{' and '.join(f'`torch._dynamo.config.{c}`' for c in CAPTURE)}. *error* is the largest",
        "difference of a loss or gradient, relative to its largest element; models that compute parts of themselves in "
        "float32 differ in float32's last places.",
        "*bf16* is the error of the gradients in bfloat16 as a multiple of the unfused model's own (`--narrow`; at "
        "most 2); above 2, which one token decides that is routed elsewhere, the median of three sets of weights.",
        "A row is from the last run that tried its architecture (`--update`). Architectures of litgpt are `litgpt/...` "
        "(`--from litgpt=DIR`), of torchtitan `torchtitan/...` (`--from torchtitan=DIR`), of Megatron-core "
        "`megatron/...`, all others of transformers.",
        "",
        "| architecture | graphs | " + " | ".join(titles) + " | error | bf16 | misses |",
        "|---|---|" + "---|" * (len(titles) + 3),
        *(table[name] for name in sorted(table)),
    ]
    if failed:
        lines += ["", "## Failed", "", *(f"- {n}: {e}" for n, e in sorted(failed.items()))]
    if unbuilt:
        lines += [
            "",
            "## Not tried",
            "",
            "These do not run one eager training step with the small configuration.",
            "",
            *(f"- {n}: {e}" for n, e in sorted(unbuilt.items())),
        ]
    return "\n".join(lines) + "\n"


def row_text(r: Row) -> str:
    """One row of the page."""
    cells = [f"{r.fused[p]}/{r.sites[p]}" if r.fused[p] or r.sites[p] else "" for p in PASSES]
    narrow = f"{r.narrow:.2f}" if isinstance(r.narrow, float) else r.narrow
    return (
        f"| {r.name} | {r.graphs} | "
        + " | ".join(cells)
        + f" | {r.error:.0e} | {narrow} | {'; '.join(r.reasons).replace('|', '/')} |"
    )


def read(text: str) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """(rows, not tried, failed) of a page, by name; rows without a column for bfloat16 get one."""
    table = {}
    for line in text.splitlines():
        if (cells := re.fullmatch(r"\| ([\w./-]+) \| (\d+ \|.*) \|", line)) is not None:
            parts = line.split(" |")
            if len(parts) == len(PASSES) + 5:
                parts.insert(-2, " ")
            table[cells[1]] = " |".join(parts)
    sections = {
        s.split("\n", 1)[0]: dict(re.findall(r"^- ([\w./-]+): (.*)$", s, re.M)) for s in text.split("\n## ")[1:]
    }
    return table, sections.get("Not tried", {}), sections.get("Failed", {})


def _is_complete(row: str) -> bool:
    return all(int(fused) >= int(sites) for fused, sites in re.findall(r"\| (\d+)/(\d+) ", row))


def one(
    name: str, sources: dict[str, str], narrow: bool, device: str = "cpu", seconds: int = SECONDS
) -> Row | tuple[str, str]:
    """The row of one architecture; ("unbuilt" or "failed", why) without one."""
    quiet()
    with time_limit(seconds):
        return _row_of(name, sources, narrow, device)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """TimeoutError in what takes longer. It takes the process's one alarm, which pytest's limits use, too."""
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError(f"more than {seconds} seconds")))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _row_of(name: str, sources: dict[str, str], narrow: bool, device: str) -> Row | tuple[str, str]:
    from tests.zoo import architectures, modalities, others

    try:
        model, inputs = architectures.made(name, sources)
        model, inputs = model.to(device), pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)
        model(**inputs).loss.backward()
    except Exception as error:  # noqa: BLE001  any reason at all: the model is not ours
        return "unbuilt", one_line(error)
    try:
        row = check(name, model, inputs)
        if not _is_complete(row_text(row)) and any(r.startswith("graph break") for r in row.reasons):
            with torch._dynamo.config.patch(**CAPTURE):
                captured = _captured(name, model, inputs)
            if captured is not None and _is_complete(row_text(captured)):
                row.reasons.append(
                    f"{WHOLE}{captured.graphs} graph{'s' * (captured.graphs > 1)} with Dynamo's {' and '.join(CAPTURE)}"
                )
        row.narrow = in_bfloat16(model, inputs) if narrow else ""
        row.reasons += [note for notes in (others.NOTES, modalities.NOTES) if (note := notes.get(name)) is not None]
        return row
    except Exception as error:  # noqa: BLE001  goes into the table
        return "failed", one_line(error) + (
            " (so does torch's own aot_eager backend)" if fails_with_aot_eager(model, inputs) else ""
        )


def _captured(name: str, model: torch.nn.Module, inputs: dict[str, Any]) -> Row | None:
    try:
        return check(name, model, inputs)
    except Exception:  # noqa: BLE001  settings that torch does not advise
        return None


def fails_with_aot_eager(model: torch.nn.Module, inputs: dict[str, Any]) -> bool:
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="aot_eager")(**inputs).loss.backward()
    except Exception:  # noqa: BLE001
        return True
    return False


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:160]}"


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def sources_of(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, str]:
    """Folders by name of the source, from what ``--from`` was given."""
    sources = dict(one.split("=", 1) for one in given)
    if unknown := sources.keys() - {"litgpt", "torchtitan"}:
        parser.error(f"--from {', '.join(sorted(unknown))}: valid: litgpt=DIR, torchtitan=DIR")
    return sources


def main() -> None:
    from tests.zoo import architectures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "architectures",
        nargs="*",
        help="names as transformers spells them, megatron/..., litgpt/... and torchtitan/...; all of every source by "
        "default",
    )
    parser.add_argument("--write", help="Markdown file; standard output by default")
    parser.add_argument("--update", action="store_true", help="keep the rows of --write's file that are not run")
    parser.add_argument("--narrow", action="store_true", help="also run each in bfloat16")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of one thread when there are several")
    parser.add_argument("--device", default="cpu", help="where the models run, which are also made on cpu")
    parser.add_argument(
        "--from",
        dest="sources",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="another source of models: the folder that a wheel of it was unpacked to",
    )
    args = parser.parse_args()
    sources = sources_of(parser, args.sources)
    if args.update and not (args.write and pathlib.Path(args.write).is_file()):
        parser.error("--update needs the file that --write names")
    table, unbuilt, failed = read(pathlib.Path(args.write).read_text()) if args.update else ({}, {}, {})
    with (
        concurrent.futures.ProcessPoolExecutor(
            args.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
        )
        if args.jobs > 1
        else _Here() as pool
    ):
        names = args.architectures or architectures.every(sources)
        for name, made in zip(
            names, pool.map(one, names, *([of_all] * len(names) for of_all in (sources, args.narrow, args.device)))
        ):
            for known in (table, unbuilt, failed):
                known.pop(name, None)
            if isinstance(made, Row):
                table[name] = row_text(made)
            else:
                (unbuilt if made[0] == "unbuilt" else failed)[name] = made[1]
            print(name, made, flush=True)
            if args.write:
                pathlib.Path(args.write).write_text(
                    markdown(table, unbuilt, failed)
                )  # what is known so far survives an interruption
    if not args.write:
        print(markdown(table, unbuilt, failed))


class _Here:
    """One process is this one."""

    map = staticmethod(map)

    def __enter__(self) -> "_Here":
        return self

    def __exit__(self, *_: Any) -> None: ...


if __name__ == "__main__":
    main()
