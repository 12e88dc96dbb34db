"""Every kernel and whole model on a CUDA device beside its rivals; ``python -m benchmarks.gpu``."""
