"""What operators of ATen compute, one file a family."""

from mindspeed_fx.modules import import_all

import_all(__name__)
