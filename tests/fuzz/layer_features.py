"""What the forward of a layer may depend on: parts of the programs of layer_lists.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """What a forward may depend on.

    Attributes:
        name: how it is told.
        init: lines of the layer's ``__init__(self, i, model)``.
        body: lines of its forward, which computes ``y`` of ``x``.
        methods: further lines of its class.
        changes: statements that change one ``layer`` (of ``model``), or all of them.
        argument: what its forward takes, and what the model gives it at call ``i``.
        setup: lines of the model's ``__init__`` before its layers.
    """

    name: str
    init: str = ""
    body: str = ""
    methods: str = ""
    changes: tuple[str, ...] = ()
    argument: tuple[str, str] | None = None
    setup: str = ""
    times: tuple[int, ...] = (-1, 0, 0, 1, 1, 1, 2)
    """When it may change (:class:`Program`)."""


HOOKS = (0,)
"""Hooks that come after compiling Dynamo does not look for (docs/scenarios.md)."""

FEATURES = (
    Feature("activation", "self.act = nn.SiLU()", "y = self.act(y)", changes=("layer.act = nn.ReLU()",)),
    Feature("number", "self.scale = 0.5", "y = y * self.scale", changes=("layer.scale = 0.25", "layer.scale = 2")),
    Feature("number of its own", "self.depth = 0.5 + i % 2", "y = y * self.depth", changes=("layer.depth = 0.1",)),
    Feature(
        "turns",
        "self.turns = 2",
        "for _ in range(self.turns):\n    y = y + 0.1 * y.tanh()",
        changes=("layer.turns = 1", "layer.turns = True"),
    ),
    Feature("text", 'self.kind = "a"', 'y = y.sin() if self.kind == "a" else y.cos()', changes=('layer.kind = "b"',)),
    Feature(
        "function",
        "self.fn = torch.sin",
        "y = self.fn(y)",
        changes=("layer.fn = torch.cos", "layer.fn = lambda y: y * 3"),
    ),
    Feature(
        "buffer",
        'self.register_buffer("shift", torch.randn(D))',
        "y = y + self.shift",
        changes=("layer.shift.zero_()", "layer.shift = torch.ones(D)", "layer.shift = model.layers[1].shift"),
    ),
    Feature(
        "counter",
        'self.register_buffer("count", torch.zeros(()))',
        "self.count += 1\ny = y * self.count.clamp(max=2.0)",
        changes=("layer.count.zero_()",),
    ),
    Feature(
        "batch norm",
        "self.bn = nn.BatchNorm1d(D)",
        "y = self.bn(y.flatten(0, 1)).view_as(y)",
        changes=("layer.bn.eval()", "layer.bn.momentum = 0.5", "model.eval()"),
    ),
    Feature(
        "norm",
        "self.norm = nn.LayerNorm(D)",
        "y = self.norm(y)",
        changes=(
            "layer.norm.eps = 0.1",
            "layer.norm = nn.Identity()",
            "layer.norm.weight.requires_grad_(False)",
            "layer.norm.bias = None",
        ),
    ),
    Feature(
        "dropout",
        "self.drop = nn.Dropout(0.3)",
        "y = self.drop(y)",
        changes=("layer.drop.p = 0.0", "layer.drop.eval()", "model.eval()"),
    ),
    Feature(
        "weight",
        "self.w = nn.Parameter(torch.randn(D, D) * 0.4)",
        "y = y @ self.w",
        changes=(
            "layer.w = nn.Parameter(torch.randn(D, D) * 0.3)",
            "layer.w.requires_grad_(False)",
            "layer.w = model.layers[0].w",
            "layer.w = model.w",
            "layer.w = nn.Parameter(layer.w.detach().T.contiguous().T)",
        ),
        setup="self.w = nn.Parameter(torch.randn(D, D) * 0.4)",
    ),
    Feature("transposed weight", body="y = y @ self.a.weight.T"),
    Feature(
        "functional",
        body="y = F.linear(y, self.a.weight, self.a.bias)",
        changes=("layer.a.bias = None", "layer.a = nn.Linear(D, D, bias=False)"),
    ),
    Feature(
        "weight of the model",
        "self.head = model.head",
        "y = y + F.linear(y, self.head)",
        changes=("layer.head = nn.Parameter(torch.randn(D, D))",),
        setup="self.head = nn.Parameter(torch.randn(D, D) * 0.4)",
    ),
    Feature(
        "parts",
        "self.parts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))",
        "for part in self.parts:\n    y = y + part(y)",
        changes=("del layer.parts[1]", "layer.parts.append(nn.Linear(D, D))", "layer.parts[0] = nn.Tanh()"),
    ),
    Feature(
        "named parts",
        'self.named = nn.ModuleDict({"p": nn.Linear(D, D), "q": nn.Tanh()})',
        "for name, part in self.named.items():\n    y = y + part(y)",
        changes=('layer.named["q"] = nn.ReLU()', 'layer.named["r"] = nn.Sigmoid()'),
    ),
    Feature(
        "configuration",
        "self.config = model.config",
        "y = y * self.config.scale",
        changes=("layer.config = Config(scale=3.0)", "model.config.scale = 1.5"),
        setup="self.config = Config()",
    ),
    Feature(
        "flag of a configuration",
        "self.flags = model.flags",
        "y = y.sigmoid() * y if self.flags.gated else y",
        changes=("layer.flags = Config(gated=True)", "model.flags.gated = True"),
        setup="self.flags = Config()",
    ),
    Feature(
        "class of a configuration",
        "self.made = model.kinds",
        "y = y.relu() if self.made.act is nn.SiLU else y",
        changes=("layer.made = Config(act=nn.ReLU)",),
        setup="self.kinds = Config()",
    ),
    Feature(
        "containers",
        'self.values = {"p": 0.5, "q": [1.0, 2.0]}',
        'y = y * self.values["p"] + self.values["q"][1]',
        changes=('layer.values["p"] = 1.0', 'layer.values["q"][1] = 5.0'),
    ),
    Feature(
        "numbers",
        "self.numbers = [0.5, 0.7]",
        "for n in self.numbers:\n    y = y * n",
        changes=("layer.numbers.append(2.0)", "layer.numbers[0] = 1.0", "layer.numbers = (0.1,)"),
    ),
    Feature("global", body="y = y * SCALE", changes=('globals()["SCALE"] = 0.7',)),
    Feature(
        "plain tensor",
        "self.table = (model.table,)",
        "y = y + self.table[0]",
        changes=("layer.table = (torch.ones(D),)", "model.table.zero_()"),
        setup='self.register_buffer("table", torch.randn(D))',
    ),
    Feature(
        "shared module",
        "self.shared = model.shared",
        "y = y + self.shared(y)",
        changes=("layer.shared = nn.Linear(D, D)", "model.shared.bias = None"),
        setup="self.shared = nn.Linear(D, D)",
    ),
    Feature(
        "owner",
        'object.__setattr__(self, "owner", model)',
        "y = y * self.owner.factor",
        changes=("model.factor = 2.0",),
        setup="self.factor = 0.5",
    ),
    Feature(
        "optional module",
        "self.extra = None",
        "if self.extra is not None:\n    y = self.extra(y)",
        changes=("layer.extra = nn.Tanh()", "layer.extra = nn.Linear(D, D)"),
    ),
    Feature(
        "missing attribute", body='if hasattr(self, "more"):\n    y = y + self.more', changes=("layer.more = 2.0",)
    ),
    Feature("default", body='y = y * getattr(self, "gain", 0.5)', changes=("layer.gain = 2.0",)),
    Feature("in training", body="y = y * 2 if self.training else y", changes=("layer.eval()", "model.eval()")),
    Feature("grad mode", body="y = y * 2 if torch.is_grad_enabled() else y"),
    Feature("gradient of the input", body="y = y * 2 if x.requires_grad else y"),
    Feature(
        "gradient of a weight",
        body="y = y * 2 if self.a.weight.requires_grad else y",
        changes=("layer.a.weight.requires_grad_(False)",),
    ),
    Feature("statistics", body="with torch.no_grad():\n    z = y.abs().mean()\ny = y / (1 + z)"),
    Feature("cut", body="y = y + y.detach() * 0.5"),
    Feature(
        "checkpoint",
        "self.inner, self.inside = nn.Linear(D, D), 0.5",
        "y = checkpoint(self.part, y, use_reentrant=False)",
        "def part(self, y):\n    return self.inner(y).tanh() * self.inside",
        changes=("layer.inside = 0.3", "layer.inner = nn.Linear(D, D, bias=False)"),
    ),
    Feature("writes its own", body="y = y.clone()\ny.mul_(2)\ny[:, 0] = 0"),
    Feature("writes its input", body="x.mul_(0.9)"),
    Feature("keeps its input", body="self.kept_input = x"),
    Feature("keeps a part of a weight", body="self.kept_part = self.a.weight[0].detach()"),
    Feature("keeps a tensor", body="self.seen = y.detach().mean()"),
    Feature("counts", "self.calls = 0", "self.calls = self.calls + 1\ny = y * min(self.calls, 2)"),
    Feature("logs", "self.log = []", "self.log.append(1.0)\ny = y + 0.1 * min(len(self.log), 3)"),
    Feature("autograd function", "self.back = 3.0", "y = Double.apply(y, self.back)", changes=("layer.back = 1.0",)),
    Feature("hook of a tensor", body="z = y * 1.0\nif z.requires_grad:\n    z.register_hook(lambda g: g * 2)\ny = z"),
    Feature(
        "property",
        "self.power = 1.0",
        "y = y * self.strong",
        "@property\ndef strong(self):\n    return self.power * 2",
        changes=("layer.power = 0.1",),
    ),
    Feature(
        "attribute of the class",
        body="y = y * self.GAIN",
        methods="GAIN = 0.5",
        changes=("type(layer).GAIN = 2.0", "layer.GAIN = 3.0"),
    ),
    Feature(
        "function beside",
        "self.helped = 0.5",
        "y = helper(self, y)",
        changes=("layer.helped = 2.0", 'globals()["helper"] = lambda layer, y: y + layer.helped'),
    ),
    Feature(
        "kind of a part",
        "self.kin = nn.SiLU()",
        "y = y * 2 if isinstance(self.kin, nn.SiLU) else y",
        changes=("layer.kin = nn.ReLU()",),
    ),
    Feature("all weights", body="y = y + sum(p.sum() for p in self.parameters())"),
    Feature(
        "number of weights",
        body="y = y * len(list(self.parameters())) / 8",
        changes=('layer.register_parameter("further", nn.Parameter(torch.ones(2, dtype=torch.float64)))',),
    ),
    Feature("dtype", body="y = y.to(self.a.weight.dtype)"),
    Feature(
        "layer number",
        "self.number = i",
        "if self.number % 3 == 0:\n    y = y.cos()",
        changes=("layer.number = 0", "layer.number = 1"),
    ),
    Feature(
        "weight norm",
        "self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))",
        "y = self.normed(y)",
    ),
    Feature(
        "hooked part",
        "self.hooked = nn.Tanh()",
        "y = self.hooked(y)",
        changes=("layer.hooked.register_forward_hook(lambda m, a, out: out * 2)",),
        times=HOOKS,
    ),
    Feature("hooked layer", changes=("layer.register_forward_hook(lambda m, a, out: out)",), times=HOOKS),
    Feature("mask", body="y = y.masked_fill(mask, 0.0)", argument=("mask", "mask")),
    Feature(
        "optional mask",
        body="if bias is not None:\n    y = y + bias",
        argument=("bias=None", "bias if i % 4 else None"),
    ),
    Feature("number given", body="y = y * factor", argument=("factor", "1.0 + i % 2")),
    Feature("flag given", body="y = y.relu() if flag else y", argument=("flag", "i % 2 == 0")),
    Feature(
        "integer given",
        body="y = y * (1 + at)",
        argument=("at", "i if self.counted else 1"),
        changes=("model.counted = True",),
        setup="self.counted = False",
    ),
    Feature("pair given", body="y = y * both[0] + both[1]", argument=("both", "(mask.to(x.dtype), bias)")),
    Feature(
        "named values given",
        body='y = y * named["p"] + named["q"]',
        argument=("named", '{"p": 0.5, "q": bias, "r": None}'),
    ),
    Feature("itself given", body="y = y + again * 0.5", argument=("again", "x if i % 2 else first")),
    Feature("first given", body="y = y + first", argument=("first", "first")),
    Feature("list that fills", body="seen.append(y)\ny = y + sum(seen[-2:])", argument=("seen", "seen")),
    Feature(
        "table that fills",
        body="cache[self.place] = y\ny = y + cache[max(self.place - 1, 0)]",
        init="self.place = i",
        argument=("cache", "cache"),
    ),
    Feature(
        "configuration given",
        body="y = y * how.scale",
        argument=("how", "self.how"),
        changes=("model.how.scale = 2.0", "model.how = Config(scale=0.1)"),
        setup="self.how = Config()",
    ),
    Feature(
        "module given",
        body="y = y + norm(y)",
        argument=("norm", "self.norms[i % 2]"),
        setup="self.norms = nn.ModuleList([nn.LayerNorm(D), nn.Tanh()])",
    ),
    Feature("function given", body="y = f(y)", argument=("f", "torch.sin if i % 2 else torch.cos")),
    Feature("weight given", body="y = y + F.linear(y, weight)", argument=("weight", "layer.a.weight")),
    Feature("size given", body="y = y[:, :n].sum(1, keepdim=True) + y", argument=("n", "x.shape[1]")),
)
