"""What plans move, against the bound of the linear programme and other systems' rules; what they make possible.

python scripts/benchmarks/offload/plans.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from offload.memory.layout import Stack, lay_out, sizes_of, staging_bytes
from offload.optimizer.settings import OptimizerSettings
from offload.plan.solver import solve
from scripts.benchmarks.offload.traces import Job, gpt, lru, m6_10t, patrickstar, zero_3_offload
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


def largest_gpt(micro_batch_size: int, gradients_kept: bool, hidden_size: int = 8192) -> float:
    """Billions of parameters of the deepest GPT of this width that Adam trains on 8 x 32 GB and 240 GB."""
    layers = 1
    while fits(gpt(layers + 1, hidden_size, micro_batch_size, gradients_kept=gradients_kept)):
        layers += 1
    return layers * 12 * hidden_size**2 / 1e9


def host_bytes_per_parameter(kind: Literal["adamw", "adafactor"], gradients_kept: bool) -> float:
    """Of one rank of M6-10T, all on the host, with staging blocks: as ``OffloadRuntime.host_bytes`` counts them."""
    stacks = [Stack(f"layer_{n}", 20, {"w_in": (9984, 1024), "w_out": (1024, 9984)}) for n in range(48)]
    dtype = torch.bfloat16
    sizes = sizes_of(lay_out(stacks, 164 * 10**6, dtype, dtype if gradients_kept else None, OptimizerSettings(kind)))
    total = sum(size.owned for size in sizes) + staging_bytes(sizes)
    return total / sum(stack.num_experts * stack.expert_size for stack in stacks)


def compare(job: Job) -> dict[str, float]:
    """Bytes that a step moves by our plan, at least, and by the rules of others."""
    plan = solve(job.trace, job.sizes, job.device_bytes, host_budget_bytes=job.host_bytes)
    return {
        "plan": plan.moved_bytes,
        "bound": plan.bound_bytes,
        "patrickstar": patrickstar(job),
        "zero_3_offload": zero_3_offload(job),
        "lru": lru(job),
    }


def row(name: str, found: dict[str, float]) -> list[str]:
    moved, bound = found["plan"], found["bound"]
    others = [
        f"{found[name] / GB:.2f}" + (f" ({found[name] / moved:.1f}x)" if moved else "")
        for name in ("patrickstar", "zero_3_offload", "lru")
    ]
    ratio = f"{moved / bound:.3f}" if bound > 1 else "both 0"
    return [name, f"{moved / GB:.2f}", f"{bound / GB:.2f}", ratio, *others]


def main() -> None:
    title = "Plans of offloading: bytes moved, largest model, and the plan for 10 T parameters"
    recorder = Recorder("offload_plans", title)
    rows: list[list[str]] = []
    gpts: list[dict[str, Any]] = []
    for mixed in (False, True):
        for gradients_kept in (True, False):
            for micro_batch_size in (4, 8, 16, 24, 32):
                found = compare(gpt(60, 4096, micro_batch_size, mixed=mixed, gradients_kept=gradients_kept))
                gpts.append(
                    {"micro_batch_size": micro_batch_size, "mixed": mixed, "gradients_kept": gradients_kept, **found}
                )
                kept = "gradients kept" if gradients_kept else "update in backward"
                chunks = "mixed" if mixed else "equal"
                rows.append(row(f"GPT 12 B, micro-batch {micro_batch_size}, {chunks} chunks, {kept}", found))
    lines = []
    largest: dict[str, float] = {}
    for gradients_kept in (True, False):
        sizes = {size: largest_gpt(size, gradients_kept) for size in (1, 4, 8)}
        kept = "gradients kept until the norm is known" if gradients_kept else "update in the backward pass"
        largest |= {f"{kept}, micro-batch {size}": billions for size, billions in sizes.items()}
        lines.append(
            f"- largest GPT of width 8192 that Adam trains there, {kept}: "
            + ", ".join(f"{billions:.1f} B at micro-batch {size}" for size, billions in sizes.items())
            + " (PatrickStar's own report: 18 B; ZeRO-3 offload by its 20 bytes per parameter: 10.8 B)"
        )
    host: dict[str, float] = {}
    for kind in ("adamw", "adafactor"):
        for gradients_kept in (True, False):
            key = f"{kind}, {'gradients kept' if gradients_kept else 'update in backward'}"
            host[key] = host_bytes_per_parameter(kind, gradients_kept)
    lines.append(
        "- host bytes per parameter with staging, one rank of M6-10T, bfloat16: "
        + ", ".join(f"{number:.2f} ({key})" for key, number in host.items())
    )
    plans_10t: list[dict[str, Any]] = []
    for gradients_kept in (True, False):
        for activation_gb in (0, 8, 16):
            begin = time.process_time()
            job = m6_10t(4, int(activation_gb * GB), gradients_kept)
            try:
                plan = solve(job.trace, job.sizes, job.device_bytes, host_budget_bytes=job.host_bytes)
                outcome = (
                    f"{plan.upload_bytes / GB:.1f} GB up, {plan.download_bytes / GB:.1f} GB down, "
                    f"{len(plan.owned)} of {len(job.sizes)} chunks owned"
                )
            except ValueError as error:
                outcome = f"no plan: {error}"
            seconds = time.process_time() - begin
            kept = "gradients kept" if gradients_kept else "update in the backward pass"
            lines.append(
                f"- M6-10T, one of 512 equal ranks, Adafactor, {activation_gb} GB for all but experts, {kept}: "
                f"{outcome}; {seconds:.1f} s of processor time"
            )
            entry = {"activation_gb": activation_gb, "gradients_kept": gradients_kept}
            plans_10t.append({**entry, "outcome": outcome, "processor_seconds": seconds})
    notes = "\n".join(
        [
            "GB per rank and step, both directions. 8 ranks of 32 GB and 240 GB of host memory, 90 % of each usable.",
            "PatrickStar, ZeRO-3 offload and LRU are replays of their rules on the same step (`traces.py`), not runs.",
            "The aims: at most 1.02 of the bound with equal chunks and 1.10 with mixed ones; at micro-batches 8 and 16 "
            "at most half of PatrickStar's bytes and a sixth of ZeRO-3 offload's. With 24 and 32, activations "
            "leave less room for any rule to use: there it is 1.5 to 2.2 and 3.0 to 5.5 times fewer.",
            "Gradients are kept where clipping by their norm needs that; PatrickStar does not clip by the norm.",
            "",
            *lines,
        ]
    )
    header = ["step", "plan", "bound", "plan / bound", "PatrickStar's rule", "ZeRO-3 offload", "LRU"]
    recorder.write(
        header,
        rows,
        notes,
        {"gpt_12b": gpts, "largest_billions": largest, "host_bytes_per_parameter": host, "m6_10t": plans_10t},
    )


if __name__ == "__main__":
    main()
