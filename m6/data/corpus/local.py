"""Runs the stages of a corpus in processes of this machine.

datatrove's local executor is not used: it waits for ever for a process that was killed, such as for its memory.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from m6.data.corpus.stages import run_task, unfinished
from m6.data.corpus.work import Work
from m6.errors import UserError


def run_locally(work: Work, num_tasks: int) -> None:
    """Runs all stages that are not complete; a single task runs in this process.

    Args:
        work: the corpus.
        num_tasks: processes.

    Raises:
        UserError: a unit failed because of a user's mistake, or a process died.
    """
    if num_tasks == 1:
        for stage in unfinished(work):
            run_task(work.folder, stage.name, 0, 1, work.open_scorer)
        return
    # Spawn, because a fork of a process with threads (pyarrow has some) may deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_tasks, mp_context=context, initializer=_end_with_parent) as pool:
        for stage in unfinished(work):
            tasks = min(num_tasks, stage.units(work))
            given = (tasks, work.open_scorer)
            futures = [pool.submit(run_task, work.folder, stage.name, task, *given) for task in range(tasks)]
            try:
                for future in as_completed(futures):
                    future.result()
            except BrokenProcessPool:
                raise UserError(
                    f'{work.folder}: a process of stage "{stage.name}" died, probably out of memory; the same command '
                    "continues, with fewer --tasks if memory is short"
                ) from None


def _end_with_parent() -> None:
    """Ends this process when the one that started it dies: two would otherwise write the same files."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
