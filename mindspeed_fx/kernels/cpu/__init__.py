"""Kernels of the operators on CPU."""
