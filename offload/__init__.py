"""Expert parameters, gradients and optimizer state in host memory, streamed through a device under a byte budget."""

from offload.activations import ActivationOffload
from offload.chunk_size import search_chunk_bytes
from offload.chunks import Stack, lay_out
from offload.cuda import CudaDevice
from offload.device import Device, Rates
from offload.dry import DryRuntime
from offload.experts import StreamedExperts
from offload.host_memory import available_bytes
from offload.meter import StorageMeter
from offload.plan import Plan, Wishes, solve
from offload.runtime import OffloadRuntime
from offload.simulated import SimulatedDevice
from offload.sizes import sizes_of, staging_bytes
from offload.timeline import predict_times
from offload.trace import Trace
from offload.update import OptimizerSettings
from offload.worker import WorkerFailure

__all__ = [
    "ActivationOffload",
    "CudaDevice",
    "Device",
    "DryRuntime",
    "OffloadRuntime",
    "OptimizerSettings",
    "Plan",
    "Rates",
    "SimulatedDevice",
    "Stack",
    "StorageMeter",
    "StreamedExperts",
    "Trace",
    "Wishes",
    "WorkerFailure",
    "available_bytes",
    "lay_out",
    "predict_times",
    "search_chunk_bytes",
    "sizes_of",
    "solve",
    "staging_bytes",
]
