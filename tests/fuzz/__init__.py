"""Graphs that nobody thought of: programs written at random, compiled, and compared with themselves in eager PyTorch.

``python -m tests.fuzz --minutes 10 --seed 1`` writes and runs programs until the time is over; a program that fails is
made small by itself and printed as a script. How:

- program.py: a program is text (statements, regions, parameters, inputs), so that it can be shown, cut and run;
- operators.py and blocks.py: what programs are made of, single operators and the blocks of transformers in their many
  spellings; each is tried while it is written, so that every program runs;
- generate.py: a seed -> a program and how it is compiled;
- oracle.py: what a compiled program must agree in, and how far it may be off;
- minimize.py: fewer statements, fewer options, the same failure.
"""
