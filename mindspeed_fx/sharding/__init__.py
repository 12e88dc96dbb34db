"""Which rank holds which part of which tensor, and the local program that follows from it.

* ``plan.py``: a plan is data; ``presets.py``: plans by name for a model
* ``parallelize.py``: parameters become DTensors that the model's own code still sees whole
* ``parallelized_graph.py``: what the backend calls; ``constraint.py``: a placement in a graph
* ``spmd/``: the local program of one rank; ``audit/``: what it sends, checked"""
