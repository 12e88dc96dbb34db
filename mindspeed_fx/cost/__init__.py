"""What an operator, a collective and a whole graph cost on a given device: modelled, never measured.

:mod:`hardware` has the constants of each device, :mod:`collectives` the time of a collective, :mod:`operators` FLOP and
bytes of an operator, :mod:`graph` the sum over a graph. FLOP and bytes are sympy expressions wherever a size is
symbolic.
"""
