"""Megatron-core's own unit tests on a CPU, through the adaptor: ``python -m tests.megatron.core_suite CHECKOUT``.

``session.py`` runs a file of them in forked processes, one a rank; ``on_cpu.py`` is the pytest plugin in each, which
answers what test modules ask of CUDA; ``results.py`` names the cause of what did not pass and writes the page.
"""
