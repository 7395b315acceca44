"""Expert parameters, gradients and optimizer state in host memory, streamed through a device under a byte budget."""

from offload.chunks import Stack
from offload.cuda import CudaDevice
from offload.device import Rates
from offload.experts import StreamedExperts
from offload.plan import Plan, solve
from offload.runtime import OffloadRuntime
from offload.simulated import SimulatedDevice
from offload.update import OptimizerSettings

__all__ = [
    "CudaDevice",
    "OffloadRuntime",
    "OptimizerSettings",
    "Plan",
    "Rates",
    "SimulatedDevice",
    "Stack",
    "StreamedExperts",
    "solve",
]
