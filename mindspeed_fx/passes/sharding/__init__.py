"""Which rank holds which part of which tensor. One idea per file:

* ``plan.py``: a plan is data: placements of parameters and inputs, and of what crosses the edges of modules and
  operators
* ``named.py``: plans by name for a model (tensor parallel, ZeRO, Ulysses ...)
* ``parallelize.py``: parameters become DTensors that the model's code still sees whole
* ``inputs.py``: what callers pass: the whole batch, compared in the first step, or each rank its part
* ``optimizers.py``: torch's optimizers that cannot step parts are refused
* ``place.py``: the pass ``sharding.constraint``: a plan's edges become ``place`` calls in the captured graph
* ``program.py``: the graph run on DTensors inside what AOTAutograd traces, which is the local program
* ``vocabulary.py``, ``rows.py``, ``ring.py``, ``experts.py``: operators that need collectives inside
* ``travel.py``, ``dispatch.py``: tokens that travel to experts on other ranks: the pass ``sharding.token_dispatch``
  finds them, the other does it
* ``blocks.py``, ``ring_blocks.py``, ``known.py``: attention of divided sequences with masks: who computes what, how,
  and masks known while compiling
* ``verify.py``: the pass ``sharding.verify``: no collective too many; ``traffic.py``: what a plan's edges need;
  ``origin.py``: where gathered elements go; ``backwards.py``: gradients that are computed whole; ``drawn.py``: the plan
  as a picture
* ``regather.py``: the pass ``sharding.regather``: collectives that the backward makes again
* ``recognize.py``: the pass ``sharding.recognize``: which plan a graph's collectives amount to
* ``compared.py``: what other plans over the same ranks would cost a model that is parallel by hand
* ``simulate.py``: every rank of a plan in one process, to check it
"""

from mindspeed_fx.passes.sharding import constraint, recognize, regather, token_dispatch, verify  # noqa: F401
