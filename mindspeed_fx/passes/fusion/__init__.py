"""Fusion: subgraphs become ``mindspeed::`` operators. One file per operator family."""

from mindspeed_fx.modules import import_all

import_all(__name__)
