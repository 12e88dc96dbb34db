"""The pytest plugin under which Megatron-core's tests run without CUDA.

The adaptor answers Megatron's modules; the tests themselves say ``"cuda"`` and ``"nccl"`` too, and skip where
``torch.cuda.is_available()`` is False. Test modules (``tests.*``), and they alone, are told that there is a device for
each rank.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_fx.megatron import device_words, patches, table

PACKAGE = "tests"
ENGINE = "transformer_engine"
DATA = "tests.test_utils.python_scripts.download_unit_tests_dataset"


def answer_test_modules() -> None:
    """Answer ``torch.cuda`` and nccl where test modules ask for them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for name, value in {"is_available": True, "device_count": world, "get_device_capability": (0, 0)}.items():
        setattr(torch.cuda, name, _for_tests(getattr(torch.cuda, name), value))
    for name in ("reset_peak_memory_stats", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _over_gloo(getattr(dist, name)))
    builtins.__import__ = _import_for_tests(builtins.__import__)
    no_download = ModuleType(DATA)
    no_download.download_and_extract_asset = _refuse_download  # type: ignore[attr-defined]
    sys.modules[DATA] = no_download


def share_gloo_loop() -> None:
    """Give all process groups of this process one gloo device: the loop of each device wakes up a hundred times a
    second, and Megatron's tests make hundreds of groups that they never destroy."""
    groups = dist.distributed_c10d
    device = groups.ProcessGroupGloo.create_default_device()

    class SharedLoop(groups.ProcessGroupGloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any = groups.default_pg_timeout) -> None:
            options = groups.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], 1, timeout
            super().__init__(store, rank, size, options)

    groups.ProcessGroupGloo = SharedLoop


def _for_tests(function: Any, value: Any) -> Any:
    @functools.wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return value if asker.partition(".")[0] == PACKAGE else function(*args, **kwargs)

    return answer


def _over_gloo(function: Any) -> Any:
    @functools.wraps(function)
    def start(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if a == "nccl" else a for a in args)
        if kwargs.get("backend") in ("nccl", "cpu:gloo,cuda:nccl"):
            kwargs["backend"] = "gloo"
        return function(*args, **kwargs)

    return start


def _import_for_tests(import_module: Any) -> Any:
    """Test modules import TransformerEngine at their beginning also where few of their tests use it: they get what can
    be said without it, that it supports no fp8. What is under ``try`` there asks for other names, and fails.
    """
    engine = ModuleType(ENGINE)
    fp8 = ModuleType(f"{ENGINE}.pytorch.fp8")
    fp8.check_fp8_support = lambda: (False, "TransformerEngine is not installed")  # type: ignore[attr-defined]
    fp8.fp8_autocast = _refuse_engine  # type: ignore[attr-defined]
    answers = {ENGINE: engine, fp8.__name__: fp8}

    def import_for_tests(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        asker = (globals or {}).get("__name__", "")
        if (
            name in answers
            and asker.partition(".")[0] == PACKAGE
            and all(hasattr(answers[name], n) for n in fromlist or ())
        ):
            return answers[name]
        return import_module(name, globals, locals, fromlist, level)

    return import_for_tests


def _refuse_engine(*args: Any, **kwargs: Any) -> None:
    raise ImportError("TransformerEngine is not installed")


def answer_engine_specs() -> None:
    """Where a test builds a model of TransformerEngine's layers it gets Megatron's local ones, as the adaptor's users
    do by ``--transformer-impl``."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    engine = specs.get_gpt_layer_with_transformer_engine_spec
    swaps = {engine: functools.partial(_with_known_arguments, engine, specs.get_gpt_layer_local_spec)}
    for name in ("get_gpt_decoder_layer_specs", "get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec"):
        swaps[getattr(specs, name)] = functools.partial(_locally, getattr(specs, name))
    patches.sweep({id(old): (old, new) for old, new in swaps.items()})


def _with_known_arguments(engine: Any, local: Any, *args: Any, **kwargs: Any) -> Any:
    """``local`` with those arguments of ``engine`` that it has; experts in one product need TransformerEngine."""
    known = inspect.signature(local).parameters
    arguments = inspect.signature(engine).bind(*args, **kwargs).arguments
    return local(**{k: v for k, v in arguments.items() if k in known and k != "moe_grouped_gemm"})


def _locally(function: Any, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.arguments["use_transformer_engine"] = False
    return function(*bound.args, **bound.kwargs)


def _refuse_download(*args: Any, **kwargs: Any) -> None:
    raise ImportError("test data are not downloaded")


COMPILED = (
    "megatron.core.models.gpt.gpt_model:GPTModel",
    "megatron.core.transformer.transformer_block:TransformerBlock",
    "megatron.core.transformer.attention:SelfAttention",
    "megatron.core.transformer.multi_latent_attention:MLASelfAttention",
    "megatron.core.transformer.mlp:MLP",
    "megatron.core.transformer.moe.moe_layer:MoELayer",
)
"""Classes whose modules are compiled with ``--compile``: calls, as ``module(...)``, run the compiled graph."""


def compile_modules() -> None:
    """Compile every module of :data:`COMPILED` that is made from now on."""
    import importlib

    for target in COMPILED:
        module, name = target.split(":")
        owner = getattr(importlib.import_module(module), name)
        owner.__init__ = _then_compile(owner.__init__, owner)


def _then_compile(init: Any, owner: type) -> Any:
    @functools.wraps(init)
    def init_and_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self) is owner:
            self.compile(backend="mindspeed")

    return init_and_compile


class Recorder:
    """Writes a line of JSON for each test: when it begins, and how each of its phases ended."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")
        device, types = table.device_words()
        self.words = device_words.Words(device, types, PACKAGE)

    def write(self, **record: Any) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.words.install()
        self.write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(test=nodeid, when="begin")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.write(test=report.nodeid, when=report.when, seconds=round(report.duration, 3), **_outcome(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.write(test=report.nodeid, when="collect", seconds=0.0, **_outcome(report))


def _outcome(report: Any) -> dict[str, Any]:
    """Of a phase: how it ended, the last line of the error and where it was raised."""
    if report.outcome == "passed":
        return {"outcome": "xpassed" if hasattr(report, "wasxfail") else "passed"}
    if report.outcome == "skipped":
        if hasattr(report, "wasxfail"):
            return {"outcome": "xfailed", "text": report.wasxfail}
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return {"outcome": "skipped", "text": text}
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)[-2000:]
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", [])
    places = [f"{e.reprfileloc.path}:{e.reprfileloc.lineno}" for e in entries if getattr(e, "reprfileloc", None)]
    return {"outcome": "failed", "text": text[:3000], "places": places[-12:]}
