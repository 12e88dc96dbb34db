"""Every option a user can set: one documented, strict dataclass.

Options reach the backend from three places; a later one wins:
the defaults below, the environment (``MINDSPEED_FX_OPTIONS`` as JSON, ``MINDSPEED_FX_DUMP=DIR``), and
``torch.compile(model, backend="mindspeed", options={...})``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from typing import Any, Mapping

from mindspeed_fx.arguments import check_variables, json_object, parse_bytes
from mindspeed_fx.errors import OptionError, nearest

LEVELS = (0, 1, 2)


TARGETS = ("auto", "cpu", "cuda", "npu")


CODEGENS = ("auto", "inductor", "eager", "npugraph_ex")


CHECKS = ("off", "each", "prove")


OPTIMIZERS = ("backward",)


OPTIONS_VARIABLE, DUMP_VARIABLE = "MINDSPEED_FX_OPTIONS", "MINDSPEED_FX_DUMP"


@dataclass(frozen=True)
class Options:
    """What the user asked for; ``target`` and ``codegen`` may still be "auto" (see :meth:`resolve`)."""

    level: int = 2
    """0: capture, lowering, and what plans and options ask for. 1: also fusion. 2: also overlap and what else pays by
    itself.
    """

    enable: tuple[str, ...] = ()
    """Pass names or globs (``"fusion.*"``) to turn on whatever the level."""

    disable: tuple[str, ...] = ()
    """Pass names or globs to turn off; wins over ``enable`` and ``level``."""

    target: str = "auto"
    """Device whose kernels operators are lowered to; "auto": the device of the inputs."""

    hardware: str | None = None
    """Device of the cost model, for example "ascend910b2" or "h100" (see docs/cost.md); None: the one at hand, by its
    name.
    """

    memory_budget: float | int | str | None = None
    """Bytes ("24GiB", or a number from 1024 on) that one graph may hold at once in a training step, parameters and
    gradients included, optimizer states not; what does not fit is recomputed. "min": as few as can be. A fraction in
    (0, 1]: of the way from the least modelled peak to that of the plan without a budget. None: keep what pays."""

    recompute: str | Mapping[str, str] | None = None
    """Who decides what the backward recomputes: "none", "selective", "full", "block:N", "activation_function", "norm",
    several of the single operators' joined ("norm+activation_function") or "auto" (the planner; the default, but for a
    model whose plan names one). Or a mapping of module globs to "recompute", "save" or, with ``offload``, "offload" and
    "offload_input" (what enters the module), as in {"layers.*.mlp.act": "recompute"}, where the key "policy" may name
    who decides the rest; of several globs that match the last one counts. See docs/memory.md."""

    regather: bool = False
    """What a rank gathered from others for its products is gathered again in the backward, instead of kept whole, as
    Megatron's sequence parallelism does; its training loop sets it."""

    offload: bool = False
    """With a ``memory_budget``: saved activations may also wait in host memory, copied while the device computes,
    where the link hides that and recomputing them would take longer."""

    certify: bool = False
    """With a ``memory_budget``: prove how near the optimum the plan is, by minimum cuts and, for a small graph, by
    integer programs (HiGHS; needs scipy), which also improve the plan and take seconds to a minute. Larger graphs keep
    their plan, and the report says so."""

    host_memory: int | str | None = None
    """With ``offload``: bytes ("64GiB", or a number) of host memory that one graph may use at once; None: any
    number.
    """

    host_bandwidth: int | str | None = None
    """With ``offload``: bytes per second ("50GB", or a number) between device and host, in each direction; None: the
    hardware's.
    """

    overlap_memory: int | str = 0
    """Bytes ("512MiB", or a number) by which overlapped communication may raise the modelled peak memory of a graph."""

    data_parallel: str | None = None
    """Process group ("world", or a group's name) over whose ranks the backward graph averages the gradients of
    parameters as they become ready, as DistributedDataParallel does; each rank passes its own part of the batch. None:
    they stay as they are."""

    optimizer: str | None = None
    """"backward": parameters that :func:`mindspeed_fx.step_in_backward` was told of take their step of AdamW inside the
    backward graph, as their gradients become ready; no gradients are left. None: gradients are left to the optimizer.
    """

    count_flops: bool = False
    """Graphs count the FLOP of their matrix products each time that they run, see :class:`mindspeed_fx.FlopCount`."""

    codegen: str = "auto"
    """"inductor" generates code for what is not a fused operator, "eager" runs the graph as it is, "npugraph_ex" (npu)
    hands it to torch_npu's ACL graphs; "auto": inductor on cpu and cuda, eager on npu.
    """

    dump: str | None = None
    """Directory for per-pass before/after files, an index and an HTML report. Turns compile caches off."""

    check: str = "off"
    """"each" runs every pass's graph before and after on real values and compares; a graph whose tracing fails is an
    error, as under ``strict``. "prove" shows of every site that a pass rewrote that before and after are the same
    function, term by term, and compares values where that cannot be shown; one that is another is an error. Turns
    compile caches off."""

    strict: bool = False
    """A pass named in ``enable`` that rewrote nothing in a graph is an error that carries its reasons. Each graph of a
    model with graph breaks is judged by itself. A graph whose tracing fails for a reason that is not known is an error,
    where it would otherwise run as Dynamo made it, with the reason in the report."""

    npugraph_ex: Mapping[str, Any] = field(default_factory=dict)
    """Options of torch_npu's npugraph_ex for codegen "npugraph_ex", for example {"clone_input": False}."""

    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Extra ``torch._inductor.config`` entries for codegen "inductor", for example {"max_autotune": True}."""

    def __post_init__(self) -> None:
        _one_of("level", self.level, LEVELS)
        _one_of("target", self.target, TARGETS)
        _one_of("codegen", self.codegen, CODEGENS)
        _one_of("check", self.check, CHECKS)
        for name in ("enable", "disable"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
                raise OptionError(f'option "{name}" takes a list of pass names or globs, not {value!r}')
            object.__setattr__(self, name, tuple(value))
        for name in ("strict", "certify", "count_flops", "offload", "regather"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f'option "{name}" takes True or False, not {getattr(self, name)!r}')
        if self.dump is not None:
            if not isinstance(self.dump, (str, os.PathLike)) or not str(self.dump):
                raise OptionError(f'option "dump" takes a directory, not {self.dump!r}')
            object.__setattr__(self, "dump", os.fspath(self.dump))
        if self.hardware is not None:
            from mindspeed_fx.cost.hardware import hardware

            object.__setattr__(self, "hardware", hardware(self.hardware).name)
        object.__setattr__(self, "memory_budget", _budget(self.memory_budget))
        _check_recompute(self.recompute, self.memory_budget, self.offload)
        _check_offload(self)
        if self.certify and self.memory_budget is None:
            raise OptionError(
                'option "certify" is True, but there is no plan to certify: "memory_budget" is None; give one'
            )
        object.__setattr__(self, "overlap_memory", parse_bytes("overlap_memory", self.overlap_memory))
        if self.data_parallel is not None and not (isinstance(self.data_parallel, str) and self.data_parallel):
            raise OptionError(
                f'option "data_parallel" is {self.data_parallel!r}; valid: "world", or the name of a process group'
            )
        if self.optimizer is not None:
            _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _check_inductor(self.inductor)
        if not isinstance(self.npugraph_ex, Mapping):
            raise OptionError(f'option "npugraph_ex" takes a dict of npugraph_ex options, not {self.npugraph_ex!r}')
        if self.npugraph_ex and self.codegen != "npugraph_ex":
            raise OptionError(f'option "npugraph_ex" is for codegen "npugraph_ex"; codegen is "{self.codegen}"')

    @classmethod
    def parse(cls, arguments: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> "Options":
        """Options from the environment and from ``arguments``; ``arguments`` wins key by key.

        Raises:
            OptionError: unknown key (with the nearest valid one), bad value, or malformed JSON.
        """
        if arguments is not None and not isinstance(arguments, Mapping):
            raise OptionError(
                f'options is {arguments!r}; a mapping from names of options is expected, as in {{"level": 1}}'
            )
        environ = os.environ if environ is None else environ
        own, arguments = _from_environment(environ), _check_known(dict(arguments or {}), "options")
        try:
            return cls(**{**own, **arguments})
        except OptionError as error:
            named = re.match(r'option "(\w+)"', str(error))
            if named and named[1] in own and named[1] not in arguments:
                variable = DUMP_VARIABLE if named[1] == "dump" else OPTIONS_VARIABLE
                raise OptionError(f"{error} (by the environment's {variable})") from None
            raise

    def resolve(self, device: str) -> "Options":
        """The same options with "auto" replaced by what it means for inputs on ``device`` ("cpu", "cuda", "npu"), and
        the hardware at hand; that stays None where the device has no table."""
        from mindspeed_fx.cost.hardware import detect

        target = self.target if self.target != "auto" else device
        _one_of("target", target, TARGETS)
        codegen = self.codegen if self.codegen != "auto" else ("eager" if target == "npu" else "inductor")
        if codegen == "npugraph_ex" and target != "npu":
            raise OptionError(f'option "codegen" is "npugraph_ex", which runs on npu; the target is "{target}"')
        if codegen == "npugraph_ex" and self.offload:
            raise OptionError(
                'option "offload" is True, which needs streams of its own, and codegen "npugraph_ex" records one; '
                'valid with "offload": codegen "eager", "inductor"'
            )
        return dataclasses.replace(self, target=target, codegen=codegen, hardware=self.hardware or detect(target)[0])

    def with_plan(self, recompute: str | None) -> "Options":
        """The same options with a plan's ``recompute``, where neither that option nor a ``memory_budget`` was given."""
        arg = self.recompute is not None or self.memory_budget is not None
        return self if arg or recompute is None else dataclasses.replace(self, recompute=recompute)

    def deciding(self) -> str:
        """The options that decide what a graph becomes, as JSON: equal on ranks that compile alike, whatever they dump
        or check.
        """
        return json.dumps(
            {
                k: v
                for k, v in self.as_dict().items()
                if k not in ("dump", "check", "strict", "inductor", "npugraph_ex")
            },
            sort_keys=True,
            default=str,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def environment(arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that give a process the options it has from ``environ`` with ``arguments`` over them."""
    values = {**_from_environment(os.environ if environ is None else environ), **arguments}
    dump = values.pop("dump", None)
    return {OPTIONS_VARIABLE: json.dumps(values), DUMP_VARIABLE: os.fspath(dump) if dump else ""}


def _one_of(name: str, value: Any, valid: tuple) -> None:
    if type(value) is not type(valid[0]) or value not in valid:
        words = ", ".join(json.dumps(v) for v in valid)
        close = nearest(value, valid) if isinstance(value, str) and isinstance(valid[0], str) else ""
        raise OptionError(f'option "{name}" is {value!r}; valid: {words}{close}')


def _check_known(arguments: dict[str, Any], where: str) -> dict[str, Any]:
    valid = [f.name for f in dataclasses.fields(Options)]
    for key in arguments:
        if key not in valid:
            raise OptionError(f'unknown option "{key}" in {where}{nearest(str(key), valid)}; valid: {", ".join(valid)}')
    return arguments


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    check_variables(environ)
    values: dict[str, Any] = {}
    text = environ.get(OPTIONS_VARIABLE, "").strip()
    if text:
        values = _check_known(json_object(OPTIONS_VARIABLE, text), OPTIONS_VARIABLE)
    if environ.get(DUMP_VARIABLE):
        values["dump"] = environ[DUMP_VARIABLE]
    return values


def _budget(value: Any) -> float | int | str | None:
    """A fraction as a float, bytes as an int, "min" or None."""
    if value is None or value == "min":
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    if _is_size(value) and (size := parse_bytes("memory_budget", value)):
        return size
    raise OptionError(f'option "memory_budget" is {value!r}; valid: bytes as in "24GiB", a fraction in (0, 1], "min"')


def _is_size(value: Any) -> bool:
    """Whether a value can be read as bytes, few or many."""
    try:
        parse_bytes("", value, 0)
    except OptionError:
        return False
    return True


def _check_offload(options: Options) -> None:
    if options.offload and options.memory_budget is None:
        raise OptionError(
            'option "offload" is True, but what is moved to host memory is planned for a "memory_budget", which is '
            "None; give one"
        )
    for name in ("host_memory", "host_bandwidth"):
        value = getattr(options, name)
        if value is not None and not options.offload:
            raise OptionError(
                f'option "{name}" is {value!r}, but "offload" is False, so that nothing goes to host memory'
            )
        if value is not None:
            object.__setattr__(options, name, parse_bytes(name, value))
    if options.host_bandwidth == 0:
        raise OptionError('option "host_bandwidth" is 0; valid: bytes per second, above 0')


WISHES = ("recompute", "save", "offload", "offload_input")


POLICIES = ("none", "selective", "full", "block:N", "activation_function", "norm", "auto")


JOINABLE = ("selective", "activation_function", "norm")
"""Policies of which several may be joined by "+"."""


def is_policy(word: Any) -> bool:
    """Whether ``word`` names a recompute policy, or several joined by "+"."""
    if not isinstance(word, str):
        return False
    parts = word.split("+")
    if len(parts) > 1:
        return len(set(parts)) == len(parts) and all(p in JOINABLE for p in parts)
    return word in POLICIES and word != "block:N" or re.fullmatch(r"block:[1-9]\d*", word) is not None


def _check_recompute(value: Any, budget: Any, offload: Any) -> None:
    wishes = {"policy": value} if isinstance(value, str) or value is None else value
    valid = f"valid: {', '.join(POLICIES)}, or a mapping of module globs to {', '.join(WISHES)}"
    if not isinstance(wishes, Mapping):
        raise OptionError(f'option "recompute" is {value!r}; {valid}')
    for glob, wish in wishes.items():
        if not isinstance(glob, str) or not glob:
            raise OptionError(f'option "recompute" has the key {glob!r}; {valid}')
        if glob == "policy":
            if not (wish is None and value is None or is_policy(wish)):
                raise OptionError(f'option "recompute" has the policy {wish!r}{nearest(str(wish), POLICIES)}; {valid}')
            if wish not in (None, "auto") and budget is not None and not set(str(wish).split("+")) <= set(JOINABLE):
                raise OptionError(
                    f'option "recompute" has the policy "{wish}", which fixes what is saved, and option '
                    f'"memory_budget" is {budget!r}, which plans it; give one of them, or the policy "auto", or '
                    f"{', '.join(JOINABLE)}, beside which the rest is planned"
                )
        elif wish not in WISHES:
            raise OptionError(
                f'option "recompute" maps "{glob}" to {wish!r}{nearest(str(wish), WISHES)}; valid: '
                + ", ".join(f'"{word}"' for word in WISHES)
            )
        elif wish in ("offload", "offload_input") and offload is not True:
            raise OptionError(
                f'option "recompute" maps "{glob}" to "{wish}", but option "offload" is {offload!r}, so that nothing '
                'goes to host memory; valid with it: "offload": True and a "memory_budget" (1.0 makes nothing else fit)'
            )


def _check_inductor(value: Any) -> None:
    if not isinstance(value, Mapping):
        raise OptionError(f'option "inductor" takes a dict of torch._inductor.config entries, not {value!r}')
    if value:
        from mindspeed_fx.compat import inductor as inductor_compat

        valid = inductor_compat.inductor_config()
        for key in value:
            if key not in valid:
                raise OptionError(f'option "inductor" has an unknown entry "{key}"{nearest(str(key), valid)}')
            kind = next((k for k in _KINDS if isinstance(valid[key], k)), None)
            if kind and value[key] is not None and not _is_kind(value[key], kind):
                raise OptionError(f'option "inductor" has {key} = {value[key]!r}; it takes {_KINDS[kind]}')


_KINDS: dict[Any, str] = {bool: "True or False", (int, float): "a number", str: "a text"}
"""Types of entries whose default shows them -> what they take."""


def _is_kind(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
