"""A sharding plan: plain data that a person can read, edit, save, load and compare.

In YAML (or JSON) a plan for Megatron's tensor parallelism of one layer is::

    name: tp
    mesh: [tp]
    parameters:
      layers.*.q_proj.weight: {tp: S(0)}
      layers.*.o_proj.weight: {tp: S(1)}
    modules:
      layers.*.q_proj: {input: {tp: R}}
      layers.*.o_proj: {output: {tp: R}}

Placements are words: ``R`` the whole on every rank, ``S(d)`` divided along dimension d; ``S(d:8+4+4)``, of parameters,
each of the pieces that dimension d consists of, of so many elements. Patterns are shell globs over
the names of ``named_parameters`` and ``named_modules``; what no pattern names stays whole.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Iterable, Mapping

from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.options import POLICIES, is_policy
from mindspeed_fx.sharding import plan_file
from mindspeed_fx.sharding.patterns import matching

Placed = Mapping[str, str]
"""Mesh dimension -> placement."""

GATHERS = ("never", "zero1", "zero2", "zero3")
DISPATCH = ("all_gather", "all_to_all")
EXPERTS = ("dispatch", "capacity", "parameters")


class ShardingError(OptionError):
    """A plan that is wrong in itself or does not fit the model, the mesh or the sizes; says where and what would be
    right.
    """


@dataclass(frozen=True)
class Boundary:
    """What crosses the edge of a module or an operator."""

    input: Placed = field(default_factory=dict)
    """Of every activation that enters; parameters are not activations."""
    output: Placed = field(default_factory=dict)
    """Of every result that is used outside."""
    arguments: Mapping[str, Placed] = field(default_factory=dict)
    """Operators only: by the argument's name in the schema, instead of ``input``."""


