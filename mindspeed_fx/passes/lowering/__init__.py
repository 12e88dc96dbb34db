"""Choices of kernels for single operators. One pass per file."""

from mindspeed_fx.modules import import_all

import_all(__name__)
