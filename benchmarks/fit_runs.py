"""Fits of the constants of the cost model to published runs: few parameters with priors, a loss that outliers do not
rule.

Minimised over the parameters' logarithms x, with the modelled step t(x) and the published one T of every run i:

    sum_i w_i rho((log t_i(x) - log T_i) / s) + sum_j ((x_j - prior_j) / spread_j)^2

rho is the soft absolute value, s = 8 %, w_i one over the number of rows of the same run. Measured kernels are terms of
the sum like runs. A prior is what a data sheet says, its spread how far it may be wrong for what training does.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Sequence

import numpy as np
from scipy.optimize import least_squares

from benchmarks.published_cells import Case
from benchmarks.published_kernels import KernelRow
from mindspeed_fx.cost.device import Constant, Hardware
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.cost.training import PRIOR, TrainingConstants
from mindspeed_fx.planning.predict.step_work import StepWork, step_work
from mindspeed_fx.planning.predict.timing import time_step

SCALE = 0.08
WEIGHT = {"ci time": 0.35}
"""Tests of models cut to a few layers are not what the constants are for, but know most about the host."""


@dataclass(frozen=True)
class Parameter:
    """One constant."""

    path: str
    """Of a :class:`Hardware` ("tiers.0.efficiency") or, after "run.", of the training constants."""
    prior: float
    spread: float
    """Of its logarithm."""
    top: float = float("inf")


ASCEND = (
    Parameter("matrix_efficiency", 0.86, 0.08, 0.95),
    Parameter("product_ramp", 150.0, 0.6),
    Parameter("attention_forward", 0.45, 0.2),
    Parameter("attention_backward", 0.40, 0.25),
    Parameter("attention_ramp", 300.0, 0.7),
    Parameter("memory_efficiency", 0.60, 0.2, 0.95),
    Parameter("launch", 5e-6, 0.5),
    Parameter("tiers.0.efficiency", 0.65, 0.15, 0.95),
    Parameter("tiers.1.efficiency", 0.70, 0.25, 0.95),
    Parameter("run.host", 12e-6, 0.4),
    Parameter("run.contention", 0.15, 0.6),
    Parameter("run.exposed_sends", 1.0, 0.3),
    Parameter("run.imbalance", 1.15, 0.1),
    Parameter("run.permutation", 1.5, 0.5),
    Parameter("run.microbatch", 2e-3, 1.0),
    Parameter("run.step", 0.05, 1.0),
    Parameter("run.framework.legacy", 1.0, 0.1),
    Parameter("run.framework.mindspore", 1.0, 0.15),
)
NVIDIA = (
    Parameter("matrix_efficiency", 0.75, 0.08, 0.95),
    Parameter("product_ramp", 150.0, 0.6),
    Parameter("attention_forward", 0.50, 0.25),
    Parameter("attention_backward", 0.40, 0.25),
    Parameter("attention_ramp", 300.0, 0.7),
    Parameter("memory_efficiency", 0.80, 0.2, 0.95),
    Parameter("launch", 4e-6, 0.5),
    Parameter("tiers.0.efficiency", 0.71, 0.15, 0.95),
    Parameter("tiers.1.efficiency", 0.80, 0.25, 0.95),
    Parameter("run.host", 8e-6, 0.4),
    Parameter("run.contention", 0.15, 0.6),
    Parameter("run.imbalance", 1.15, 0.1),
    Parameter("run.permutation", 1.5, 0.5),
    # FlashAttention 2 is 1.3 to 2.5 times FlashAttention in Triton (arXiv 2307.08691), FlashAttention 3 is 1.5 to 2.0
    # times FlashAttention 2 on H100 (arXiv 2407.08608).
    Parameter("run.early_attention", 2.5, 0.3),
    Parameter("run.microbatch", 2e-3, 1.0),
    Parameter("run.step", 0.02, 1.0),
    Parameter("run.framework.fsdp", 1.0, 0.1),
)
AMPERE = tuple(
    dataclasses.replace(p, prior=1.5) if p.path == "run.early_attention" else p for p in NVIDIA
)  # FlashAttention 2 is the current one
PARAMETERS = {"ascend": ASCEND, "h100": NVIDIA, "a100": AMPERE}


def group_of(name: str) -> str:
    """The devices that share a fit."""
    return "ascend" if name.startswith("ascend") else "h100" if name == "h200" else name


def with_values(name: str, parameters: tuple[Parameter, ...], x: np.ndarray) -> tuple[Hardware, TrainingConstants]:
    """A device and its training constants with the parameters' values."""
    hw, constants = hardware(name), PRIOR
    fields: dict = {}
    run: dict = {}
    framework = {}
    tiers = list(hw.tiers)
    for p, value in zip(parameters, np.exp(x)):
        path = p.path.split(".")
        constant = Constant(float(min(value, p.top)), "", "fit", "medium")
        if path[0] == "run" and path[1] == "framework":
            framework[path[2]] = constant
        elif path[0] == "run":
            run[path[1]] = constant
        elif path[0] == "tiers":
            if int(path[1]) < len(tiers):
                tiers[int(path[1])] = dataclasses.replace(tiers[int(path[1])], efficiency=constant)
        else:
            fields[path[0]] = constant
    hw = dataclasses.replace(hw, **fields, tiers=tuple(tiers))
    return hw, dataclasses.replace(constants, **run, framework=framework)


def formulas(hw: Hardware, constants: TrainingConstants) -> tuple[Hardware, TrainingConstants]:
    """The same device without the kernels that were measured: constants are those of the formulas alone."""
    return dataclasses.replace(hw, measured=()), constants


@dataclass
class Fit:
    parameters: tuple[Parameter, ...]
    x: np.ndarray
    spread: np.ndarray
    """Standard deviation of each x from the residuals' curvature."""

    def seconds(self, case: Case, work: StepWork | None = None) -> float:
        hw, constants = with_values(case.hardware, self.parameters, self.x)
        return time_step(case.model, case.run, work or step_work(case.model, case.run), hw, constants).seconds


def fit(
    cases: list[Case], group: str, start: np.ndarray | None = None, steps: int = 25, kernels: Sequence[KernelRow] = ()
) -> Fit:
    """The constants of one group of devices from its runs, and from single kernels."""
    parameters = PARAMETERS[group]
    prior = np.log([p.prior for p in parameters])
    spread = np.array([p.spread for p in parameters])
    works = [step_work(c.model, c.run) for c in cases]
    same = Counter((c.what, c.config) for c in cases)
    weight = np.array([WEIGHT.get(c.kind, 1.0) * same[c.what, c.config] ** -0.5 for c in cases])
    target = np.log([c.published for c in cases])
    names = sorted({c.hardware for c in (*cases, *kernels)})

    def residuals(x: np.ndarray) -> np.ndarray:
        devices = {n: formulas(*with_values(n, parameters, x)) for n in names}
        model = [time_step(c.model, c.run, w, *devices[c.hardware]).seconds for c, w in zip(cases, works)]
        misses = weight * (np.log(model) - target) / SCALE
        # Soft absolute value of the runs alone: the priors stay squares.
        soft = np.sign(misses) * np.sqrt(2 * (np.sqrt(1 + misses**2) - 1))
        single = [math.log(k.seconds(devices[k.hardware][0]) / k.published) / SCALE for k in kernels]
        return np.concatenate([soft, single, (x - prior) / spread])

    result = least_squares(residuals, prior if start is None else start, method="trf", max_nfev=steps, diff_step=1e-3)
    covariance = np.linalg.inv(result.jac.T @ result.jac)
    return Fit(parameters, result.x, np.sqrt(np.diag(covariance)))
