"""Threads of the host that work while the device computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from offload.device import Device, Event

Job = Future[Event]


class WorkerFailure(RuntimeError):
    """Work in a thread failed; the state it worked on may be half updated, so nothing must be saved."""


class HostWorkers:
    """Runs jobs in the order of their submission, as many at a time as there are threads.

    Threads meet events as queues of the device do, so that the order of all accesses to memory can be checked.
    """

    def __init__(self, device: Device, num_threads: int) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="offload")

    def submit(self, work: Callable[[], object], after: Sequence[Job | None], events: Sequence[Event | None]) -> Job:
        """Queues ``work`` behind jobs that were submitted before and behind events of the device."""
        submitted = self._device.host_event()

        def run() -> Event:
            self._device.host_waits(submitted)
            for job in after:
                if job is not None:
                    self._device.host_waits(job.result())
            for event in (event for event in events if event is not None):
                self._device.host_waits(event)
            work()
            return self._device.host_event()

        return self._pool.submit(run)

    def wait(self, job: Job | None) -> None:
        """Returns when the job is done; the calling thread comes behind all it did.

        Raises:
            WorkerFailure: it, or a job before it, failed.
        """
        if job is None:
            return
        try:
            event = job.result()
        except Exception as error:
            raise WorkerFailure(f"the host's work on offloaded parameters failed: {error}") from error
        self._device.host_waits(event)

    def close(self) -> None:
        self._pool.shutdown()
