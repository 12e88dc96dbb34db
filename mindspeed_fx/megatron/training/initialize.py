"""Megatron's initialization without CUDA."""

from __future__ import annotations

import importlib.util
import os
import socket
from typing import Any, Callable

from mindspeed_fx.megatron import cuda_calls, patches

MODULE = "megatron.training.initialize"


def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
    """``initialize_megatron`` that does not ask for CUDA."""
    return patches.original(f"{MODULE}:initialize_megatron")(*args, **{**kwargs, "allow_no_cuda": True})


def _on_one_device(name: str) -> Callable:
    """A function of Megatron's that asks how many devices there are before it goes on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with cuda_calls.one_device():
            return patches.original(f"{MODULE}:{name}")(*args, **kwargs)

    return call


_initialize_distributed = _on_one_device("_initialize_distributed")


def initialize_distributed(*args: Any, **kwargs: Any) -> Any:
    """``_initialize_distributed``, which makes Megatron's groups where there are devices; a process that no launcher
    has started is a run of one rank, and where its ranks meet is its own affair."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(_free_port()))):
            os.environ.setdefault(name, value)
    return _initialize_distributed(*args, **kwargs)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


set_random_seed = _on_one_device("_set_random_seed")
"""``_set_random_seed``, which seeds the tracker where there are devices."""


def compile_helpers() -> None:
    """``compile_helpers`` where the extension of the datasets is not there yet: a wheel of Megatron-core brings it, and
    no makefile.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        patches.original("datasets.utils:compile_helpers")()
