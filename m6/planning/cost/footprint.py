"""The bytes of one rank, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class MemoryFootprint:
    """Bytes of one rank. ``host`` and ``host_process`` are in host memory, the others on the device.

    Attributes:
        weights: as the forward pass reads them, with those that are gathered or streamed at one time.
        old_weights: those of the version before, for passes under way in a pipeline without a flush.
        gradients: between the backward pass and the update.
        partial_sums: of gradients of earlier micro-batches, with ``"deterministic": "any_world"``.
        residuals: what a rank with ``m6.communication`` has not sent of its gradients.
        optimizer_state: moments and step counters; at ZeRO stages 1 to 3 also the fp32 master weights; with
            ``m6.gradient_delay`` also the gradients that wait.
        owned_experts: experts of ``m6.offload`` that the device owns, with their gradients and optimizer state.
        activations: kept by autograd for one micro-batch, with the gradients of its logits.
        buckets: DeepSpeed's buffers for the reduction of gradients.
        update: temporaries of the optimizer's step, when the activations are freed; without a flush also those that
            are not.
        process: driver, libraries and allocator; calibrated, 0 by default.
        host: states of the rank in host memory.
        store: of ``host``, what ``m6.offload`` holds: the other experts with their gradients and optimizer state.
        host_process: the program itself in host memory; calibrated, 0 by default.
    """

    weights: int = 0
    old_weights: int = 0
    gradients: int = 0
    partial_sums: int = 0
    residuals: int = 0
    optimizer_state: int = 0
    owned_experts: int = 0
    activations: int = 0
    buckets: int = 0
    update: int = 0
    process: int = 0
    host: int = 0
    store: int = 0
    host_process: int = 0

    @property
    def resident(self) -> int:
        """Bytes that stay on the device during the whole step."""
        sums = self.gradients + self.partial_sums + self.residuals
        return self.weights + self.old_weights + sums + self.optimizer_state + self.owned_experts + self.process

    @property
    def peak(self) -> int:
        """An upper estimate of the device memory: gradients fill up while activations are freed. It leaves out the
        gradients within a recomputed block, which can exceed it by half a percent."""
        return self.resident + max(self.activations + self.buckets, self.update)

    def parts(self) -> dict[str, int]:
        """The bytes by name; they add up."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "store"}
