"""Compiling for an Ascend NPU on a machine that has none: ``mindspeed_fx.cross_compile`` and the ``cross`` and
``toolchain`` commands. Results are traced, compiled and modelled; nothing here has run on an NPU."""