@dataclass(frozen=True)
class Plan:
    """Placements for a model on a mesh; adding two plans for different mesh dimensions combines them."""

    name: str
    mesh: tuple[str, ...]
    """Mesh dimensions that the plan speaks of, outermost first."""
    parameters: Mapping[str, Placed] = field(default_factory=dict)
    """Parameter glob -> placement at rest: what a rank stores, and what its optimizer updates."""
    inputs: Mapping[str, Placed] = field(default_factory=dict)
    """Glob over the names of the model's arguments -> placement; callers pass the whole, each rank takes its part."""
    modules: Mapping[str, Boundary] = field(default_factory=dict)
    """Module glob -> placements at its edge."""
    operators: Mapping[str, Boundary] = field(default_factory=dict)
    """Operator glob ("mindspeed.attention") -> placements at its edge; "a|b" names alternatives, also of arguments. A
    module glob in front ("layers.*.attn/mindspeed.attention") means the calls of those modules alone, and is heard over
    what is said without one."""
    gather: Mapping[str, str] = field(default_factory=dict)
    """Mesh dimension -> when parameters divided over it are made whole: "never" (the part computes, as in tensor
    parallelism), or before use: "zero1" (gradients summed whole), "zero2" (gradients summed in parts), "zero3" (as
    zero2, and the whole is not kept for the backward but gathered again)."""
    rings: Mapping[str, int] = field(default_factory=dict)
    """Mesh dimension of a ring -> how many neighbours make an inner ring (MindSpeed's cp-window-size); without it there
    is one ring.
    """
    experts: Mapping[str, Any] = field(default_factory=dict)
    """How the tokens of mixtures come to experts that are divided: ``dispatch`` is "all_gather" (the default: every
    rank gets all tokens) or "all_to_all" (each token is sent, :mod:`mindspeed_fx.sharding.spmd.token_dispatch`);
    ``capacity``, a number from 1 on, fixes how many may go to one rank: so many times the mean; ``parameters``, globs,
    names those of experts: what divides their first dimension computes in parts, also over a mesh dimension over which
    ``gather`` makes others whole."""
    recompute: str | None = None
    """What the backward recomputes, by a word of the option ``recompute`` ("full", "norm+activation_function"),
    collectives of the forward included; the backend does so unless that option or ``memory_budget`` is given. None: the
    backend's choice."""
    keep_whole: bool = False
    """Whether what the ranks cannot share evenly (a dimension, heads, a sequence of odd length) stays whole, is named
    in the log and in the report of ``sharding.verify``, and the rest of the plan runs; else it is an error. Named plans
    have it unless they are made with ``strict``."""
    microbatches: int | None = None
    """Parts of the batch that a step is taken over, by :func:`mindspeed_fx.accumulate` or the schedule of a pipeline.
    None: not said.
    """
    schedule: str | None = None
    """Of a pipeline: a schedule of torch.distributed.pipelining, and stages on a rank, as in "Interleaved1F1B:2"; where
    the layers of each stage are not as equal as can be, these too, as in "1F1B:1:5+3"."""

    def __post_init__(self) -> None:
        self._check_kinds()
        object.__setattr__(self, "mesh", tuple(self.mesh))
        self._whole_model()
        if not isinstance(self.keep_whole, bool):
            raise ShardingError(f'plan "{self.name}": keep_whole is {self.keep_whole!r}; valid: True, False')
        for key, stage in self.gather.items():
            if stage not in GATHERS:
                raise ShardingError(
                    f'plan "{self.name}": gather of "{key}" is {stage!r}; valid: '
                    f"{', '.join(GATHERS)}{nearest(str(stage), GATHERS)}"
                )
        self._experts()
        for key, ranks in self.rings.items():
            if key not in self.mesh:
                raise ShardingError(
                    f'plan "{self.name}", rings: no mesh dimension "{key}"{nearest(key, self.mesh)}; the plan has '
                    f"{', '.join(self.mesh)}"
                )
            if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
                raise ShardingError(
                    f'plan "{self.name}", rings: "{key}" is {ranks!r}; a number of ranks from 1 on is expected'
                )
        for where, placed in self._placed():
            for dim, word in placed.items():
                if dim not in self.mesh:
                    raise ShardingError(
                        f'plan "{self.name}", {where}: no mesh dimension "{dim}"{nearest(dim, self.mesh)}; the plan '
                        f"has {', '.join(self.mesh)}"
                    )
                parse_placement(word, f'plan "{self.name}", {where}')
                if ":" in word and not where.startswith("parameters"):
                    raise ShardingError(f'plan "{self.name}", {where}: {word} is for parameters; valid: R, S(d)')
        for dim in self.gather:
            if dim not in self.mesh:
                raise ShardingError(
                    f'plan "{self.name}", gather: no mesh dimension "{dim}"{nearest(dim, self.mesh)}; the plan has '
                    f"{', '.join(self.mesh)}"
                )

    def _check_kinds(self) -> None:
        """What each part is made of, before it is read."""
        if not isinstance(self.name, str) or not self.name:
            raise ShardingError(f"a plan's name is {self.name!r}; a text is expected")
        where = f'plan "{self.name}"'
        names = self.mesh if isinstance(self.mesh, (list, tuple)) else [None]
        if not all(isinstance(d, str) and d for d in names):
            raise ShardingError(f'{where}: mesh is {self.mesh!r}; names of dimensions are expected, as in ("dp", "tp")')
        if len(set(names)) < len(names):
            raise ShardingError(f"{where}: mesh is {self.mesh!r}, which has a name twice; each once is expected")
        for section in ("parameters", "inputs", "modules", "operators", "gather", "rings", "experts"):
            value = getattr(self, section)
            if not isinstance(value, Mapping):
                raise ShardingError(f"{where}: {section} is {value!r}; a mapping is expected")
            if wrong := [key for key in value if not isinstance(key, str) or not key]:
                raise ShardingError(f'{where}: {section} has the key "{wrong[0]}"; a name or a glob is expected')
        for section in ("modules", "operators"):
            for pattern, edge in getattr(self, section).items():
                if not (isinstance(edge, Boundary) and isinstance(edge.arguments, Mapping)):
                    raise ShardingError(f'{where}, {section} "{pattern}": {edge!r}; a Boundary is expected')
                if edge.arguments and section == "modules":
                    raise ShardingError(f'{where}, modules "{pattern}": arguments are for operators; give input')
        for place, placed in self._placed():
            if not isinstance(placed, Mapping):
                raise ShardingError(f'{where}, {place}: {placed!r}; a mapping is expected, as in {{"tp": "S(0)"}}')

    def _whole_model(self) -> None:
        word, count = self.recompute, self.microbatches
        if word is not None and (word == "auto" or not is_policy(word)):
            valid = [p for p in POLICIES if p != "auto"]
            joined = 'several of the last joined by "+"'
            raise ShardingError(
                f'plan "{self.name}": recompute is {word!r}{nearest(str(word), valid)}; valid: {", ".join(valid)}, '
                f"{joined}"
            )
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ShardingError(f'plan "{self.name}": microbatches is {count!r}; a whole number from 1 on is expected')

    def _experts(self) -> None:
        where = f'plan "{self.name}", experts'
        for key in self.experts:
            if key not in EXPERTS:
                raise ShardingError(
                    f'{where}: unknown key "{key}"{nearest(str(key), EXPERTS)}; valid: {", ".join(EXPERTS)}'
                )
        globs = self.experts.get("parameters", ())
        if not isinstance(globs, (list, tuple)) or not all(isinstance(p, str) for p in globs):
            raise ShardingError(
                f"{where}: parameters is {globs!r}; a list of globs over names of parameters is expected"
            )
        word, capacity = self.experts.get("dispatch", DISPATCH[0]), self.experts.get("capacity")
        if word not in DISPATCH:
            raise ShardingError(
                f"{where}: dispatch is {word!r}{nearest(str(word), DISPATCH)}; valid: {', '.join(DISPATCH)}"
            )
        if capacity is not None and (
            isinstance(capacity, bool)
            or not isinstance(capacity, (int, float))
            or not 1 <= capacity < math.inf
            or word != "all_to_all"
        ):
            raise ShardingError(
                f"{where}: capacity is {capacity!r}; a number from 1 on is expected, with dispatch: all_to_all"
            )

    is_of_stage: ClassVar[bool] = False
    """Whether it is the plan of a pipeline's stage, whose graph is a part of the model."""

    @property
    def uses_all_to_all(self) -> bool:
        """Whether tokens are sent to experts instead of gathered for them."""
        return self.experts.get("dispatch") == "all_to_all"

    def _placed(self) -> Iterable[tuple[str, Placed]]:
        for section in ("parameters", "inputs"):
            yield from ((f'{section} "{pattern}"', placed) for pattern, placed in getattr(self, section).items())
        for section in ("modules", "operators"):
            for pattern, edge in getattr(self, section).items():
                yield from ((f'{section} "{pattern}", {part}', getattr(edge, part)) for part in ("input", "output"))
                yield from (
                    (f'{section} "{pattern}", argument "{name}"', placed) for name, placed in edge.arguments.items()
                )

    def __add__(self, other: "Plan") -> "Plan":
        """Both plans at once, on the mesh of both; ``self``'s dimensions are the outer ones."""
        if not isinstance(other, Plan):
            raise ShardingError(
                f'plan "{self.name}" + {other!r}: a Plan is expected; named_plan(name, model) makes one'
            )
        if shared := set(self.mesh) & set(other.mesh):
            raise ShardingError(
                f'plans "{self.name}" and "{other.name}" both use mesh dimension {", ".join(sorted(shared))}'
            )
        return self.combine(other)

    def combine(self, other: "Plan") -> "Plan":
        """As the sum, for a plan that was made for ``other`` and speaks of its dimensions too."""
        merged: dict[str, Any] = {
            s: _merge(getattr(self, s), getattr(other, s)) for s in ("parameters", "inputs", "modules", "operators")
        }
        own = tuple(d for d in self.mesh if d not in other.mesh)
        merged |= {s: {**getattr(self, s), **getattr(other, s)} for s in ("gather", "rings", "experts")}
        for s in ("recompute", "microbatches", "schedule"):
            said = {getattr(p, s) for p in (self, other)} - {None}
            if len(said) > 1:
                raise ShardingError(
                    f'plans "{self.name}" and "{other.name}": {s} is {getattr(self, s)!r} and {getattr(other, s)!r}'
                )
            merged[s] = said.pop() if said else None
        merged["keep_whole"] = self.keep_whole and other.keep_whole
        return Plan(f"{self.name}+{other.name}", own + other.mesh, **merged)

    # ---------------------------------------------------------------- words in, words out

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML and JSON; empty parts are left out."""
        return {k: v for k, v in _plain(self).items() if v}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        """The plan that :meth:`as_dict` describes.

        Raises:
            ShardingError: unknown or missing key, with the nearest valid one; a bad placement.
        """
        _keys(values, Plan, "plan")
        for key in ("name", "mesh"):
            if key not in values:
                raise ShardingError(f'a plan needs "{key}"')
        results = dict(values)
        for section in ("modules", "operators"):
            if not isinstance(results.get(section, {}), Mapping):
                raise ShardingError(f"plan: {section} is {results[section]!r}; a mapping is expected")
            for pattern, edge in results.get(section, {}).items():
                _keys(edge, Boundary, f'{section} "{pattern}"')
            results[section] = {p: Boundary(**edge) for p, edge in results.get(section, {}).items()}
        return cls(**results)

    def save(self, path: str) -> None:
        """Write the plan to ``path``: JSON for a name that ends so, else YAML."""
        text = self.text(json_format=str(path).endswith(".json"))
        with open(path, "w") as file:
            file.write(text)

    @classmethod
    def load(cls, path: str) -> "Plan":
        """Read a plan that :meth:`save`, or a person, wrote.

        Raises:
            FileNotFoundError, IsADirectoryError: there is no file.
            ShardingError: it is torn, has a name twice, or says what no plan can; the message names the file.
        """
        try:
            values = plan_file.read(path)
        except OptionError as e:
            raise ShardingError(str(e)) from None
        try:
            return cls.from_dict(values)
        except ShardingError as e:
            raise ShardingError(f"{path}: {e}") from None

    def text(self, json_format: bool = False) -> str:
        """The plan as YAML, or as JSON."""
        if json_format:
            return json.dumps(self.as_dict(), indent=1) + "\n"
        return plan_file.write_yaml(self.as_dict())

    def diff(self, other: "Plan") -> str:
        """What changes from this plan to ``other``, as a unified diff of their text; "" for equal plans."""
        if not isinstance(other, Plan):
            raise ShardingError(f"diff: other is {other!r}; a Plan is expected; named_plan(name, model) makes one")
        before, after = (json.dumps(p.as_dict(), indent=1, sort_keys=True).splitlines() for p in (self, other))
        return "\n".join(difflib.unified_diff(before, after, self.name, other.name, lineterm="", n=2))


def parse_placement(word: Any, where: str) -> int | None:
    """The dimension of "S(d)" or "S(d:8+4+4)", or None for "R".

    Raises:
        ShardingError: anything else.
    """
    result = re.fullmatch(r"S\((-?\d+)(:[1-9]\d*(\+[1-9]\d*)+)?\)|R", word) if isinstance(word, str) else None
    if not result:
        valid = "R (whole), S(d) (divided along dimension d), S(d:8+4+4) (each of its pieces of so many elements)"
        raise ShardingError(f"{where}: placement {word!r}; valid: {valid}")
    return int(result.group(1)) if result.group(1) else None


def placement_of(section: Mapping[str, Placed], name: str, what: str) -> dict[str, str]:
    """Everything that the patterns of ``section`` say of ``name``; one with more letters is heard before one with fewer
    ("mask" before "*").

    Raises:
        ShardingError: two patterns of as many letters say different things.
    """
    results: dict[str, tuple[str, str]] = {}
    for pattern in sorted(matching(section, name), key=_letters, reverse=True):
        for dim, word in section[pattern].items():
            if dim in results and results[dim][0] != word and _letters(results[dim][1]) == _letters(pattern):
                raise ShardingError(
                    f'{what} "{name}" is {results[dim][0]} on "{dim}" by "{results[dim][1]}" and {word} by "{pattern}"'
                )
            results.setdefault(dim, (word, pattern))
    return {dim: word for dim, (word, _) in results.items()}


def _letters(pattern: str) -> int:
    return len(pattern) - pattern.count("*")


def _merge(a: Mapping, b: Mapping) -> dict:
    merged = dict(a)
    for key, value in b.items():
        old = merged.get(key)
        if isinstance(old, Boundary):
            value = Boundary(
                {**old.input, **value.input}, {**old.output, **value.output}, _merge(old.arguments, value.arguments)
            )
        elif old is not None:
            value = {**old, **value}
        merged[key] = value
    return merged


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        results = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return results if isinstance(value, Plan) else {k: v for k, v in results.items() if v}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _keys(values: Any, kind: type, where: str) -> None:
    valid = [f.name for f in dataclasses.fields(kind)]
    if not isinstance(values, Mapping):
        raise ShardingError(f"{where} is {values!r}; a mapping with {', '.join(valid)} is expected")
    for key in values:
        if key not in valid:
            raise ShardingError(
                f'{where} has an unknown key "{key}"{nearest(str(key), valid)}; valid: {", ".join(valid)}'
            )
