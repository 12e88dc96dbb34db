"""Passes of a model that is parallelized, or parallel by hand; plans and programs are in :mod:`mindspeed_fx.sharding`.

* ``constraint.py``: a plan's edges become calls in the captured graph
* ``token_dispatch.py``: finds the mixtures whose tokens go to experts on other ranks
* ``regather.py``: collectives that the backward recomputes; ``gathered_inputs.py``: those of a model parallel by hand
* ``verify.py``: no collective too many
* ``recognize.py``: which plan a graph's collectives amount to
"""

from mindspeed_fx.passes.sharding import constraint, recognize, regather, token_dispatch, verify  # noqa: F401
