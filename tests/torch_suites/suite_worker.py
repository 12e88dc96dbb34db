"""Run the tests of one file of torch's own suite in this process, with its backends exchanged for ours or as they are.

Started by :mod:`tests.torch_suites.suite`; a line of JSON is written before and after every test, so that a test that
ends the process, or runs out of its time, is known and costs only itself.
"""

import argparse
import faulthandler
import functools
import importlib.util
import json
import multiprocessing
import os
import sys
import time
import traceback
import unittest
from pathlib import Path

import torch
from torch._dynamo import lookup_backend

BACKENDS = ("inductor", "aot_eager", "aot_eager_default_partitioner", "aot_eager_decomp_partition")
"""Names exchanged for ours."""

REACHED = multiprocessing.Value("i", 0)
"""How many graphs the test that runs has given to a backend, here or in processes that it forked."""

LEFT_OUT = ("TestEagerFusion", "TestAOTAutogradWithCache")
"""Beginnings of classes that test AOTAutograd itself: thousands of single operators, and its cache."""


def main():
    arguments = read_arguments()
    sys.path += [os.path.dirname(arguments.file), arguments.root]
    exchange(arguments.mode, arguments.codegen, arguments.everywhere)
    done, wanted = read_started(arguments.out), read_wanted(arguments.tests)
    with open(arguments.out, "a", buffering=1) as out:
        module = load(arguments.file, arguments.root)
        if arguments.mode != "original":
            exchange_methods(module, arguments.root)
        for test in tests_of(module):
            name = short_name(test)
            if name in done or wanted is not None and name not in wanted or name.startswith(LEFT_OUT):
                continue
            print(json.dumps({"test": name}), file=out)
            faulthandler.dump_traceback_later(arguments.limit, exit=True)
            print(json.dumps(run(test)), file=out)
            faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"finished": True}), file=out)
    os._exit(0)  # threads and processes that tests leave


def read_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--mode", default="original")
    parser.add_argument("--codegen", default="eager")
    parser.add_argument("--everywhere", action="store_true")
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--tests", help="a file with the names of the tests to run, one a line; all without")
    return parser.parse_args()


def read_started(path):
    if not os.path.exists(path):
        return set()
    with open(path) as lines:
        return {entry["test"] for entry in map(json.loads, lines) if "test" in entry}


def read_wanted(path):
    return Path(path).read_text().split() if path else None


def exchange(mode, codegen, everywhere):
    """Give torch's backends another meaning: ``mode`` "original" leaves them, a level puts ours in their place.

    With ``everywhere`` the backends that only record graphs ("eager", ``CompileCounter``) run what they recorded with
    aot_eager, or ours: many more programs reach a backend then.
    """
    from torch._dynamo import testing
    from torch._dynamo.backends import debugging, registry

    ours = None if mode == "original" else our_backend(int(mode), codegen)
    wrapper = torch._TorchCompileInductorWrapper
    wrapper.__call__ = note_reached(wrapper.__call__, ours and (lambda self, gm, inputs, **kwargs: ours(gm, inputs)))
    known = {name: note_reached(registry.lookup_backend(name), ours) for name in BACKENDS}
    debugging.aot_eager, debugging.aot_eager_decomp_partition = known["aot_eager"], known["aot_eager_decomp_partition"]
    if everywhere:
        registry.lookup_backend("eager")
        known["eager"] = debugging.eager = known["aot_eager"]
        for counter in (testing.CompileCounter, testing.EagerAndRecordGraphs):
            counter.__call__ = record_then(counter.__call__, known["aot_eager"])
    registry._COMPILER_FNS.update(known)


def exchange_methods(module, root):
    """``TestAOTAutogradWithDynamo`` gives its programs to AOTAutograd as a backend of its own: to ours instead. What it
    expects of the text of AOTAutograd's graphs is not asked of ours, nor how many kernels Inductor makes of an
    optimizer's step. Where a file, or one that it imports, calls ``compile_fx`` itself, ours is called."""
    if optimizers := getattr(module, "CompiledOptimizerTests", None):
        optimizers.check_kernel_count = False
    for other in [module, *(m for m in list(sys.modules.values()) if is_below(m, root))]:
        if "compile_fx" in vars(other):
            other.compile_fx = lookup_backend("inductor")
    tests = getattr(module, "TestAOTAutogradWithDynamo", None)
    if tests is None:
        return

    def run_autograd(self, program, graphs, *_):
        def compile_and_run(*args, **kwargs):
            torch._dynamo.reset()
            try:
                return torch.compile(program, backend=backend)(*args, **kwargs)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                raise error.inner_exception from error

        def backend(gm, inputs):
            graphs[0] = gm
            return lookup_backend("aot_eager")(gm, inputs)

        return compile_and_run

    tests.run_autograd, tests.assertExpectedInline = run_autograd, lambda *args, **kwargs: None


def is_below(module, root):
    return (getattr(module, "__file__", None) or "").startswith(root)


def note_reached(backend, exchanged):
    """``backend``, or what it is exchanged for; remembers that it was called."""
    run = exchanged or backend

    @functools.wraps(backend)
    def call(*args, **kwargs):
        with REACHED:
            REACHED.value += 1
        return run(*args, **kwargs)

    return call


def record_then(record, backend):
    def call(self, gm, inputs):
        record(self, gm, inputs)
        return backend(gm, inputs)

    return call


def our_backend(level, codegen):
    from mindspeed_fx.backend import mindspeed

    def backend(gm, inputs, **kwargs):
        return mindspeed(gm, inputs, options={"level": level, "codegen": codegen})

    return backend


def load(path, root):
    """The module at ``path``, under the dotted name it has below ``root``, so that its relative imports work."""
    name = os.path.splitext(os.path.relpath(path, root))[0].replace(os.sep, ".")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tests_of(module):
    suites = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    while suites:
        for item in suites.pop(0):
            if isinstance(item, unittest.TestSuite):
                suites.append(item)
            else:
                yield item


def short_name(test):
    return ".".join(test.id().split(".")[-2:])


def run(test):
    REACHED.value = 0
    began, result = time.time(), unittest.TestResult()
    try:
        unittest.TestSuite([test]).run(result)  # with what its class sets up
    except BaseException as error:  # a test that leaves the runner has failed
        result.errors.append((test, "".join(traceback.format_exception(error))))
    status, text = outcome(result)
    seconds = round(time.time() - began, 2)
    return {"test": short_name(test), "status": status, "text": text, "reached": REACHED.value, "seconds": seconds}


def outcome(result):
    for status, entries in (("error", result.errors), ("fail", result.failures)):
        if entries:
            return status, entries[0][1]
    if result.skipped:
        return "skip", str(result.skipped[0][1])
    return ("xfail" if result.expectedFailures else "xpass" if result.unexpectedSuccesses else "pass"), ""


if __name__ == "__main__":
    main()
