"""The C++ kernels where the compiler is missing, old, broken or named elsewhere, and where two processes build them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
import pathlib
import resource
import stat
import textwrap
import time

import pytest
import torch

from mindspeed_fx.compat import cpp, inductor_cache
from mindspeed_fx.kernels import REGISTRY  # noqa: F401  registers the operators
from tests.surroundings.processes import fork, wait_for

served = pytest.mark.skipif(cpp._processor_problem() is not None, reason=str(cpp._processor_problem()))
ops = torch.ops.mindspeed


@pytest.fixture
def anew(monkeypatch):
    """Nothing is built yet in this process, and warnings are collected."""
    told = []
    monkeypatch.setattr(cpp.log, "warning", lambda text, *args: told.append(text % args))
    cpp.forget()
    yield told
    cpp.forget()


@pytest.fixture
def set_compiler():
    """``set_compiler(name)``: what Inductor's settings say from now on."""
    import torch._inductor.config as config

    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(config.patch({"cpp.cxx": (None, name)}))


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The kernels, built once."""
    cpp.forget()
    cpp.start()
    assert cpp.function("weight_gradient") is not None
    path = tmp_path_factory.mktemp("library") / "kernels.so"
    path.write_bytes(pathlib.Path(cpp._built_library()._name).read_bytes())
    return path


def quick_compiler(folder, library, name, before=""):
    """A compiler that has built the kernels already; ``before`` runs at each of its builds."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    text = f"""
    case "$*" in *kernels.cpp*) {before} ;; *) exec {get_cpp_compiler()} "$@" ;; esac
    while [ "$1" != "-o" ]; do shift; done
    cp {library} "$2"
    """
    return script(folder, name, textwrap.dedent(text))


def script(folder, name, text):
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def cache(library, anew, set_compiler, tmp_path, monkeypatch):
    """An empty cache, whose folder of libraries it is, and a quick compiler."""
    set_compiler(quick_compiler(tmp_path, library, "g++"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mindspeed_fx"


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend():
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    out = attention(q, k, v)
    return out, torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v)


def check_a_model():
    """A compiled model that attends has eager's values whatever runs."""
    out, grads, inputs = attend()
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="mindspeed", options={"codegen": "eager"})
    result = compiled(*inputs)
    torch.testing.assert_close(result, out, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(result.sum(), inputs), grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def check_in_a_fork():
    """Exit status of a fork that attends, and has eager's values forward and backward. It runs nothing of autograd,
    which torch's builds for CUDA refuse in a fork of a process that ran a backward."""
    out, grads, inputs = attend()
    q, k, v = (x.detach() for x in inputs)

    def check():
        assert cpp.function("weight_gradient") is not None
        torch._dynamo.reset()
        compiled = torch.compile(attention, backend="mindspeed", options={"codegen": "eager"})
        result, lse = ops.attention_flash(q, k, v, True, q.shape[-1] ** -0.5)
        gradients = ops.attention_flash_backward(torch.ones_like(out), q, k, v, result, lse, True, q.shape[-1] ** -0.5)
        for a, b in zip((compiled(q, k, v), result, *gradients), (out, out, *grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    return wait_for(fork(check))


@served
def test_without_a_compiler_it_says_so_and_slower_kernels_run(anew, set_compiler):
    set_compiler("/nowhere/g++")
    assert cpp.problem().startswith("no C++ compiler: ")
    check_a_model()
    assert cpp._builds == {}


@served
def test_a_compiler_that_cannot_be_run_is_none(anew, set_compiler, tmp_path):
    set_compiler(str(tmp_path))
    assert cpp.problem().startswith("no C++ compiler: ")
    check_a_model()


@served
def test_an_old_compiler_is_told_once_and_slower_kernels_run(cache, anew, set_compiler, tmp_path):
    text = 'case "$*" in *--version*) echo 4.4.7; exit ;; esac; echo "error: unrecognized -std" >&2; exit 1\n'
    set_compiler(script(tmp_path, "old-g++", text))
    assert cpp.problem() is None
    check_a_model()
    check_a_model()
    assert len(anew) == 1 and "unrecognized -std" in anew[0] and "slower ones run instead" in anew[0]
    assert not list(cache.glob("*.so"))


@served
def test_the_compiler_that_inductor_is_told_of_builds(cache, anew, library, set_compiler, monkeypatch, tmp_path):
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", "/nowhere/g++")
    set_compiler(quick_compiler(tmp_path, library, "my-g++", f"echo built >> {log}"))
    check_a_model()
    assert cpp.function("attention_forward") is not None
    assert log.read_text() == "built\n" and len(list(cache.glob("*.so"))) == 1 and not anew
    # What is loaded serves from now on, whatever is the setting later.
    set_compiler("/nowhere/g++")
    assert cpp.problem() is None
    check_a_model()


@served
def test_a_compiler_that_comes_later_is_taken(cache, anew, monkeypatch):
    import torch._inductor.config as config

    with config.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        assert cpp.problem() is not None
    assert cpp.problem() is None
    cpp.start()
    assert cpp.function("attention_forward") is not None


@served
@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "one byte", "no library"])
def test_a_library_that_is_not_whole_is_built_anew(cache, anew, damage):
    cpp.start()
    assert cpp.function("weight_gradient") is not None
    (path,) = cache.glob("*.so")
    data = path.read_bytes()
    cpp.forget()
    path.unlink()  # this process has it open: another file in its place
    path.write_bytes(
        {
            "empty": b"",
            "half": data[: len(data) // 2],
            "garbage": os.urandom(len(data)),
            "one byte": data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
            "no library": b"#!/bin/sh\n",
        }[damage]
    )
    check_a_model()
    assert cpp.function("weight_gradient") is not None and not anew
    (again,) = cache.glob("*.so")
    assert cpp.hashlib.sha256(again.read_bytes()).hexdigest() in again.name


@served
def test_a_second_process_loads_what_the_first_built(cache, anew, monkeypatch):
    cpp.start()
    assert cpp.function("weight_gradient") is not None
    (path,) = cache.glob("*.so")
    before = path.stat().st_mtime_ns
    cpp.forget()
    monkeypatch.setattr(cpp, "_store", lambda *args: pytest.fail("built again"))
    cpp.start()
    assert cpp.function("weight_gradient") is not None
    assert path.stat().st_mtime_ns == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o700 and stat.S_IMODE(cache.stat().st_mode) == 0o700


@served
def test_two_processes_at_once_build_one_library(cache, anew, library, set_compiler, tmp_path):
    log = tmp_path / "log"
    set_compiler(quick_compiler(tmp_path, library, "slow-g++", f"echo built >> {log}; sleep 1"))

    def check():
        cpp.start()
        assert cpp.function("weight_gradient") is not None

    assert wait_for(*(fork(check) for _ in range(3))) == [0, 0, 0]
    assert log.read_text() == "built\n" and len(list(cache.glob("*.so"))) == 1


@served
def test_a_process_that_holds_the_lock_for_ever_stops_nobody(cache, anew, monkeypatch):
    import fcntl

    cpp.start()
    assert cpp.function("weight_gradient") is not None
    cpp.forget()
    (lock,) = cache.glob("*.lock")
    monkeypatch.setattr(cpp, "PATIENCE", 0.2)
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = time.monotonic()
        cpp.start()
        assert cpp.function("weight_gradient") is not None
        assert time.monotonic() - start < 60


@served
def test_a_cache_without_room_costs_the_cache_alone(cache, anew, monkeypatch):
    """Writing there fails as on a full disk."""
    mkstemp = cpp.tempfile.mkstemp

    def full(dir=None, prefix=None):
        if pathlib.Path(dir) == cache:
            raise OSError(28, "No space left on device")
        return mkstemp(dir=dir, prefix=prefix)

    monkeypatch.setattr(cpp.tempfile, "mkstemp", full)
    check_a_model()
    assert cpp.function("attention_forward") is not None and not list(cache.glob("*.so")) and not anew


@served
def test_no_room_anywhere_is_told_and_slower_kernels_run(cache, anew, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpp.tempfile, "TemporaryDirectory", full)
    check_a_model()
    assert len(anew) == 1 and "No space left on device" in anew[0]


def memory_limit(extra):
    """This process may have ``extra`` bytes more than it has."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, resource.RLIM_INFINITY))


@served
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_without_memory_is_an_error_and_the_next_call_runs(backward, dtype):
    """Work buffers were asked for in a parallel region, where an exception ends the process. They are larger than what
    malloc keeps for later (32 MiB), so that no memory that an earlier test freed serves them.
    """
    q, k, v, grad = (torch.randn(1, 1, 2, 2**19).to(dtype) for _ in range(4))
    out, lse = ops.attention_flash(q, k, v, False, 0.1)

    def run():
        if backward:
            return ops.attention_flash_backward(grad, q, k, v, out, lse, False, 0.1)
        return ops.attention_flash(q, k, v, False, 0.1)

    def check():
        expected = run()
        memory_limit(2**24)
        with pytest.raises(RuntimeError, match="out of memory: the kernel attention_|can't allocate memory"):
            run()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for a, b in zip(run(), expected, strict=True):
            assert torch.equal(a, b)

    assert wait_for(fork(check)) == [0]


@served
def test_a_fork_while_kernels_are_built_builds_its_own(anew):
    """The thread that builds is its parent's alone: the fork waited for ever."""
    never = concurrent.futures.Future()
    cpp._builds[cpp._compiler()[0]] = never

    assert check_in_a_fork() == [0]
    assert list(cpp._builds.values()) == [never]  # the parent still waits for its own


@served
def test_a_fork_after_kernels_were_built_runs_them(anew):
    cpp.start()
    assert isinstance(cpp.function("weight_gradient"), ctypes._CFuncPtr)
    assert check_in_a_fork() == [0]


def test_a_cache_that_others_may_write_into_is_not_used(anew, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
    with pytest.warns(UserWarning, match="anybody may write into .*shared.*TORCHINDUCTOR_CACHE_DIR"):
        inductor_cache.leave_untrusted_cache()
    own = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert own != shared and stat.S_IMODE(own.stat().st_mode) == 0o700
    assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700 and not list(shared.iterdir())


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="root alone may give folders away")
def test_the_default_cache_of_another_user_is_not_used(anew, tmp_path, monkeypatch):
    """Its name can be foretold, and anybody may make a folder in /tmp."""
    from torch._inductor.runtime import cache_dir_utils

    theirs = tmp_path / "torchinductor_me"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, 12345, 12345)
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: str(theirs))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))  # as torch itself sets it at the first call
    with pytest.warns(UserWarning, match="belongs to another user .12345"):
        inductor_cache.leave_untrusted_cache()
    assert not list(theirs.iterdir())
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: str(tmp_path / "mine"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))  # a user that names it trusts it
    inductor_cache.leave_untrusted_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(theirs)


def test_a_cache_that_cannot_be_written_is_left(anew, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="cannot be written"):
        inductor_cache.leave_untrusted_cache()
    assert os.access(os.environ["TORCHINDUCTOR_CACHE_DIR"], os.W_OK)
    before = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    inductor_cache.leave_untrusted_cache()  # told once
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == before
