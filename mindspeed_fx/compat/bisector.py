"""Torch's compiler bisector, to which our passes are known."""

from __future__ import annotations

# --------------------------------------------------------------------------- bisecting


_BISECT = ("mindspeed", "passes")


def register_bisector() -> None:
    """Let ``torch._inductor.compiler_bisector`` search among our passes; without its table (private) do nothing."""
    from torch._inductor import compiler_bisector as bisector

    if hasattr(bisector, "BACKENDS") and hasattr(bisector, "BisectSubsystem"):
        bisector.BACKENDS.setdefault(_BISECT[0], [bisector.BisectSubsystem(_BISECT[1])])


def bisector_disables(name: str) -> bool:
    """True when a running bisection has switched this pass off."""
    from torch._inductor.compiler_bisector import CompilerBisector

    if not CompilerBisector.get_backend() == _BISECT[0]:
        return False
    return CompilerBisector.disable_subsystem(*_BISECT, lambda: name)


def bisecting() -> bool:
    """True while a bisection over our passes runs."""
    from torch._inductor.compiler_bisector import CompilerBisector

    return CompilerBisector.get_backend() == _BISECT[0]
