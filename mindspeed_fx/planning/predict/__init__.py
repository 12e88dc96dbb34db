"""Seconds, throughput and memory of a training step that is described in numbers: nothing is traced, nothing runs.

* ``architecture.py``, ``architectures.py``: the model; ``settings.py``: what the run fixed
* ``layer_work.py``, ``step_work.py``: kernels and messages; ``timing.py``: their seconds; ``memory.py``: bytes
* ``prediction.py``: all of it, with an interval
"""

from __future__ import annotations

from mindspeed_fx.planning.predict.architecture import Architecture, architecture
from mindspeed_fx.planning.predict.prediction import Prediction, predict
from mindspeed_fx.planning.predict.settings import Settings, settings

__all__ = ["Architecture", "Prediction", "Settings", "architecture", "predict", "settings"]
