"""Expert parameters, gradients and optimizer state in host memory, streamed through a device under a byte budget."""

from offload.devices.cuda import CudaDevice
from offload.devices.device import Device, DeviceOutOfMemory, Rates
from offload.devices.meter import StorageMeter
from offload.devices.simulated import SimulatedDevice
from offload.memory.host_memory import available_bytes
from offload.memory.layout import NextWeights, Stack, lay_out
from offload.optimizer.master_weights import remainder_dtype
from offload.optimizer.settings import OptimizerSettings
from offload.plan.chunk_size import search_chunk_bytes
from offload.plan.placement import PlacementConstraints, PlacementPlan
from offload.plan.sizes import ChunkBytes, in_mib, sizes_of, staging_bytes
from offload.plan.solver import solve
from offload.plan.timeline import StepTimes, predict_times
from offload.plan.trace import Trace
from offload.runtime.activations import ActivationOffload
from offload.runtime.dry_run import DryRuntime
from offload.runtime.experts import StreamedExperts
from offload.runtime.runtime import OffloadRuntime
from offload.runtime.updates import LateUpdate
from offload.runtime.workers import WorkerFailure

__all__ = [
    "ActivationOffload",
    "ChunkBytes",
    "CudaDevice",
    "Device",
    "DeviceOutOfMemory",
    "DryRuntime",
    "LateUpdate",
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
