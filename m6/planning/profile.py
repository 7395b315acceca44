"""What a machine attains of its peaks: measured tables, and factors that are fitted to runs.

Without measurements every plan says that it is uncalibrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat

from m6.errors import UserError
from m6.files import write_json
from m6.validation import Section, parse_json, validate

Part = Literal["matmul", "experts", "elementwise", "launch", "exchange", "reduction", "update", "host"]
PARTS: tuple[Part, ...] = (
    "matmul",
    "experts",
    "elementwise",
    "launch",
    "exchange",
    "reduction",
    "update",
    "host",
)
CollectiveKind = Literal["all_reduce", "all_gather", "all_to_all"]
_SMALL_BYTES = 1 << 16


class MatmulPoint(Section):
    """``count`` products [m, k] x [k, n], side by side in one grouped call where there are more than one."""

    m: int = Field(gt=0, description="rows of each")
    n: int = Field(gt=0, description="columns of the result")
    k: int = Field(gt=0, description="length of the sums")
    dtype: str = Field(description="of the operands")
    count: int = Field(1, gt=0, description="experts")
    flops: PositiveFloat = Field(description="2 m n k count / seconds")


class CollectivePoint(Section):
    kind: CollectiveKind = Field(description="which collective")
    tier: Literal["device", "network"] = Field(description="the slowest link on the way")
    ranks: int = Field(gt=1, description="size of the group")
    num_bytes: int = Field(gt=0, description="what one rank contributes; all_gather: what it ends up with")
    seconds: PositiveFloat = Field(description="median")


class Profile(Section):
    """A calibration. The defaults are assumptions: half of the matrix peak, four fifths of the bandwidths."""

    source: str = Field("assumed efficiencies, nothing measured", description="machine, date and versions")
    calibrated: bool = Field(False, description="whether the tables were measured")
    matmul: list[MatmulPoint] = Field(default_factory=list, description="measured matrix products")
    collectives: list[CollectivePoint] = Field(default_factory=list, description="measured collectives")
    matmul_efficiency: float = Field(0.5, gt=0, le=1, description="share of the peak where nothing was measured")
    bandwidth_efficiency: float = Field(0.8, gt=0, le=1, description="share of memory and link bandwidths")
    memory_bandwidth_bytes_per_s: PositiveFloat | None = Field(None, description="measured, of one device")
    kernel_s: float = Field(1e-5, ge=0, description="seconds an operator takes at least")
    update_s_per_parameter: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="measured seconds of the optimizer on the device, by its type"
    )
    host_update_s_per_parameter: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="the same on one core of the host"
    )
    host_copy_bytes_per_s: PositiveFloat | None = Field(None, description="measured, host to device and back")
    activation_factor: PositiveFloat = Field(
        1.0, description="fitted to measured runs: bytes held for each byte of activations"
    )
    process_bytes: int = Field(0, ge=0, description="device memory that is held beside tensors")
    host_bytes: int = Field(0, ge=0, description="host memory of a process beside tensors")
    checkpoint_bytes_per_s: PositiveFloat | None = Field(None, description="measured writing speed of one rank")
    factors: dict[Part, PositiveFloat] = Field(
        default_factory=dict, description="fitted to measured runs: seconds over predicted seconds, by part"
    )

    def attained_flops(self, peak: float, m: int, n: int, k: int, dtype: str, count: int = 1) -> float:
        """FLOP/s of a product: the measured ones nearest in the logarithms of the sizes, or a share of ``peak``.

        The points' logarithms are averaged with weights 1 / distance^2; on a measured point it is that point.
        """
        points = [p for p in self.matmul if p.dtype == dtype and (p.count > 1) == (count > 1)]
        if not points:
            return peak * self.matmul_efficiency
        total = weights = 0.0
        for point in points:
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
        """(seconds of the smallest message, seconds for a byte) measured at the nearest group size, or None."""
        points = [p for p in self.collectives if p.kind == kind and p.tier == tier]
        if not points:
            return None
        nearest = min({p.ranks for p in points}, key=lambda size: abs(math.log2(size / ranks)))
        return _line([(p.num_bytes, p.seconds) for p in points if p.ranks == nearest])

    def factor(self, part: Part) -> float:
        return self.factors.get(part, 1.0)


def load_profile(path: Path) -> Profile:
    """Reads what ``m6 plan calibrate`` wrote.

    Raises:
        UserError: a missing file, or a key or value that is wrong.
    """
    try:
        return validate(Profile, parse_json(path.read_text(encoding="utf-8")), "")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `m6 plan calibrate --out {path}` makes it") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None


def save_profile(profile: Profile, path: Path) -> None:
    write_json(path, profile.model_dump(mode="json"))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency from the small messages, seconds a byte from the largest."""
    smallest, largest = min(points), max(points)
    if smallest[0] == largest[0]:
        return 0.0, largest[1] / largest[0]
    latency = min(seconds for num_bytes, seconds in points if num_bytes <= max(_SMALL_BYTES, smallest[0]))
    return latency, max(largest[1] - latency, 0.0) / largest[0]
