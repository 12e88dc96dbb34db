"""``bishengir-compile`` up to, not including, the closed ``hivmc``: does a kernel fit the chip, and what did it become?

Source of the flags: triton-ascend 3.2.0, ``linalg_to_bin_enable_npu_compile_A2_A3``. Without hivmc the exit status is
always 1; what says that everything before it worked is the module it leaves behind. The compiler retries with double
buffering
off and says so in a note alone: that is an outcome of its own here. Standard library only.
"""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
import tempfile
from typing import Any, Iterator

OK, SLOWER, OVERFLOW, ERROR = "ok", "single-buffered", "overflow", "error"
SPACES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}

_FLAGS = (
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
    "--bishengir-print-ir-after=hivm-graph-sync-solver",
)
_BITS = {"i1": 1, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64, "f64": 64}
_MEMREF = re.compile(r"memref<((?:[\d?]+x)*)(\w+)")
_SYNC = ("set_flag", "wait_flag", "pipe_barrier", "sync_block_set", "sync_block_wait")
_MOVES = ("load", "store", "nd2nz", "fixpipe")


def compiler(folder: str) -> str:
    """The program in a folder of the tool chain."""
    return str(pathlib.Path(folder, "ascendnpuir", "bin", "bishengir-compile"))


@functools.cache
def version(program: str) -> str:
    """E.g. "1.2.0 (npuir-a3 8796a8ac1508 2026-07-29)"."""
    text = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    result = re.search(r"bishengir-compile (?:version )?(\S+ \([^)]*\))", text)
    return result[1] if result else " ".join(text.split())[:80]


def compile_linalg(program: str, text: str, soc: str, timeout: float = 120) -> dict[str, Any]:
    """What became of one kernel.

    Args:
        program: :func:`compiler`.
        text: linalg IR of :func:`mindspeed_fx.ascend.frontend.lower`.
        soc: e.g. "Ascend910B2".

    Returns:
        outcome: "ok", "single-buffered" (the compiler gave up double buffering to make it fit), "overflow", "error".
        message: of the overflow or error, "" otherwise.
        on_chip: memory space -> highest byte used, e.g. {"UB": 98532}.
        work: loop depth -> vector ``repeats`` of 256 bytes, ``sync`` operations, ``moves`` between memories, of one
            trip.
        dynamic: transfers whose size is known at run time only (masked tails).
        scalar_loops: loops that work element by element.
    """
    with tempfile.TemporaryDirectory(prefix="mindspeed_fx-") as folder:
        source, temporaries = pathlib.Path(folder, "kernel.ttadapter.mlir"), pathlib.Path(folder, "temporaries")
        source.write_text(text)
        command = [
            program,
            str(source),
            f"--target={soc}",
            *_FLAGS,
            f"--save-temps={temporaries}",
            "-o",
            str(pathlib.Path(folder, "kernel")),
        ]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=timeout
            )
            log = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            log = f"error: not done within {timeout} s"
        module = temporaries / "module.hivm.opt.mlir"
        final = module.read_text() if module.is_file() else None
    messages, synced = _separate(log)
    if final is None:
        return {**_failure(messages), "on_chip": {}, "work": {}, "dynamic": 0, "scalar_loops": 0}
    dropped = any("enable-auto-multi-buffer to false" in line for line in messages)
    return {"outcome": SLOWER if dropped else OK, "message": "", "on_chip": on_chip(final), **tally(synced)}


def _failure(messages: list[str]) -> dict[str, str]:
    for line in reversed(messages):
        if result := re.search(
            r"\b(ub|cbuf|cc) overflow(?:, requires (\d+) bits while (\d+) bits)?", line, re.IGNORECASE
        ):
            sizes = f": needs {int(result[2]) // 8:,} bytes of {int(result[3]) // 8:,}" if result[2] else ""
            return {"outcome": OVERFLOW, "message": f"{SPACES[result[1].lower()]} overflow{sizes}"}
    errors = [line for line in messages if "error" in line.lower() and "hivmc" not in line]
    return {"outcome": ERROR, "message": (errors[0] if errors else "the compiler left no module")[:300]}


