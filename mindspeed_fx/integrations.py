"""Libraries that check a backend's name against a list of their own."""

from __future__ import annotations

from mindspeed_fx.errors import OptionError

NAME = "MINDSPEED"


def register_with_accelerate() -> None:
    """Make Hugging Face's accelerate, and with it transformers' Trainer, take the backend's name.

        mindspeed_fx.register_with_accelerate()
        TrainingArguments(..., torch_compile_backend="mindspeed")        # or Accelerator(dynamo_backend="mindspeed")

    accelerate knows backends by the members of an enum, and asks it before torch. A second call changes nothing.

    Raises:
        OptionError: accelerate is not installed, or has no such enum.
    """
    try:
        from accelerate.utils import DynamoBackend
    except ImportError as e:
        raise OptionError(
            f"register_with_accelerate: accelerate with its DynamoBackend is needed ({e}): pip install accelerate"
        ) from None
    if NAME in DynamoBackend.__members__:
        return
    member = str.__new__(DynamoBackend, NAME)
    member._name_, member._value_, member._sort_order_ = NAME, NAME, len(DynamoBackend)
    type.__setattr__(DynamoBackend, NAME, member)
    DynamoBackend._member_names_.append(NAME)
    DynamoBackend._member_map_[NAME] = member
    DynamoBackend._value2member_map_[NAME] = member
