"""The page of a deep model: its size, and how long a browser takes until every view can be used.

    python -m benchmarks.page_open [--layers 8,80] [--rounds 5]

A Hugging Face Llama (hidden 256, 2 x 128 tokens, float32, codegen "eager"), forward and backward. The browser is
Debian's chromium without a screen, by selenium (extra "browser"); each opening is a new tab's, from a file.
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
from typing import Any

import mindspeed_fx
from benchmarks import common
from benchmarks.browser import start_browser
from benchmarks.first_step import build


def opening(browser: Any, page: pathlib.Path) -> float:
    """Seconds from asking for the page until it says that it is ready."""
    browser.switch_to.new_window("tab")
    start = time.perf_counter()
    browser.get(f"file://{page}")
    while browser.execute_script("return document.documentElement.dataset.ready") != "yes":
        time.sleep(0.01)
    seconds = time.perf_counter() - start
    browser.close()
    browser.switch_to.window(browser.window_handles[0])
    return seconds


def row(browser: Any, layers: int, rounds: int) -> None:
    model, inputs = build(layers)
    report = mindspeed_fx.explain(model, options={"codegen": "eager"}, **inputs)
    nodes = sum({run.stage: run.nodes_after for run in report.graphs[0].runs}.values())
    with tempfile.TemporaryDirectory() as folder:
        report.save(folder)
        page = pathlib.Path(folder) / "rank0" / "graph0" / "report.html"
        seconds = [opening(browser, page) for _ in range(rounds + 1)][1:]
        size = page.stat().st_size / 2**20
    print(f"{layers:>3} layers, {nodes:,} nodes in the last graphs of all stages: {size:.2f} MB, ready in", end=" ")
    print(f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})", flush=True)


def main() -> None:
    args = common.arguments(layers="8,80", rounds=5)
    common.header("the page of a Hugging Face Llama, opened in chromium")
    browser = start_browser()
    try:
        for layers in map(int, args.layers.split(",")):
            row(browser, layers, args.rounds)
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
