"""Code that the other passes could not read becomes ATen in one spelling. One pass per file."""

from mindspeed_fx.modules import import_all

import_all(__name__)
