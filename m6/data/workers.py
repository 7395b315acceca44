"""How the processes that prepare batches begin."""

import os


def leave_process_group(worker: int) -> None:
    """A ``worker_init_fn``: the worker no longer gets the signals that are for the run.

    ``timeout`` and service managers send SIGTERM to the whole process group. PyTorch ends a worker at that, and a run
    that waits for its batch then fails instead of saving a checkpoint.
    """
    os.setpgid(0, 0)
