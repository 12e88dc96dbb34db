"""Seconds, throughput and memory of a training step that is described in numbers: nothing is traced, nothing runs.

* ``architecture.py``, ``architectures.py``: the model; ``settings.py``: what the run fixed
* ``layer_work.py``, ``step_work.py``: kernels and messages; ``timing.py``: their seconds; ``memory.py``: bytes
* ``prediction.py``: all of it, with an interval; ``best.py``: what a run left open, searched;
  ``launch_flags.py``: settings of a Megatron launch
"""

from __future__ import annotations

from mindspeed_fx.planning.predict.architecture import Architecture
from mindspeed_fx.planning.predict.architectures import architecture
from mindspeed_fx.planning.predict.best import best_settings
from mindspeed_fx.planning.predict.launch_flags import settings_from_flags
from mindspeed_fx.planning.predict.prediction import Prediction, predict
from mindspeed_fx.planning.predict.settings import Settings, settings

__all__ = [
    "Architecture",
    "Prediction",
    "Settings",
    "architecture",
    "best_settings",
    "predict",
    "settings",
    "settings_from_flags",
]
