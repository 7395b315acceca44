"""The attained speed of a machine: measured tables, and factors fitted to measured runs.

Without measurements the profile holds assumed efficiencies, and every plan is marked as uncalibrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, PositiveFloat

from m6.errors import UserError
from m6.files import write_json
from m6.validation import Section, read_model

StepPart = Literal["matmul", "experts", "elementwise", "launch", "exchange", "reduction", "update", "host"]
"""The parts of a step with a fitted factor."""
STEP_PARTS: tuple[StepPart, ...] = get_args(StepPart)
CollectiveKind = Literal["all_reduce", "all_gather", "all_to_all"]
_SMALL_BYTES = 1 << 16
_EFFICIENCIES = ("matmul_efficiency", "bandwidth_efficiency", "link_efficiency")
# The largest errors of predicted steps seen on one H100: the excess of measured over predicted seconds, as a share of
# the prediction, with the rates of the data sheet and with a calibration
# (scripts/benchmarks/results/gpu_training.md).
_SEEN_ERRORS: dict[str, tuple[float, float]] = {
    "whole steps": (0.30, 0.24),  # 1.4 B: 0.245 s for 0.189 and 0.198
    "recomputed steps": (0.84, 0.68),  # 1.4 B: 0.413 s for 0.225 and 0.246; first steps took 0.81 longer
    # 10.8 B: 8.1 and 4.2 s for 1.6. 2.8 B: 1.075 s for 0.721 and 0.432.
    "steps with experts or optimizer on the host": (4.07, 1.49),
}
_FASTEST, _SLOWEST = (0.85, 0.9, 0.8), (0.5, 0.65, 0.3)


class MatmulPoint(Section):
    """A measured matrix product [m, k] x [k, n]; with ``count`` above 1, one grouped call of so many products."""

    m: int = Field(gt=0, description="rows of each product")
    n: int = Field(gt=0, description="columns of the result")
    k: int = Field(gt=0, description="length of the dot products")
    dtype: str = Field(description="data type of the operands")
    count: int = Field(1, gt=0, description="experts")
    flops: PositiveFloat = Field(description="2 m n k count / seconds")


class CollectivePoint(Section):
    """A measured collective."""

    kind: CollectiveKind = Field(description="which collective")
    tier: Literal["device", "network"] = Field(description="the slowest link that the collective uses")
    ranks: int = Field(gt=1, description="size of the group")
    num_bytes: int = Field(gt=0, description="input of one rank; of all_gather its output")
    seconds: PositiveFloat = Field(description="median")


class Profile(Section):
    """A calibration.

    The defaults are round figures, somewhat below the best fit to the layouts published by BigScience (models of 4 to
    200 B parameters on A100s, scripts/benchmarks/results/planner_published.md). So predicted steps are rather too long.
    """

    source: str = Field("assumed efficiencies, nothing measured", description="machine, date and versions")
    calibrated: bool = Field(False, description="whether the tables were measured")
    matmul: list[MatmulPoint] = Field(default_factory=list, description="measured matrix products")
    collectives: list[CollectivePoint] = Field(default_factory=list, description="measured collectives")
    matmul_efficiency: float = Field(0.7, gt=0, le=1, description="share of the peak FLOP/s where nothing was measured")
    bandwidth_efficiency: float = Field(0.8, gt=0, le=1, description="share of the peak of memory bandwidths")
    link_efficiency: float = Field(0.5, gt=0, le=1, description="share of the peak of links between devices and nodes")
    memory_bandwidth_bytes_per_s: PositiveFloat | None = Field(None, description="measured, of one device")
    kernel_s: float = Field(1e-5, ge=0, description="least seconds of an operator: its launch")
    update_s_per_parameter: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="measured seconds of the optimizer's step on the device, by its type"
    )
    host_update_s_per_parameter: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="measured seconds of PyTorch's optimizer, as DeepSpeed runs it, on one core of the host, by type",
    )
    host_copy_bytes_per_s: PositiveFloat | None = Field(None, description="measured, between host and device")
    activation_factor: PositiveFloat = Field(
        1.0, description="fitted to measured runs: bytes that the allocator holds for each byte of activations"
    )
    process_bytes: int = Field(
        0, ge=0, description="device memory of the process without tensors: driver, libraries, allocator"
    )
    host_bytes: int = Field(0, ge=0, description="host memory of the process without tensors")
    checkpoint_bytes_per_s: PositiveFloat | None = Field(None, description="measured writing speed of one rank")
    factors: dict[StepPart, PositiveFloat] = Field(
        default_factory=dict, description="fitted to measured runs: measured over predicted seconds, by part of a step"
    )

    def bounds(self) -> tuple[Profile, Profile]:
        """The profiles of the fastest and of the slowest expected steps.

        Calibrated: a fifth faster and slower, about the largest error of the fitted planner on the published layouts.
        Otherwise: high and low assumed efficiencies; the measured times of all these layouts lie between their
        predictions.
        """
        if self.calibrated:
            changes: list[dict[str, Any]] = [
                {"factors": {part: self.factor(part) * factor for part in STEP_PARTS}} for factor in (0.8, 1.2)
            ]
        else:
            changes = [dict(zip(_EFFICIENCIES, values, strict=True)) for values in (_FASTEST, _SLOWEST)]
        faster, slower = (self.model_copy(update=change) for change in changes)
        return faster, slower

    def seen_error(self, recomputes: bool, on_host: bool) -> tuple[str, float]:
        """The kind of a step on a GPU, and the largest error seen for this kind, as a share of the prediction.

        The error is 0 where factors were fitted to runs, see ``bounds``.

        Args:
            recomputes: activations.
            on_host: whether DeepSpeed or ``m6.offload`` keeps states in host memory.
        """
        kind = list(_SEEN_ERRORS)[2 if on_host else int(recomputes)]
        return kind, 0.0 if self.factors else _SEEN_ERRORS[kind][int(self.calibrated)]

    def measured_flops(self, m: int, n: int, k: int, dtype: str, count: int = 1) -> float | None:
        """FLOP/s of ``count`` products [m, k] x [k, n], interpolated between the measured points; None without any.

        The result is the weighted geometric mean of the points of the same ``dtype``. The weights are 1 / distance^2
        in the logarithms of the sizes, so a measured size gets its own measurement.
        """
        # Grouped products run in other kernels, so rates of single products do not apply to them.
        points = [p for p in self.matmul if p.dtype == dtype and (p.count > 1) == (count > 1)]
        if not points:
            return None
        total = weights = 0.0
        for point in points:
            # The count of a grouped product matters less than its sizes: a quarter of the weight.
            distance = (
                math.log2(m / point.m) ** 2
                + math.log2(n / point.n) ** 2
                + math.log2(k / point.k) ** 2
                + math.log2(count / point.count) ** 2 / 4
            )
            weight = 1 / max(distance, 1e-6)
            total += weight * math.log(point.flops)
            weights += weight
        return math.exp(total / weights)

    def collective_line(self, kind: CollectiveKind, tier: str, ranks: int) -> tuple[float, float] | None:
        """(latency in seconds, seconds a byte), measured on the nearest number of ranks; None if not measured."""
        points = [p for p in self.collectives if p.kind == kind and p.tier == tier]
        if not points:
            return None
        nearest = min({p.ranks for p in points}, key=lambda size: abs(math.log2(size / ranks)))
        return _line([(p.num_bytes, p.seconds) for p in points if p.ranks == nearest])

    def factor(self, part: StepPart) -> float:
        """The fitted factor of a part of a step; 1 where nothing was fitted."""
        return self.factors.get(part, 1.0)


def load_profile(path: Path) -> Profile:
    """Reads a profile written by ``m6 plan calibrate``.

    Raises:
        UserError: the file is missing, or a key or value is wrong; the message names it.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; `m6 plan calibrate --out {path}` makes it")
    return read_model(Profile, path)


def save_profile(profile: Profile, path: Path) -> None:
    """Writes a profile for :func:`load_profile`."""
    write_json(path, profile.model_dump(mode="json"))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(latency, seconds a byte) of (bytes, seconds): the latency from small messages, the rate from the largest one."""
    smallest, largest = min(points), max(points)
    if smallest[0] == largest[0]:
        return 0.0, largest[1] / largest[0]
    latency = min(seconds for num_bytes, seconds in points if num_bytes <= max(_SMALL_BYTES, smallest[0]))
    return latency, max(largest[1] - latency, 0.0) / largest[0]
