"""Heads and losses over logits [b, s, vocabulary] and labels [b, s], and single numbers of anything else."""

from __future__ import annotations

from .writer import HIDDEN, VOCAB, Writer


def loss(w: Writer, x: str, labels: str, embedding: str | None) -> str:
    logits = (
        w.emit("{} @ {}.weight.t()", x, embedding)
        if embedding and w.random.random() < 0.3
        else w.linear(x, VOCAB, bias=False)
    )
    if w.random.random() < 0.15:
        logits = w.emit("5.0 * torch.tanh({} / 5.0)", logits)
    if w.random.random() < 0.15:
        logits = w.emit("{} * 0.5", logits)
    if w.random.random() < 0.3:
        logits, labels = w.emit("{}[:, :-1]", logits), w.emit("{}[:, 1:]", labels)
    if w.random.random() < 0.2:
        labels = w.emit("{0}.masked_fill({0} == 3, -100)", labels)
        return w.emit("F.cross_entropy({}.reshape(-1, {}), {}.reshape(-1))", logits, VOCAB, labels)
    text = w.random.choice(
        [
            "F.cross_entropy({0}.reshape(-1, {2}), {1}.reshape(-1))",
            "F.cross_entropy({0}.flatten(0, 1), {1}.flatten())", "F.cross_entropy({0}.transpose(1, 2), {1})",
            "F.nll_loss(F.log_softmax({0}, -1).flatten(0, 1), {1}.flatten())",
            "F.cross_entropy({0}.reshape(-1, {2}), {1}.reshape(-1), label_smoothing=0.1)",
            "F.cross_entropy({0}.reshape(-1, {2}), {1}.reshape(-1), reduction='sum') / {1}.numel()",
            "F.cross_entropy({0}.reshape(-1, {2}), {1}.reshape(-1), reduction='none').view({1}.shape).mean(0)",
            "F.cross_entropy({0}.reshape(-1, {2}), {1}.reshape(-1), ignore_index=0)",
            "(torch.logsumexp({0}, -1) - {0}.gather(-1, {1}.unsqueeze(-1)).squeeze(-1)).mean()",
            "-(torch.log_softmax({0}, -1) * F.one_hot({1}, {2})).sum(-1).mean()",
            "-torch.log(torch.softmax({0}, -1).gather(-1, {1}[..., None])).sum()",
            "F.cross_entropy({0}.reshape(-1, {2}), {1}.reshape(-1)) + 1e-2 * torch.logsumexp({0}, -1).square().mean()",
            "F.binary_cross_entropy_with_logits({0}, F.one_hot({1}, {2}).to({0}.dtype))",
            "({0}.gather(-1, {1}.unsqueeze(-1)).squeeze(-1) - torch.stack([row.logsumexp(-1) for row in {0}])).mean()",
            "-torch.stack([F.log_softmax(r, -1).gather(-1, i[:, None])[:, 0] for r, i in zip({0}, {1})]).mean()",
            "F.kl_div(F.log_softmax({0}, -1), torch.softmax({0}.detach() * 0.5, -1), reduction='batchmean')",
        ]
    )  # fmt: skip
    return w.emit(text, logits, labels, VOCAB)


def number(w: Writer, x: str) -> str:
    text = w.random.choice(
        [
            "{}.mean()",
            "{}.pow(2).mean()",
            "F.mse_loss({0}, {0}.detach() * 0.5)",
            "F.smooth_l1_loss({0}, torch.zeros_like({0}))",
        ]
    )
    return w.emit(text, x)


def head(w: Writer, x: str) -> str:
    return w.linear(x, w.random.choice([HIDDEN, VOCAB]))
