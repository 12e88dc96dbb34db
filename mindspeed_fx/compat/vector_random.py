"""Part of :mod:`mindspeed_fx.compat`: Inductor's uniform numbers on the CPU, a vector at a time.

Inductor (2.11 to 2.13) writes loops of vectors, but asks for the numbers of a vector one by one: Philox is ten rounds
of two products for each, of which a dropout of attention weights asks for millions. Here the rounds of all lanes are
made together; the numbers are the same, bit for bit (tests/compat/test_vector_random.py). Source: Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"; ATen/core/PhiloxRNGEngine.h; ``normalized_rand_cpu`` of Inductor's
cpp_prefix.h. Measured by benchmarks/dropout.py.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator
from unittest import mock

import torch

_ROUNDS = """{{
    {wide} counter = {load}, second = {zero}, third = second, fourth = second;
    uint32_t key = {seed}, other = 0;
    for (int round = 0; round < 10; ++round) {{
        const {wide} first_product = {multiply}(counter, {set}(0xD2511F53u));
        const {wide} third_product = {multiply}(third, {set}(0xCD9E8D57u));
        counter = {xor}({xor}({shift}(third_product, 32), second), {set}(key));
        third = {xor}({xor}({shift}(first_product, 32), fourth), {set}(other));
        second = third_product;
        fourth = first_product;
        key += 0x9E3779B9u;
        other += 0xBB67AE85u;
    }}
    {store}
    offset_idx += {others};
}}"""
"""Words lie in the low halves of lanes of 64 bits: products read nothing else, so that what is in the high halves need
not be taken away."""

_AVX512 = {
    "wide": "__m512i",
    "load": "_mm512_loadu_si512(offset + offset_idx)",
    "zero": "_mm512_setzero_si512()",
    "multiply": "_mm512_mul_epu32",
    "set": "_mm512_set1_epi64",
    "xor": "_mm512_xor_si512",
    "shift": "_mm512_srli_epi64",
    "store": "_mm256_storeu_ps(result + offset_idx, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_and_si256("
    "_mm512_cvtepi64_epi32(counter), _mm256_set1_epi32(0x7FFFFFFF))), _mm256_set1_ps(4.6566127342e-10f)));",
}
_AVX2 = {
    "wide": "__m256i",
    "load": "_mm256_loadu_si256(reinterpret_cast<const __m256i*>(offset + offset_idx))",
    "zero": "_mm256_setzero_si256()",
    "multiply": "_mm256_mul_epu32",
    "set": "_mm256_set1_epi64x",
    "xor": "_mm256_xor_si256",
    "shift": "_mm256_srli_epi64",
    "store": "_mm_storeu_ps(result + offset_idx, _mm_mul_ps(_mm_cvtepi32_ps(_mm_and_si128(_mm256_castsi256_si128("
    "_mm256_permutevar8x32_epi32(counter, _mm256_setr_epi32(0, 2, 4, 6, 0, 0, 0, 0))), _mm_set1_epi32(0x7FFFFFFF))), "
    "_mm_set1_ps(4.6566127342e-10f)));",
}


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Meanwhile the C++ that Inductor writes computes the uniform numbers of a vector together where the processor has
    AVX2 or AVX-512; on others, and in loops without vectors, nothing changes."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    one_by_one = CppVecOverrides.rand

    def rand(seed: Any, offset: Any) -> Any:
        return one_by_one(seed, offset) if (code := _together(seed, offset)) is None else code

    with mock.patch.object(CppVecOverrides, "rand", staticmethod(rand)):
        yield


def _together(seed: Any, offset: Any) -> Any:
    """The C++ expression of a vector of uniform numbers, or None where there are no instructions for it."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codegen.common import BracesBuffer
    from torch._inductor.codegen.cpp_utils import codegen_rand

    isa = cpu_vec_isa.pick_vec_isa()
    if offset.dtype != torch.int64 or not isinstance(isa, (cpu_vec_isa.VecAVX512, cpu_vec_isa.VecAVX2)):
        return None
    lanes, instructions = (8, _AVX512) if isinstance(isa, cpu_vec_isa.VecAVX512) else (4, _AVX2)
    # Inductor's loop goes on by one lane; the offsets and the results of a vector lie in arrays.
    return codegen_rand(offset, BracesBuffer(), _ROUNDS.format(seed=seed, others=lanes - 1, **instructions))
