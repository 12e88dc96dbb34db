"""Which modules of a model are columns, rows, embeddings, output layers and experts: told by the graph where it was
read (:mod:`mindspeed_fx.sharding.roles`), else by their names.
"""

from __future__ import annotations

from typing import Mapping, Sequence

from torch import nn

from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.roles import Roles

COLUMN = tuple(
    "q_proj k_proj v_proj q k v query key value wq wk wv gate_proj up_proj gate up w1 w3 fc1 c_fc dense_h_to_4h".split()
)
ROW = ("o_proj", "out_proj", "o", "wo", "dense", "down_proj", "down", "w2", "fc2", "c_proj", "dense_4h_to_h", "proj")


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Those of torch, and transformers' Conv1D of GPT-2, whose weight is [in, out]."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}


def result_dim(layer: nn.Module) -> int:
    """The dimension of the weight that the results have."""
    return 0 if isinstance(layer, nn.Linear) else 1


def divided_word(dim: int, sizes: Sequence[int] = ()) -> str:
    """The word for a part of dimension ``dim``, or of each of the pieces of these sizes that it consists of."""
    return f"S({dim}:{'+'.join(map(str, sizes))})" if len(sizes) > 1 else f"S({dim})"


def gathered_layers(model: nn.Module, others: Mapping[str, nn.Module], roles: Roles | None) -> dict[str, nn.Module]:
    """Linear layers whose results the graph needs whole: divided by columns too, with a gather behind them. One
    of a single result, such as the gate of a shared expert, has no columns to divide."""
    if roles is None:
        return {}
    whole = {n: m for n, m in linear_layers(model).items() if n not in others and f"{n}.weight" in roles.whole}
    return {n: m for n, m in whole.items() if m.weight.shape[result_dim(m)] > 1}


def column_and_row_layers(
    model: nn.Module, plan: str, roles: Roles | None = None
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Columns and rows: those of the graph, without it by name. One without the other is divided all the same: a row
    layer behind a packed projection takes its part of what is whole."""
    linears = linear_layers(model)
    columns, rows = ({n: m for n, m in linears.items() if n.split(".")[-1] in names} for names in (COLUMN, ROW))
    if roles is not None:
        columns = {n: m for n, m in linears.items() if f"{n}.weight" in roles.columns}
        by_name = [n for n in rows if f"{n}.weight" not in roles.columns]
        rows = {n: m for n, m in linears.items() if f"{n}.weight" in roles.rows or n in by_name}
        if not columns and not rows and not roles.columns:
            reasons = "; ".join(f"{n}: {why}" for n, why in list(roles.whole.items())[:4])
            raise ShardingError(f'plan "{plan}": the graph has no columns and rows ({reasons or "no linear layers"})')
    elif not columns and not rows:
        raise ShardingError(
            f'plan "{plan}": '
            "no column and row linear layers were recognized by name among "
            f"{', '.join(list(linears)[:12]) or 'no linear layers'}; "
            f"columns are called {', '.join(COLUMN)}, rows {', '.join(ROW)}; for other names give example arguments "
            "(args=...), by which they are read from the graph, or write the plan yourself (docs/sharding.md)"
        )
    return columns, rows


def vocabulary_layers(
    model: nn.Module, paired: Mapping[str, nn.Module], roles: Roles | None = None
) -> tuple[dict[str, nn.Embedding], dict[str, nn.Linear]]:
    """Token embeddings, and linear layers whose results are as many as an embedding has rows: those of the graph,
    without it by name.
    """
    embeddings = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    named = {n: m for n, m in embeddings.items() if not any(w in n.split(".")[-1] for w in ("pos", "wpe", "type"))}
    whole = dict(model.named_parameters(remove_duplicate=False))
    if roles is not None and roles.output_layers:
        tokens = {id(whole[name]) for name in roles.embeddings}  # by identity: tied ones have one name
        embeddings = {n: m for n, m in embeddings.items() if id(m.weight) in tokens}
    else:
        embeddings = named
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in paired}
    if roles is not None:
        weights = {id(whole[name]) for name in roles.output_layers}
        return embeddings, {n: m for n, m in linears.items() if id(m.weight) in weights}
    sizes, known = {m.num_embeddings for m in named.values()}, (*COLUMN, *ROW)
    heads = {n: m for n, m in linears.items() if m.out_features in sizes and n.split(".")[-1] not in known}
    return embeddings, heads


def expert_parameters(model: nn.Module, roles: Roles | None = None) -> list[str]:
    """Parameters [experts, ., .]: those of modules whose names end in "experts", and those of the graph."""
    stacked = {n for n, p in model.named_parameters() if p.ndim == 3}
    named = {n for n in stacked if n.rpartition(".")[0].endswith("experts")}
    read = set(roles.experts) if roles is not None else set()
    return [n for n, _ in model.named_parameters() if n in named | read]
