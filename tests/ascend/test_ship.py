"""A model's way to the other process: structure without values."""

import runpy

import pytest
import torch
from torch import nn

from mindspeed_fx.ascend import ship
from mindspeed_fx.ascend.blame import describe_error
from mindspeed_fx.compat import tracing
from tests.ascend.npu_models import Gpt2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 512), nn.Linear(512, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.partition_dim = 0
        self.register_buffer("scale", torch.ones(3))
        self.plain = {"cos": [torch.randn(4, 6).t()]}
        self.embed.weight.requires_grad_(False)


def test_values_stay_and_everything_else_goes():
    data = ship.pack(Tied(), (torch.zeros(2, 3, dtype=torch.int64),), {"x": 1})
    assert len(data) < 5000
    model, args, kwargs = ship.unpack(data)
    assert (
        model.head.weight is model.embed.weight
        and model.embed.weight.partition_dim == 0
        and not model.embed.weight.requires_grad
    )
    assert (
        isinstance(model.embed.weight, nn.Parameter)
        and model.embed.weight.device.type == "meta"
        and model.embed.weight.shape == (1000, 512)
    )
    assert model.plain["cos"][0].stride() == (1, 6) and args[0].dtype == torch.int64 and kwargs == {"x": 1}


def test_every_tensor_becomes_fake_once():
    with torch.device("meta"):
        model = Tied()
    mode = tracing.new_fake_mode()
    model, args, kwargs = ship.to_fake(
        mode, "cpu", model, (torch.zeros(2, device="meta"),), {"mask": [torch.ones(2, 2)]}
    )
    found = [*model.parameters(), *model.buffers(), model.plain["cos"][0], args[0], kwargs["mask"][0]]
    assert all(tracing.fake_mode_of([t]) is mode and t.device.type == "cpu" for t in found)
    assert model.head.weight is model.embed.weight and model.plain["cos"][0].stride() == (1, 6)


def test_a_local_class_is_refused_with_the_way_out():
    class Local(nn.Module):
        pass

    with pytest.raises(
        ship.ShipError, match=r"Local.* Define its classes and functions at the top level.*SCRIPT.py:FUNCTION"
    ):
        ship.pack(Local(), (), {})
    model = Gpt2()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ship.ShipError, match="Gpt2 cannot be sent"):
        ship.pack(model, (), {})


def test_scripts(tmp_path):
    script = tmp_path / "made.py"
    script.write_text(
        "import torch\ndef good():\n    return torch.nn.Linear(4, 4), [torch.zeros(2, 4)]\ndef bad():\n    return 1\n"
    )
    model, args, kwargs = ship.build(*ship.split(f"{script}:good"))
    assert model.weight.device.type == "meta" and args[0].shape == (2, 4) and kwargs == {}
    script.write_text(
        script.read_text()
        + "def tensor():\n    return torch.nn.Linear(4, 4), torch.zeros(2, 4)\ndef no_model():\n    return 3, ()\ndef "
        "positional():\n    return torch.relu, (), ()\n"
    )
    for function, says in (
        ("bad", "bad returned a int; it must return"),
        (
            "goo",
            r'made.py has no function "goo" \(did you mean "good"\?\); it has: good, bad, tensor, no_model, positional',
        ),
        ("tensor", r"tensor: args is a Tensor; a tuple of the model's inputs is wanted, such as \(tensor,\)"),
        ("no_model", "the model is a int"),
        ("positional", "kwargs is a tuple; a dict"),
    ):
        with pytest.raises(ship.ShipError, match=says):
            ship.build(str(script), function)
    for source in ("made", f"{tmp_path}/gone.py:f"):
        with pytest.raises(ship.ShipError, match="is not SCRIPT.py:FUNCTION|there is no"):
            ship.split(source)


def fails_in_a_model(kind):
    """What is told of an error in a file of the user's."""
    namespace = runpy.run_path(kind)
    try:
        namespace["run"]()
    except Exception as e:
        return describe_error(e)


@pytest.mark.parametrize("text, kind, message, where", [
    ("raise KeyError('no such config')", "KeyError", "'no such config'", "2 in run"),
    ("import torch\n    torch.zeros(2, 3) @ torch.zeros(2, 3)", "RuntimeError", "mat1 and mat2 shapes cannot be "
                                                                                "multiplied", "3 in run"),
    ("import torch\n    f = torch.compile(lambda x: x @ x, backend='eager')\n    f(torch.zeros(2, "
     "3))", "RuntimeError", "a and b must have same reduction dim", "3 in <lambda>"),
])  # fmt: skip
def test_errors_are_told_in_the_users_lines(tmp_path, text, kind, message, where):
    script = tmp_path / "broken.py"
    script.write_text(f"def run():\n    {text}\n")
    found = fails_in_a_model(str(script))
    assert found["type"] == kind and found["message"].startswith(message) and "\n" not in found["message"]
    assert (
        found["where"] == f"{script}:{where}"
        and "site-packages" not in found["frames"]
        and "Traceback" in found["traceback"]
    )


def test_a_script_that_is_no_python_is_named(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("def run(:\n")
    with pytest.raises(SyntaxError) as caught:
        ship.build(str(script), "run")
    found = describe_error(caught.value)
    assert found["where"] == f"{script}:1" and found["message"] == "invalid syntax" and "def run(:" in found["frames"]
