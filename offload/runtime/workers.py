"""Host threads for work during the device's computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from offload.devices.device import Device, Event

Job = Future[Event]


class WorkerFailure(RuntimeError):
    """A job failed. Its state may be partly updated, so it must not be saved."""


class HostWorkers:
    """Starts jobs in the order of their submission, and runs as many at a time as there are threads.

    Each job waits for events of the device and ends with one, as work of a device queue does. The simulated device can
    therefore check the order of all accesses to memory.
    """

    def __init__(self, device: Device, num_threads: int) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="offload")

    def submit(self, work: Callable[[], object], after: Sequence[Job | None], events: Sequence[Event | None]) -> Job:
        """Submits ``work`` to start after the jobs ``after`` and the events ``events``.

        ``after`` may contain only earlier jobs: a thread waits for them, and could wait forever for a later one.
        """
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
        """Waits until the job is done, and orders the calling thread behind it.

        Raises:
            WorkerFailure: the job or an earlier one in its chain failed.
        """
        if job is None:
            return
        try:
            event = job.result()
        except Exception as error:
            raise WorkerFailure(f"the host's work on offloaded parameters failed: {error}") from error
        self._device.host_waits(event)

    def close(self) -> None:
        """Waits for all jobs and ends the threads."""
        self._pool.shutdown()
