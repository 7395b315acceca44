"""What of a run's JSON must be equal in all attempts at the run."""

from __future__ import annotations

from typing import Any

# Sections that may change between two attempts at a run: they set neither model, data order nor schedule.
_MAY_CHANGE = ("parallel", "communication", "elastic", "offload", "checkpoint", "logging", "evaluation", "samples")
_IDENTIFYING = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "optimizer", "fp16", "bf16",
    "torch_autocast",
)  # fmt: skip


def identity(document: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's JSON that must be equal in all attempts at the run."""
    m6 = {key: value for key, value in document.get("m6", {}).items() if key not in _MAY_CHANGE}
    # Of these sections, only the keys that change the layout of the run and not its results may change.
    m6["offload"] = {"optimizer": (document.get("m6", {}).get("offload") or {}).get("optimizer")}
    training = m6.get("training", {}).items()
    # A limit that ended a run may be raised to go on with it.
    layout = [
        *("ep_size", "total_steps", "activation_checkpointing", "micro_batches_at_once"),
        *("max_skipped_steps", "check_replicas_interval_steps"),
    ]
    m6["training"] = {key: value for key, value in training if key not in layout}
    data = m6.get("data", {}).items()
    m6["data"] = {key: value for key, value in data if key not in ("num_workers", "max_bad_row_share")}
    if m6.get("moe"):
        exchange = ("exchange", "ranks_per_node", "overlap_parts")
        m6["moe"] = {key: value for key, value in m6["moe"].items() if key not in exchange}
    if m6.get("pseudo_to_real"):
        m6["pseudo_to_real"] = {key: value for key, value in m6["pseudo_to_real"].items() if key != "stop_at_switch"}
    return {"m6": m6, **{key: document.get(key) for key in _IDENTIFYING}}


def first_difference(old: Any, new: Any, path: str = "") -> str:
    """The first key at which two documents differ, with both values; empty if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            difference = first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if difference:
                return difference
        return ""
    return "" if old == new else f"its {path} is {old!r}, this one's is {new!r}"
