"""Inductor's graphs without its code: what its passes make of a graph runs operator by operator.

No C++ is compiled, so that as many programs are tried as without generated code, and what its patterns rewrite is
compared with eager: a pattern that ignored a factor was found so.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence
from unittest import mock

import torch
import torch.fx as fx


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """In here Inductor's passes run, and its graphs are interpreted."""
    import torch._inductor.compile_fx as compile_fx

    with mock.patch.object(compile_fx, "compile_fx_inner", _interpret):
        yield


def _interpret(gm: fx.GraphModule, example_inputs: Sequence[Any], is_inference: bool = False, **kwargs: Any) -> Any:
    from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop, view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(gm)
    with torch.no_grad():
        mode = fake_tensor_prop(gm, example_inputs)  # which tells its passes what is a view of an input
    with V.set_fake_mode(mode):
        _recursive_post_grad_passes(gm, is_inference=is_inference)
    gm.graph.lint()
    gm.recompile()

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        with torch.no_grad():
            return fx.Interpreter(gm).boxed_run(given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
