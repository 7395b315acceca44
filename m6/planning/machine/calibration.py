"""Measures this machine: one device, and under a launcher the links between ranks.

Also scores predictions against measured steps, and fits factors to measured steps.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from m6.files import atomic_path, sha256
from m6.planning.machine.profile import STEP_PARTS, CollectiveKind, CollectivePoint, MatmulPoint, Profile, StepPart

# Sizes of products by type of device: products have to fill a GPU. _GROUPED is (experts, rows of each expert).
_SQUARES = {"cpu": (64, 128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192)}
_ROWS = {"cpu": (64, 512, 4096), "cuda": (512, 4096, 32768)}
_WIDTHS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192)}
_GROUPED = {
    "cpu": ((8, 64), (8, 512), (32, 64), (32, 256)),
    "cuda": ((8, 128), (8, 1024), (8, 8192), (64, 32), (64, 256), (64, 1024)),
}
_GROUPED_WIDTHS = {
    "cpu": ((512, 128), (128, 512), (2048, 512)),
    "cuda": ((2048, 512), (512, 2048), (4096, 1024), (1024, 4096), (8192, 2048), (2048, 8192)),
}
_COLLECTIVE_PARTS = ("exchange", "reduction")  # parts of a step with collectives
_COLLECTIVE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25)
_MAX_FLOPS = {"cpu": 2e10, "cuda": 1e14}  # larger products would take seconds
_UPDATED = {"cpu": 1 << 22, "cuda": 1 << 26}  # parameters
_REPEATS = 5
_LEAST_S = 2e-3  # of a measurement on a GPU; shorter ones would measure the host's launches, not the queued kernels
_WRITTEN_TENSORS = 16  # of 16 MiB
OptimizerMaker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def calibrate(
    device: torch.device,
    optimizers: Mapping[str, OptimizerMaker],
    previous: Profile | None = None,
    disk: Path | None = None,
    nodes: Collection[str] = (),
) -> Profile:
    """Measures ``device`` and, with several ranks, collectives over all of them.

    The memory of the process is part of the profile, so the caller first imports all modules of a run.

    Args:
        device: the device of this rank.
        optimizers: makers of the measured optimizers, by their type in a run's JSON.
        previous: a profile. Its collectives of other group sizes, its activation factor and its checkpoint speed are
            kept. If several ranks measure, the measurements of a single process are kept, too. Its factors were fitted
            to its rates, so the factors of newly measured parts are dropped.
        disk: a folder in which all ranks write a file at the same time, to measure the writing of checkpoints.
        nodes: the name of each rank's node; none: all ranks are on one.
    """
    written = _write_bytes_per_s(disk) if disk is not None else previous and previous.checkpoint_bytes_per_s
    collectives = _collectives(device, "device" if len(set(nodes)) <= 1 else "network")
    kept = [] if previous is None else [p for p in previous.collectives if not _is_replaced(p, collectives)]
    world = dist.get_world_size() if dist.is_initialized() else 1
    # Ranks on one CPU disturb each other, so the products measured by a single process are kept.
    if previous is not None and previous.calibrated and world > 1:
        factors = {part: factor for part, factor in previous.factors.items() if part not in _COLLECTIVE_PARTS}
        return previous.model_copy(
            update={
                "collectives": kept + collectives,
                "checkpoint_bytes_per_s": written or None,
                "factors": factors,
            }
        )
    host_bytes = psutil.Process().memory_info().rss
    process_bytes = 0
    if device.type == "cuda":
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        # Used on the device, but not by PyTorch's allocator.
        process_bytes = total - free - torch.cuda.memory_reserved(device)
    types = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16, torch.float16)
    return Profile(
        source=f"{_device_name(device)}, {date.today()}, torch {torch.__version__}, threads {torch.get_num_threads()}",
        calibrated=True,
        matmul=[point for dtype in types for point in (*_matmuls(device, dtype), *_grouped(device, dtype))],
        collectives=kept + collectives,
        memory_bandwidth_bytes_per_s=_memory_bandwidth(device),
        kernel_s=_kernel_s(device),
        update_s_per_parameter={name: _update_s(device, make) for name, make in optimizers.items()},
        host_update_s_per_parameter={name: _host_update_s(make) for name, make in optimizers.items()},
        host_copy_bytes_per_s=_host_copy_bytes_per_s(device),
        process_bytes=process_bytes,
        host_bytes=host_bytes,
        checkpoint_bytes_per_s=written or None,
        activation_factor=1.0 if previous is None else previous.activation_factor,
    )


def _matmuls(device: torch.device, dtype: torch.dtype) -> Iterable[MatmulPoint]:
    sizes = {(size, size, size) for size in _SQUARES[device.type]}
    widths = _WIDTHS[device.type]
    sizes |= {(m, n, k) for m in _ROWS[device.type] for n in widths for k in widths}
    for m, n, k in sorted(sizes):
        flops = 2.0 * m * n * k
        if flops > _MAX_FLOPS[device.type]:
            continue
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        seconds = _seconds(lambda a=a, b=b: torch.nn.functional.linear(a, b), device)  # type: ignore[misc]
        yield MatmulPoint(m=m, n=n, k=k, dtype=_name(dtype), flops=flops / seconds)


def _grouped(device: torch.device, dtype: torch.dtype) -> Iterable[MatmulPoint]:
    for count, rows in _GROUPED[device.type]:
        for n, k in _GROUPED_WIDTHS[device.type]:
            a = torch.randn(count * rows, k, device=device, dtype=dtype)
            b = torch.randn(count, n, k, device=device, dtype=dtype)
            ends = torch.arange(rows, count * rows + 1, rows, device=device, dtype=torch.int32)

            def product(a: Tensor = a, b: Tensor = b, ends: Tensor = ends) -> Tensor:
                return torch.nn.functional.grouped_mm(a, b.mT, offs=ends)

            flops = 2.0 * count * rows * n * k
            yield MatmulPoint(
                m=rows, n=n, k=k, dtype=_name(dtype), count=count, flops=flops / _seconds(product, device)
            )


def _collectives(device: torch.device, tier: Literal["device", "network"]) -> list[CollectivePoint]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return []
    points = []
    for num_bytes in _COLLECTIVE_BYTES:
        # Equal shares of all ranks, of at least one element.
        numel = max(1, num_bytes // 4 // world) * world
        source, target = torch.zeros(numel, device=device), torch.empty(numel, device=device)
        operations: dict[CollectiveKind, Callable[[], object]] = {
            "all_reduce": lambda source=source: dist.all_reduce(source),  # type: ignore[misc]
            "all_gather": lambda s=source, t=target: dist.all_gather_single(t, s[: len(s) // world]),  # type: ignore[misc]
            "all_to_all": lambda s=source, t=target: dist.all_to_all_single(t, s),  # type: ignore[misc]
        }
        for kind, operation in operations.items():
            # All ranks call it equally often.
            seconds = torch.tensor(_seconds(operation, device, calls=1), device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            points.append(
                CollectivePoint(kind=kind, tier=tier, ranks=world, num_bytes=numel * 4, seconds=seconds.item())
            )
    return points


def _write_bytes_per_s(disk: Path) -> float:
    """Bytes a second of one rank while all ranks write, in wall-clock time until the slowest has synced its file.

    As for a checkpoint, the time includes reading the file again for its checksum.
    """
    rank, several = (dist.get_rank(), True) if dist.is_initialized() else (0, False)
    # Several tensors, as in a checkpoint. The file is synced: otherwise the page cache would hide the disk.
    file = disk / f"m6_calibration_{rank}"
    tensors = {str(index): torch.ones(1 << 22) for index in range(_WRITTEN_TENSORS)}
    disk.mkdir(parents=True, exist_ok=True)
    if several:
        dist.barrier()
    begin = time.perf_counter()
    try:
        with atomic_path(file) as temporary:
            save_file(tensors, temporary)
        sha256(file)
        if several:
            dist.barrier()
        seconds = time.perf_counter() - begin
    finally:
        file.unlink(missing_ok=True)
    return sum(tensor.nbytes for tensor in tensors.values()) / seconds


def _memory_bandwidth(device: torch.device) -> float:
    """Bytes a second of an operator with one tensor to read and a new one to write; both count."""
    source = torch.randn(1 << (23 if device.type == "cpu" else 27), device=device)
    return 2.0 * source.nbytes / _seconds(lambda: source + 1.0, device)


def _kernel_s(device: torch.device) -> float:
    x = torch.zeros(8, device=device)
    number = 200

    def many() -> None:
        for _ in range(number):
            x.add_(1.0)

    return _seconds(many, device) / number


def _update_s(device: torch.device, make: OptimizerMaker) -> float:
    """Seconds of an optimizer's step for each parameter."""
    side = 1 << 11
    weight = torch.nn.Parameter(torch.randn(_UPDATED[device.type] // side, side, device=device))
    weight.grad = torch.randn_like(weight)
    return _seconds(make([weight]).step, device) / weight.numel()


def _host_update_s(make: OptimizerMaker) -> float:
    """The same on one core of the host."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _update_s(torch.device("cpu"), make)
    finally:
        torch.set_num_threads(threads)


def _host_copy_bytes_per_s(device: torch.device) -> float | None:
    if device.type == "cpu":
        return None
    host = torch.empty(1 << 26, dtype=torch.uint8).pin_memory()
    there = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    return host.nbytes / _seconds(lambda: there.copy_(host, non_blocking=True), device)


def _seconds(operation: Callable[[], object], device: torch.device, calls: int | None = None) -> float:
    """Median seconds of a call, after one warm-up call.

    ``calls`` calls are measured together; None: one on a CPU, and on a GPU as many as fill ``_LEAST_S``.

    On a CPU with one thread these are seconds of processor time, since other programs do not disturb it. For a
    collective they leave out the waits of ranks for each other.
    """
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if one_thread else time.perf_counter

    def timed(calls: int) -> float:
        _wait(device)
        begin = clock()
        for _ in range(calls):
            operation()
        _wait(device)
        return (clock() - begin) / calls

    operation()
    if calls is None:
        calls = 1 if device.type == "cpu" else max(1, round(_LEAST_S / timed(1)))
    return statistics.median(timed(calls) for _ in range(_REPEATS))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_replaced(point: CollectivePoint, new: list[CollectivePoint]) -> bool:
    """Whether ``new`` has measurements of the same collective on the same number of ranks."""
    return any((point.kind, point.tier, point.ranks) == (p.kind, p.tier, p.ranks) for p in new)


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


# Weight of the pull of every factor to 1 (ridge regression). It decides if the runs do not separate two factors.
_PRIOR_WEIGHT = 0.003
_BOUNDS = (0.05, 20.0)
_ROUNDS = 2000


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's rank correlation: (concordant - discordant pairs) / all pairs; 1 is the same order, -1 the reverse."""
    pairs = list(itertools.combinations(range(len(predicted)), 2))
    if not pairs:
        return 0.0
    signs = [np.sign((predicted[a] - predicted[b]) * (measured[a] - measured[b])) for a, b in pairs]
    return float(sum(signs)) / len(pairs)


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The loss from choosing by prediction: measured seconds of the choice over the fastest measured ones, minus 1."""
    return measured[int(np.argmin(predicted))] / min(measured) - 1


def fit_factors(parts: Sequence[dict[str, float]], measured: Sequence[float]) -> dict[StepPart, float]:
    """The factor of each part of a step with the best fit to the measured steps.

    Least squares of relative errors with a pull of each factor to 1, by coordinate descent within bounds.

    Args:
        parts: predicted seconds of each run by part, without factors. Parts without a factor count as they are.
        measured: seconds of a step of each run.
    """
    target = np.asarray(measured)
    columns = np.array([[run.get(part, 0.0) for part in STEP_PARTS] for run in parts]) / target[:, None]
    others = np.array([sum(s for name, s in run.items() if name not in STEP_PARTS) for run in parts]) / target
    factors: NDArray[np.float64] = np.ones(len(STEP_PARTS))
    for _ in range(_ROUNDS):
        before = factors.copy()
        for index in range(len(STEP_PARTS)):
            column = columns[:, index]
            rest = 1 - others - columns @ factors + column * factors[index]
            best = (column @ rest + _PRIOR_WEIGHT) / (column @ column + _PRIOR_WEIGHT)
            factors[index] = np.clip(best, *_BOUNDS)
        if np.abs(factors - before).max() < 1e-9:
            break
    return {part: float(factor) for part, factor in zip(STEP_PARTS, factors, strict=True)}


def fit_memory(
    states: Sequence[float], activations: Sequence[float], measured: Sequence[float], constant: float
) -> tuple[float, float]:
    """(bytes of the process without tensors, bytes held for each byte of activations) with the best fit.

    Least squares of relative errors with a pull to ``constant`` and to 1, so a few runs change little.

    Args:
        states: predicted bytes of each run without activations and process.
        activations: predicted bytes of activations of each run.
        measured: bytes of each run.
        constant: calibrated bytes of the process.
    """
    scale = 1 / np.asarray(measured)
    unit = max(constant, 1.0)
    rows = np.stack([unit * scale, np.asarray(activations) * scale], axis=1)
    rows = np.concatenate([rows, _PRIOR_WEIGHT**0.5 * np.eye(2)])
    target = np.concatenate([1 - np.asarray(states) * scale, _PRIOR_WEIGHT**0.5 * np.ones(2)])
    own, factor = np.linalg.lstsq(rows, target, rcond=None)[0]
    return float(own) * unit, float(np.clip(factor, *_BOUNDS))
