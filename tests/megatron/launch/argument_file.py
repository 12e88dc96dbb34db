"""A file of arguments, Megatron's --yaml-cfg, in the place of a command line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

SET_LATER = "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype".split()
"""Words that Megatron turns into types where it checks a command line, and not where it reads a file."""


def write(rank: int) -> None:
    """Put the arguments of this process's command line into a file, and the file's name into their place."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    words = vars(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args())
    parallel = {f.name for f in dataclasses.fields(ModelParallelConfig)}
    file: dict[str, Any] = {"language_model": {}, "model_parallel": {}}
    for field in dataclasses.fields(TransformerConfig):
        default = None if field.default is dataclasses.MISSING else field.default
        given = words.pop(field.name, None)
        section = file["model_parallel" if field.name in parallel else "language_model"]
        section[field.name] = plain(default if given is None else given)
    file["language_model"]["activation_func"] = "swiglu"
    del file["language_model"]["account_for_embedding_in_pipeline_split"]
    file |= {name: plain(value) for name, value in words.items() if name not in SET_LATER}
    file |= {"account_for_embedding_in_pipeline_split": False, "skipped_train_samples": 0, "rank": rank}
    place = Path(tempfile.mkdtemp()) / "arguments.yaml"
    place.write_text(yaml.safe_dump(file))
    sys.argv[1:] = ["--yaml-cfg", str(place)]


def plain(value: Any) -> Any:
    """``value`` if a file can say it."""
    return value if type(value) in (bool, int, float, str, list) else None
