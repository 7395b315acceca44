"""Expert parameters, gradients and optimizer state in host memory, streamed through a device under a byte budget.

Names are imported at their first use. A program that only needs sizes does not load the runtime.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.devices.cuda import CudaDevice
    from offload.devices.device import Device, DeviceOutOfMemory, Rates
    from offload.devices.meter import StorageMeter
    from offload.devices.simulated import SimulatedDevice
    from offload.memory.host_memory import available_bytes
    from offload.memory.layout import ChunkBytes, NextWeights, Stack, in_mib, lay_out, sizes_of, staging_bytes
    from offload.optimizer.master_weights import remainder_dtype
    from offload.optimizer.settings import OptimizerSettings
    from offload.plan.chunk_size import search_chunk_bytes
    from offload.plan.placement import PlacementConstraints, PlacementPlan
    from offload.plan.solver import solve
    from offload.plan.timeline import StepTimes, predict_times
    from offload.plan.trace import Trace
    from offload.runtime.activations import ActivationOffload
    from offload.runtime.dry_run import DryPass, DryRuntime
    from offload.runtime.experts import StreamedExperts
    from offload.runtime.runtime import OffloadRuntime
    from offload.runtime.updates import DelayedUpdate
    from offload.runtime.workers import WorkerFailure

__all__ = [
    "ActivationOffload",
    "ChunkBytes",
    "CudaDevice",
    "DelayedUpdate",
    "Device",
    "DeviceOutOfMemory",
    "DryPass",
    "DryRuntime",
    "NextWeights",
    "OffloadRuntime",
    "OptimizerSettings",
    "PlacementConstraints",
    "PlacementPlan",
    "Rates",
    "SimulatedDevice",
    "Stack",
    "StepTimes",
    "StorageMeter",
    "StreamedExperts",
    "Trace",
    "WorkerFailure",
    "available_bytes",
    "in_mib",
    "lay_out",
    "predict_times",
    "remainder_dtype",
    "search_chunk_bytes",
    "sizes_of",
    "solve",
    "staging_bytes",
]
_MODULES = {
    "ActivationOffload": "runtime.activations",
    "ChunkBytes": "memory.layout",
    "CudaDevice": "devices.cuda",
    "Device": "devices.device",
    "DeviceOutOfMemory": "devices.device",
    "DryPass": "runtime.dry_run",
    "DryRuntime": "runtime.dry_run",
    "DelayedUpdate": "runtime.updates",
    "NextWeights": "memory.layout",
    "OffloadRuntime": "runtime.runtime",
    "OptimizerSettings": "optimizer.settings",
    "PlacementConstraints": "plan.placement",
    "PlacementPlan": "plan.placement",
    "Rates": "devices.device",
    "SimulatedDevice": "devices.simulated",
    "Stack": "memory.layout",
    "StepTimes": "plan.timeline",
    "StorageMeter": "devices.meter",
    "StreamedExperts": "runtime.experts",
    "Trace": "plan.trace",
    "WorkerFailure": "runtime.workers",
    "available_bytes": "memory.host_memory",
    "in_mib": "memory.layout",
    "lay_out": "memory.layout",
    "predict_times": "plan.timeline",
    "remainder_dtype": "optimizer.master_weights",
    "search_chunk_bytes": "plan.chunk_size",
    "sizes_of": "memory.layout",
    "solve": "plan.solver",
    "staging_bytes": "memory.layout",
}

if not TYPE_CHECKING:  # type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        """Imports a name of ``__all__`` (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
