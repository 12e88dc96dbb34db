"""Plans in files: YAML, or JSON by the file's name; each name once."""

from __future__ import annotations

import os
from typing import Any

from mindspeed_fx.arguments import json_object, refuse
from mindspeed_fx.errors import OptionError

EXAMPLE = '{"name": "tp", "mesh": ["tp"]}'


def read(path: Any) -> dict[str, Any]:
    """The values in a file.

    Raises:
        FileNotFoundError, IsADirectoryError: there is none.
        OptionError: no text, torn, a name twice, or no mapping; the message names the file.
    """
    if not isinstance(path, (str, os.PathLike)):
        refuse("Plan.load", "path", path, "the name of a file is expected")
    if os.path.isdir(path):
        raise IsADirectoryError(f"Plan.load: {path} is a directory; the file of a plan is expected")
    if not os.path.exists(path):
        raise FileNotFoundError(f"Plan.load: {path}: there is no such file in {os.getcwd()}")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError as e:
        raise OptionError(f"{path} is no text ({e}); a plan in YAML or JSON is expected") from None
    values = (
        json_object(str(path), text, EXAMPLE)
        if str(path).endswith(".json")
        else read_yaml(path, text, "see Plan's example")
    )
    if not isinstance(values, dict):
        raise OptionError(f"{path} holds no plan: a mapping with name, mesh and parameters is expected")
    return values


def write_yaml(values: dict[str, Any]) -> str:
    """The values as YAML, a placement on a line."""
    return str(_yaml().safe_dump(values, sort_keys=False, default_flow_style=None, width=160))


def read_yaml(path: Any, text: str, expected: str) -> Any:
    """The values of a text in YAML.

    Args:
        path: where the text is from, for errors.
        expected: what an error says of the form.

    Raises:
        OptionError: it is no YAML, or has a name twice.
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):
        """Refuses what YAML takes in silence: of a name that comes twice the second."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            names = [self.construct_object(key, deep=True) for key, _ in node.value]
            for number, name in enumerate(names):
                if name in names[:number]:
                    line = node.value[number][0].start_mark.line + 1
                    raise OptionError(f'{path}, line {line}: "{name}" is there twice; once is expected')
            return dict(super().construct_mapping(node, deep))

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise OptionError(f"{path}{where} is not YAML ({getattr(e, 'problem', None) or e}); {expected}") from None


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise OptionError(
            "YAML needs the package PyYAML; a plan may be JSON, in a file whose name ends in .json"
        ) from None
    return yaml
