"""Kernels of one graph in one library: the same bits, fewer compilers, and alone where they cannot be joined."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import codecache
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import fresh_cache

from mindspeed_fx.compat import kernel_library
from mindspeed_fx.compat.kernel_library import AsyncCompile, Kernel, Library

INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"


def doubling(factor=2.0, before=""):
    return f"""{INCLUDE}
{before}
extern "C"  void  kernel(const float* x, float* out, const int64_t n)
{{
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * {factor}f;
}}
"""


ARGUMENTS = ["const float*", "float*", "const int64_t"]


def compiled(*sources):
    """What a generated module does with its kernels."""
    with fresh_cache():
        return loaded(*sources), (len(Library.cache), len(CppPythonBindingsCodeCache.cache))


def loaded(*sources):
    compiler = AsyncCompile()
    scope = {f"kernel_of_{n}": compiler.cpp_pybinding(ARGUMENTS, source) for n, source in enumerate(sources)}
    compiler.wait(scope)
    results = []
    for function in scope.values():
        x, out = torch.arange(4.0), torch.empty(4)
        function(x, out, 4)
        results.append(out.tolist())
    return results


def test_kernels_of_a_module_are_one_library():
    results, counts = compiled(doubling(2.0), doubling(3.0), doubling(4.0))
    assert results == [[0, 2, 4, 6], [0, 3, 6, 9], [0, 4, 8, 12]]
    assert counts == (1, 0)


def test_no_headers_are_prepared_for_a_library_that_is_written(monkeypatch):
    prepared, prepare = [], codecache._precompile_header
    monkeypatch.setattr(codecache, "_precompile_header", lambda *a, **k: prepared.append(a[0]) or prepare(*a, **k))
    with fresh_cache():
        for _ in range(2):
            assert loaded(doubling(2.0)) == [[0, 2, 4, 6]]
            Library.cache_clear()  # as a new process has it
    assert len(prepared) == 1


def test_what_defines_more_than_a_kernel_is_compiled_alone():
    results, counts = compiled(doubling(2.0), doubling(3.0, before="#define UNIT 1"))
    assert results == [[0, 2, 4, 6], [0, 3, 6, 9]]
    assert counts == (1, 1)


def test_what_does_not_compile_beside_others_is_compiled_alone(monkeypatch):
    monkeypatch.setattr(kernel_library, "joined", lambda kernels: f"{INCLUDE}\nno C++")
    results, counts = compiled(doubling(2.0), doubling(3.0))
    assert results == [[0, 2, 4, 6], [0, 3, 6, 9]]
    assert counts[1] == 2


def test_another_torchs_bindings_are_left_to_it(monkeypatch):
    monkeypatch.setattr(kernel_library, "_TABLE", "another table")
    assert not kernel_library.can_join()
    assert compiled(doubling(2.0)) == ([[0, 2, 4, 6]], (0, 1))


@pytest.mark.parametrize(
    "source,argtypes",
    [
        (doubling().replace(INCLUDE, ""), ARGUMENTS),
        (doubling().replace('extern "C"', "static"), ARGUMENTS),
        (doubling(before='extern "C"  void  kernel(int);'), ARGUMENTS),
        (doubling(), ["const float*", "float*", "std::string"]),
    ],
)
def test_kernels_of_other_forms_are_not_joined(source, argtypes):
    assert Kernel(tuple(argtypes), source).parts is None


def test_a_library_has_no_more_than_a_compiler_likes(monkeypatch):
    kernels = {f"k{n}": Kernel(tuple(ARGUMENTS), doubling(n)) for n in range(70)}
    assert [len(group) for group in kernel_library.grouped(list(kernels), kernels)] == [32, 32, 6]
    size = len(kernels["k0"].parts[1])
    monkeypatch.setattr(kernel_library, "MOST_CHARACTERS", 2 * size + 1)
    groups = kernel_library.grouped(list(kernels)[:5], kernels)
    assert [name for group in groups for name in group] == list(kernels)[:5]
    assert [len(group) for group in groups] == [2, 2, 1]


def step(backend, options=None):
    """Bits of a loss and a gradient, and how many libraries were compiled, of several kernels and of one."""
    torch._dynamo.reset()

    def loss(x, w):
        return (torch.softmax(x.sin() @ w, -1) * x.cumsum(0)).square().mean()

    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(32, 48, generator=generator), torch.randn(48, 48, generator=generator).requires_grad_()
    with fresh_cache():
        out = torch.compile(loss, backend=backend, options=options)(x, w)
        out.backward()
        return (out.item(), w.grad.tolist()), (len(Library.cache), len(CppPythonBindingsCodeCache.cache))


def test_generated_code_is_the_same_in_fewer_libraries(monkeypatch):
    bits, (several, alone) = step("mindspeed")
    assert several == 2 and alone == 0  # of forward and backward
    assert step("inductor")[1][0] == 0  # which is left as it is
    monkeypatch.setattr(kernel_library, "can_join", lambda: False)
    bits_alone, (several, alone) = step("mindspeed")
    assert several == 0 and alone > 2
    assert bits == bits_alone
