"""CPU kernels of the ``npu::`` operators, so that a lowered graph can run without an NPU."""
