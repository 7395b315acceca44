"""The host's AdamW in one pass against the memory's own speed, and against PyTorch's fused AdamW and DeepSpeed's CPU
Adam with the passes that 16-bit training needs beside them; and the host's Adafactor against PyTorch's.

python scripts/benchmarks/offload/host_optimizer.py
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from offload.optimizer.master_weights import remainder_dtype, write_master
from offload.optimizer.settings import OptimizerSettings
from offload.optimizer.update import update
from scripts.benchmarks.record import Recorder, spread

PARAMETERS = 16_000_000
ROUNDS = 15
# Bytes of memory per parameter that each must at least read or write.
BYTES = {
    "one pass, split master": 26,
    "the same bytes without arithmetic": 26,
    "fused AdamW alone, fp32": 28,
    "fused AdamW with both casts": 40,
    "DeepSpeedCPUAdam with both casts": 40,
    "AdamW, float16 without masters": 22,
    "Adafactor, bfloat16 without masters": 12,
    "Adafactor, float16 without masters": 12,
    "Adafactor, float16, whole masters": 20,
    "PyTorch's Adafactor alone, fp32": 12,
}
SHAPE = (1, 4000, PARAMETERS // 4000)


def host_update(kind: Literal["adamw", "adafactor"], dtype: torch.dtype, masters: bool = True) -> Callable[[], object]:
    """Weight, master and moments in and out, gradient in; Adafactor reads gradients three times and weights twice."""
    stored = remainder_dtype(dtype, masters)
    weight, rest = torch.empty(SHAPE, dtype=dtype), None if stored is None else torch.empty(SHAPE, dtype=stored)
    write_master(0.02 * torch.randn(SHAPE), weight, rest)
    gradient = torch.randn(SHAPE).to(dtype)
    settings = OptimizerSettings(kind, weight_decay=0.01, masters=masters)
    states = {name: torch.zeros(shape) for name, shape in settings.states(SHAPE).items()}
    return lambda: update(settings, 10, 1e-3, 0.5, weight, rest, gradient, states)


def pytorch_adafactor() -> Callable[[], object]:
    """PyTorch's Adafactor, which makes several tensors of the matrix's size."""
    weight = torch.nn.Parameter(0.02 * torch.randn(SHAPE[1:]))
    weight.grad = torch.randn(SHAPE[1:])
    return torch.optim.Adafactor([weight], lr=1e-3, weight_decay=0.01).step


def fused(casts: bool) -> Callable[[], object]:
    """Gradient 4 in; master 4, moments 8 in and out. The casts: gradient 2 in, 4 out; master 4 in, weight 2 out."""
    master = torch.nn.Parameter(torch.randn(PARAMETERS))
    master.grad = torch.randn(PARAMETERS)
    gradient, weight = torch.randn(PARAMETERS).bfloat16(), torch.empty(PARAMETERS, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([master], lr=1e-3, weight_decay=0.01, fused=True)
    optimizer.step()

    def run() -> None:
        if casts:
            torch.mul(gradient, 0.5, out=master.grad)
        optimizer.step()
        if casts:
            weight.copy_(master.detach())

    return run


def stream() -> Callable[[], object]:
    """As AdamW with split masters, without the arithmetic."""
    source = Path(__file__).with_name("stream.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stream.so"
        command = ["g++", "-O3", "-march=native", "-fPIC", "-shared", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        function = ctypes.CDLL(str(library)).stream
    halves = [torch.zeros(PARAMETERS, dtype=torch.int16) for _ in range(3)]
    moments = [torch.zeros(PARAMETERS) for _ in range(2)]

    def run() -> None:
        function(ctypes.c_ssize_t(PARAMETERS), *(ctypes.c_void_p(each.data_ptr()) for each in (*halves, *moments)))

    return run


def deepspeed_chain() -> Callable[[], object]:
    """What ZeRO-Offload does (DeepSpeed 0.19.8): the gradient is cast up and unscaled, the step, a cast down."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    master = torch.nn.Parameter(torch.randn(PARAMETERS))
    master.grad = torch.randn(PARAMETERS)
    gradient, weight = torch.randn(PARAMETERS).bfloat16(), torch.empty(PARAMETERS, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([master], lr=1e-3, weight_decay=0.01, adamw_mode=True)

    def run() -> None:
        torch.mul(gradient, 0.5, out=master.grad)
        optimizer.step()
        weight.copy_(master.detach())

    return run


def main() -> None:
    torch.set_num_threads(1)
    recorder = Recorder(
        "offload_host_optimizer",
        "The host's optimizers: one pass of AdamW against the memory, PyTorch's fused step and DeepSpeed's; Adafactor",
    )
    runs = dict(
        zip(
            BYTES,
            (
                host_update("adamw", torch.bfloat16),
                stream(),
                fused(False),
                fused(True),
                deepspeed_chain(),
                host_update("adamw", torch.float16, masters=False),
                host_update("adafactor", torch.bfloat16, masters=False),
                host_update("adafactor", torch.float16, masters=False),
                host_update("adafactor", torch.float16),
                pytorch_adafactor(),
            ),
            strict=True,
        )
    )
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            if number:  # the first compiles and touches memory
                seconds[name].append(time.process_time() - begin)
    ours = seconds["one pass, split master"]
    rows = [
        [
            name,
            spread([1000 * value for value in values], ".1f"),
            spread([1e9 * value / PARAMETERS for value in values], ".2f"),
            spread([BYTES[name] * PARAMETERS / value / 1e9 for value in values], ".1f"),
            spread([other / own for other, own in zip(values, ours, strict=True)], ".2f"),
        ]
        for name, values in seconds.items()
    ]
    notes = (
        f"{PARAMETERS:,} parameters, one thread, {ROUNDS} rounds in which all take turns; processor time, median "
        "(10th to 90th percentile). GB/s counts the bytes that an implementation has to move. The aims: the same bytes "
        "without arithmetic take at least 0.85 of one pass's time, and DeepSpeed's chain 1.4 of it."
    )
    header = ["", "ms", "ns a parameter", "GB/s", "time over one pass's"]
    recorder.write(header, rows, notes, {"seconds": seconds, "parameters": PARAMETERS})


if __name__ == "__main__":
    main()
