"""Which lists of modules are the layers that a model's stages are made of."""

from __future__ import annotations

from torch import nn

from mindspeed_fx.sharding.plan import ShardingError

Layers = tuple[tuple[str, int], ...]
"""Names of the lists of a model's layers, and how many there are in each."""

SHARE = 0.1
"""Of the parameters of the longest list: what another one has at least, to be layers of stages too. (A decoder's list
beside an encoder's, a vision tower's beside a language model's; not the three blocks of a head.)"""


def layers_of(model: nn.Module, stages: int) -> Layers:
    """The lists of the model's layers: of lists whose modules are of one class the one with the most parameters, and
    others beside it that have many; where it has less than half of what a ModuleList of several classes has (layers of
    attention and of a recurrence), the latter.

    Raises:
        ShardingError: no such list; fewer layers than stages.
    """
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in model.named_modules() if _is_list(m) and len(m) > 1}
    alike = {
        n: size for n, size in sizes.items() if len({type(layer) for layer in model.get_submodule(n).children()}) == 1
    }
    mixed = {n: size for n, size in sizes.items() if isinstance(model.get_submodule(n), nn.ModuleList)}
    name = max(alike, key=alike.__getitem__, default=None)
    other = max(mixed, key=mixed.__getitem__, default=None)
    if other is not None and (name is None or 2 * alike[name] < mixed[other]):
        name = other
    if name is None:
        if shared := [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == 1]:
            raise ShardingError(
                f'pp={stages}: {type(model).__name__} has no repeated layers: "{shared[0]}" has one, and what runs it '
                "several times shares its weights; stages are made of layers with weights of their own"
            )
        raise ShardingError(
            f"pp={stages}: {type(model).__name__} has no repeated layers (a ModuleList, or a Sequential of modules of "
            "one class) to make stages of"
        )
    chosen = [name]
    for n in sorted(alike, key=alike.__getitem__, reverse=True):
        if alike[n] >= SHARE * sizes[name] and not any(_is_nested(n, m) or _is_nested(m, n) for m in chosen):
            chosen.append(n)
    lists = tuple((n, len(model.get_submodule(n))) for n in chosen)
    count = sum(n for _, n in lists)
    if stages > count:
        names = " and ".join(f'"{n}"' for n, _ in lists)
        verb = "has" if len(lists) == 1 else "have"
        raise ShardingError(f"pp={stages}: {names} {verb} {count} layers; valid: 2 to {count} stages")
    return lists


def _is_list(m: nn.Module) -> bool:
    """A dictionary is one where its keys are numbers from 0 on (torchtitan's models)."""
    numbered = isinstance(m, nn.ModuleDict) and list(m) == [str(i) for i in range(len(m))]
    return numbered or isinstance(m, (nn.ModuleList, nn.Sequential))


def _is_nested(inner: str, outer: str) -> bool:
    return inner == outer or not outer or inner.startswith(f"{outer}.")
