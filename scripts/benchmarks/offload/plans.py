"""What plans move, against the bound of the linear programme and other systems' rules; what they make possible.

python scripts/benchmarks/offload/plans.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from offload.plan import solve
from scripts.benchmarks.offload.replays import lru, patrickstar, zero_3_offload
from scripts.benchmarks.offload.traces import GRADIENT, Job, gpt, m6_10t
from scripts.benchmarks.record import Recorder

GB = 1e9
_LAYER_STEP = 5


def fits(job: Job) -> bool:
    """Whether a plan meets both budgets."""
    try:
        solve(job.trace, job.sizes, job.device_bytes, host_budget_bytes=job.host_bytes)
    except ValueError:
        return False
    return True


def largest_gpt(micro_batch_size: int, hidden_size: int = 8192) -> float:
    """Billions of parameters of the deepest GPT of this width that Adam trains on 8 x 32 GB and 240 GB."""
    layers = _LAYER_STEP
    while fits(gpt(layers + _LAYER_STEP, hidden_size, micro_batch_size)):
        layers += _LAYER_STEP
    return layers * 12 * hidden_size**2 / 1e9


def main() -> None:
    title = "Plans of offloading: bytes moved, largest model, and the plan for 10 T parameters"
    recorder = Recorder("offload_plans", title)
    rows: list[list[str]] = []
    gpts: list[dict[str, Any]] = []
    plans_10t: list[dict[str, Any]] = []
    for mixed in (False, True):
        for micro_batch_size in (4, 8, 16, 24, 32):
            job = gpt(60, 4096, micro_batch_size, mixed=mixed)
            plan = solve(job.trace, job.sizes, job.device_bytes, host_budget_bytes=job.host_bytes)
            bytes_: dict[str, float] = {
                "plan": plan.moved_bytes,
                "bound": plan.bound_bytes,
                "patrickstar": patrickstar(job),
                "zero_3_offload": zero_3_offload(job),
                "lru": lru(job),
            }
            gpts.append({"micro_batch_size": micro_batch_size, "mixed": mixed, **bytes_})
            moved = max(plan.moved_bytes, 1)
            rows.append(
                [
                    f"GPT 12 B, micro-batch {micro_batch_size}, {'mixed' if mixed else 'equal'} chunks",
                    f"{plan.moved_bytes / GB:.2f}",
                    f"{plan.bound_bytes / GB:.2f}",
                    f"{plan.moved_bytes / plan.bound_bytes:.3f}" if plan.bound_bytes > 1 else "both 0",
                    *(
                        f"{bytes_[name] / GB:.2f}" + (f" ({bytes_[name] / moved:.1f}x)" if plan.moved_bytes else "")
                        for name in ("patrickstar", "zero_3_offload", "lru")
                    ),
                ]
            )
    largest = {micro_batch_size: largest_gpt(micro_batch_size) for micro_batch_size in (1, 4, 8)}
    lines = []
    for activation_gb in (0, 8, 16):
        begin = time.process_time()
        job = m6_10t(4, int(activation_gb * GB))
        states = sum(size.owned for size in job.sizes)
        gradients = GRADIENT * job.parameters
        try:
            plan = solve(job.trace, job.sizes, job.device_bytes, host_budget_bytes=job.host_bytes)
            outcome = (
                f"{plan.upload_bytes / GB:.1f} GB up, {plan.download_bytes / GB:.1f} GB down, "
                f"{len(plan.owned)} of {len(job.sizes)} chunks owned"
            )
        except ValueError as error:
            outcome = f"no plan: {error}"
        seconds = time.process_time() - begin
        lines.append(
            f"- M6-10T, one of 512 equal ranks, {activation_gb} GB for all but experts: {outcome}; "
            f"{seconds:.1f} s of processor time. "
            f"Chunks need {states / GB:.1f} GB with gradients, {(states - gradients) / GB:.1f} GB without."
        )
        plans_10t.append({"activation_gb": activation_gb, "outcome": outcome, "processor_seconds": seconds})
    notes = "\n".join(
        [
            "GB per rank and step, both directions. 8 ranks of 32 GB and 240 GB of host memory, 90 % of each usable.",
            "PatrickStar, ZeRO-3 offload and LRU are replays of their rules on the same step (`replays.py`), not runs.",
            "",
            "- largest GPT of width 8192 that Adam trains there, gradients kept until the norm is known: "
            + ", ".join(f"{billions:.1f} B at micro-batch {size}" for size, billions in largest.items())
            + " (PatrickStar's own report: 18 B; ZeRO-3 offload by its 20 bytes per parameter: 10.8 B)",
            *lines,
        ]
    )
    header = ["step", "plan", "bound", "plan / bound", "PatrickStar's rule", "ZeRO-3 offload", "LRU"]
    recorder.write(header, rows, notes, {"gpt_12b": gpts, "largest_billions": largest, "m6_10t": plans_10t})


if __name__ == "__main__":
    main()
