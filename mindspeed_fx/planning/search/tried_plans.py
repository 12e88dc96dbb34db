"""Which plans of a search a rank made its program of (:mod:`traced_plan`); each is tried once, when it is returned or
listed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TriedPlans:
    """What was tried of one search."""

    asked: bool = True
    """False: ``plan(..., trace=False)``."""
    passed: set[str] = field(default_factory=set)
    """Names of plans that trace."""

    def take(self, plan: Any) -> bool:
        """Whether a rank can make its program of ``plan``, or it cannot be tried here. Why one cannot goes to
        ``plan.refused``."""
        if plan.name in plan.refused:
            return False
        if plan.name in self.passed or plan.unsupported or not self._can_try():
            return True
        from mindspeed_fx.planning.search import traced_plan

        reason = traced_plan.find_failure(plan.searched.problem.traced, plan, plan.sizes)
        if reason is None:
            self.passed.add(plan.name)
            return True
        plan.refused[plan.name] = reason
        return False

    def _can_try(self) -> bool:
        from torch.distributed import is_available, is_initialized

        return self.asked and not (is_available() and is_initialized())
