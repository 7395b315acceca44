"""Faults. A transient one returns the run to its last checkpoint, once. If it comes back, the run has failed.

Megatron-LM's rerun state machine distinguishes transient and persistent faults in the same way. If a second computation
of the same steps repeats a fault, its cause is in the data, in the program or in a broken device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from m6.checkpoints.discovery import complete_checkpoints
from m6.errors import RetryableError, UserError
from m6.files import parse_object, write_json
from m6.runs.directory import FAULT, RunDirectory
from m6.runs.processes import on_main_rank


class PassingFault(RetryableError):
    """A fault with a return to the newest checkpoint. Every rank raises it."""


@dataclass(frozen=True)
class Fault:
    """A fault in some steps; equal on all ranks.

    Attributes:
        first_step, last_step: numbers of these steps.
        reason: in words.
    """

    first_step: int
    last_step: int
    reason: str


def end(fault: Fault, run: RunDirectory, may_restart: bool) -> NoReturn:
    """Ends the training after a fault. The last checkpoint is complete. Every rank calls this function.

    A fault has come back if the run has no new checkpoint since the previous fault, or if it is in the same steps.

    Args:
        may_restart: whether the caller trains again from the last checkpoint.

    Raises:
        PassingFault: at the first occurrence; RUN/fault.json records it.
        UserError: the fault has come back, or ``may_restart`` is False; RUN/FATAL holds the reason.
    """

    def decide() -> str:
        newest = [int(folder.name.removeprefix("step_")) for folder in complete_checkpoints(run.checkpoints)][-1:]
        begins_at, file = (newest or [0])[0], run.root / FAULT
        before = _read(run)
        came_back = before is not None and (begins_at <= before["begins_at"] or fault.first_step <= before["last_step"])
        if came_back or not may_restart:
            run.fail(
                fault.reason + (f"; it came back after a restart from step {before['begins_at']}" if before else "")
            )
            file.unlink(missing_ok=True)  # if the user removes FATAL, the count of faults starts anew
            return ""
        entry = {"first_step": fault.first_step, "last_step": fault.last_step, "begins_at": begins_at}
        write_json(file, {**entry, "reason": fault.reason})
        return f"{fault.reason}; begins again at step {begins_at}"

    if restart := on_main_rank(decide):
        raise PassingFault(restart)
    raise UserError(fault.reason)


@contextmanager
def naming_the_budget() -> Iterator[None]:
    """Turns an exceeded device budget into a RetryableError: "auto" may find more memory in the next attempt."""
    try:
        yield
    except RuntimeError as error:
        from offload import DeviceOutOfMemory  # only a run that offloads raises it, and has imported it

        if not isinstance(error, DeviceOutOfMemory):
            raise
        raise RetryableError(
            f"m6.offload.device_budget_mib: {error}; take a larger budget, or a smaller micro-batch"
        ) from error


def _read(run: RunDirectory) -> dict[str, int] | None:
    """Returns the record of the previous fault; None if there is none or it is damaged."""
    try:
        entry = parse_object((run.root / FAULT).read_bytes())
        return {name: int(entry[name]) for name in ("begins_at", "last_step")}
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