def _separate(log: str) -> tuple[list[str], str]:
    """(messages, the IR after synchronization): a retry prints its IR again, of which the last counts."""
    messages: list[str] = []
    dumps: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in log.splitlines():
        if line.startswith("// -----// IR Dump"):
            current = []
        elif current is not None and re.match(
            r"\[(NOTE|ERROR|WARNING)\]|loc\(|\S+: (error|warning|note):|error:", line
        ):
            current = None
        if current is None:
            messages.append(line)
            continue
        current.append(line)
        if name := re.search(r"func\.func @(\w+)\(", line):
            dumps[name[1]] = current
    return messages, "\n".join(line for dump in dumps.values() for line in dump)


def on_chip(module: str) -> dict[str, int]:
    """Memory space -> highest byte that a buffer of the final module reaches; cube and vector parts share nothing."""
    highest: dict[str, int] = {}
    constants: dict[str, int] = {}
    for line in module.splitlines():
        if re.search(r"func\.func ", line):
            constants = {}
        if result := re.search(r"(%\w+) = arith\.constant (\d+) : i64", line):
            constants[result[1]] = int(result[2])
        if result := re.search(r"hivm\.hir\.pointer_cast\(([^)]*)\).*?: (memref<.*address_space<(\w+)>.*)", line):
            elements, bits = _shape(result[2])
            space = SPACES.get(result[3], result[3])
            for address in re.findall(r"%\w+", result[1]):
                if elements is not None and address in constants:
                    highest[space] = max(highest.get(space, 0), constants[address] + elements * bits // 8)
    return highest


def tally(synced: str) -> dict[str, Any]:
    """``work``, ``dynamic`` and ``scalar_loops`` of the IR after synchronization, where operators still have their
    names.
    """
    work: dict[int, dict[str, int]] = {}
    dynamic = scalar_loops = 0
    for operator, line, loops in _statements(synced):
        here = work.setdefault(len(loops), {"repeats": 0, "sync": 0, "moves": 0})
        if operator == "loop ends":
            scalar_loops += bool(loops[-1]["scalar"] and not loops[-1]["wide"])
        elif operator == "scalar":
            for loop in loops[-1:]:
                loop["scalar"] += 1
        elif operator in _SYNC:
            here["sync"] += 1
        elif operator in _MOVES or operator.startswith("v"):
            for loop in loops:
                loop["wide"] += 1
            operands = re.search(r"\bins\((.*?)\) outs\(", line)
            elements, bits = _shape(operands[1] if operands else line)
            if operator in _MOVES:
                here["moves"] += 1
                dynamic += "?" in "".join(result[1] for result in _MEMREF.finditer(line))
            elif elements:
                here["repeats"] += max(1, -(-elements * bits // 2048))
    return {
        "work": {str(depth): counts for depth, counts in sorted(work.items()) if any(counts.values())},
        "dynamic": dynamic,
        "scalar_loops": scalar_loops,
    }


def _statements(text: str) -> Iterator[tuple[str, str, list[dict[str, int]]]]:
    """(operator, line, enclosing loops) of what matters; "scalar" for element accesses, "loop ends" at its closing
    brace.
    """
    blocks: list[dict[str, int] | None] = []
    for line in text.splitlines():
        code = line.strip()
        loops = [b for b in blocks if b is not None]
        if code.startswith("}") and blocks:
            closed = blocks.pop()
            if closed is not None:
                yield "loop ends", line, loops
        elif result := re.search(r"hivm\.hir\.(\w+)", code):
            if result[1] != "pointer_cast":
                yield result[1], line, loops
        elif re.search(r"\bmemref\.(load|store) ", code):
            yield "scalar", line, loops
        if code.endswith("{"):
            blocks.append({"scalar": 0, "wide": 0} if re.search(r"\bscf\.(for|while)\b", code) else None)


def _shape(text: str) -> tuple[int | None, int]:
    """(elements, bits of one) of the first memref in ``text``; None elements when a size is dynamic, 0 without a
    memref.
    """
    result = _MEMREF.search(text)
    if not result:
        return 0, 0
    sizes, count = result[1].split("x")[:-1], 1
    for size in sizes:
        if size == "?":
            return None, _BITS.get(result[2], 32)
        count *= int(size)
    return count, _BITS.get(result[2], 32)
