"""The policy for non-finite losses and gradients: a few skipped steps, then the end with the batches on disk.

Messages name the rank and the tensor of non-finite values: weights and losses of a rank, and its gradients before their
sum over ranks.
"""

from __future__ import annotations

import contextlib
import math
import sys
from functools import partial

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import Node

from m6.checkpoints.format import WEIGHT
from m6.data.pretraining import MicroBatch
from m6.files import atomic_path
from m6.runs.directory import NONFINITE, RunDirectory
from m6.runs.processes import Runtime
from m6.training.deepspeed_private import is_partitioned, local_part
from m6.training.engine.engine import Engine
from m6.training.faults import Fault
from m6.training.reporting.sums import StepOutcome

_NAMED = 4  # ranks of a message


class GradientWatch:
    """Finds the parameters with non-finite gradients on this rank, before the sum over ranks.

    It reads every gradient once more, so it is on only after a non-finite step. Gradients come in the order of the
    backward pass: the first non-finite gradient is nearest to the cause.
    """

    def __init__(self) -> None:
        self._hooks = contextlib.ExitStack()
        self._module: nn.Module | None = None
        self._found: dict[str, Tensor] = {}
        self._nodes: list[Node] = []

    def set(self, module: nn.Module | None) -> None:
        """Watches the parameters of ``module``, or nothing."""
        if module is self._module:
            return
        self._hooks.close()
        self._module, self._found, self._nodes = module, {}, []
        for name, parameter in () if module is None else module.named_parameters():
            if not parameter.requires_grad:
                continue
            if is_partitioned(parameter):  # its node could be made only while the parameter is gathered
                self._hooks.callback(parameter.register_hook(partial(self._look, name)).remove)
                continue
            # The hook runs before this node accumulates the gradient, and after the tensor's hooks: they may change it.
            with torch.enable_grad():
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            assert node is not None
            self._nodes.append(node)  # no other object keeps the node alive
            self._hooks.callback(node.register_prehook(partial(self._look_at_first, name)).remove)

    def _look_at_first(self, name: str, gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            self._look(name, gradients[0])

    def _look(self, name: str, gradient: Tensor) -> None:
        # The flag stays on the device: a wait in each hook would slow down the backward pass.
        bad = gradient.detach().isfinite().all().logical_not()
        self._found[name] = bad | self._found.pop(name) if name in self._found else bad

    def found(self) -> list[str]:
        """Returns the names of the parameters, in the order of the backward pass."""
        return [name for name, bad in self._found.items() if bad.item()]


class NonfinitePolicy:
    """Counts consecutive skipped steps.

    Skipped steps with a finite loss do not count while the loss scale of fp16 can still fall: they adapt the scale.

    Args:
        max_skipped_steps: largest number of consecutive skipped steps.
        smallest_loss_scale: the lower bound of the loss scale; 1 except in fp16.
    """

    def __init__(self, run: RunDirectory, max_skipped_steps: int, smallest_loss_scale: float) -> None:
        self._run, self._limit, self._smallest_scale = run, max_skipped_steps, smallest_loss_scale
        self.consecutive = 0
        self._watch = GradientWatch()

    def prepare(self, module: nn.Module) -> None:
        """Watches the gradients of the next step, if the previous step was not finite or no step may be skipped."""
        self._watch.set(module if self.consecutive or not self._limit else None)

    def check(
        self, outcome: StepOutcome, micro_batches: list[MicroBatch], runtime: Runtime, engine: Engine
    ) -> Fault | None:
        """Checks a finished step. Every rank calls this method.

        Args:
            micro_batches: this rank's micro-batches of the step, saved to RUN/nonfinite if the run ends.

        Returns:
            the fault if too many consecutive steps were skipped, else None.
        """
        # With a finite loss and non-finite fp16 gradients the loss scale is too large.
        expected = outcome.loss_scale > self._smallest_scale and math.isfinite(outcome.loss)
        self.consecutive = self.consecutive + 1 if outcome.skipped and not expected else 0
        if not self.consecutive:
            return None
        places = self._places(outcome, runtime, engine)
        if self.consecutive <= self._limit:
            if runtime.is_main:
                print(
                    f"warning: step {outcome.step} is skipped: {places or 'its gradients are not finite'}",
                    file=sys.stderr,
                )
            return None
        folder = self._run.root / NONFINITE
        routers, stages = ", ".join(outcome.nonfinite_routers), "; ".join(outcome.nonfinite_stages)
        reason = (
            f"step {outcome.step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}, "
            f"loss scale {outcome.loss_scale:g}; "
            f"{self.consecutive} steps in a row were not finite (m6.training.max_skipped_steps {self._limit}); "
            f"{f'{places}; ' if places else ''}"
            f"{f'gradients are not finite in {stages}; ' if stages else ''}"
            f"{f'router logits are not finite in {routers}; ' if routers else ''}batches in {folder}"
        )
        for index, batch in enumerate(micro_batches):
            with atomic_path(
                folder / f"step_{outcome.step:08d}_rank_{runtime.rank:05d}_{index:03d}.safetensors"
            ) as temporary:
                save_file({name: value.contiguous() for name, value in batch.tensors().items()}, temporary)
        dist.barrier()  # the exit of one rank may kill the others: wait until all have written their batches
        return Fault(outcome.step - self.consecutive + 1, outcome.step, reason)

    def _places(self, outcome: StepOutcome, runtime: Runtime, engine: Engine) -> str:
        """Returns the ranks with non-finite values and the names of these values; empty if none was found."""
        losses = ", ".join(outcome.own_nonfinite_losses)
        experts = [] if engine.offloaded is None else engine.offloaded.nonfinite_weights()
        return _of_all_ranks(
            _words("weights", [*_nonfinite_weights(engine), *experts])
            + ([f"loss of {losses}"] if losses else [])
            + _words("gradients", self._watch.found()),
            runtime,
        )


def find_nonfinite_state(engine: Engine, runtime: Runtime) -> str:
    """Returns a message with the ranks and names of non-finite weights and moments; empty if all are finite.

    All ranks call it. A moment may stay unnoticed in the weights: an infinite second one only stops their updates.
    """
    names = {"weights": dict.fromkeys(_nonfinite_weights(engine))}
    for fragment in engine.own_fragments():
        if not fragment.data.isfinite().all():
            names.setdefault("weights" if fragment.kind == WEIGHT else fragment.kind, {})[fragment.name] = None
    words = [word for kind, of_kind in names.items() for word in _words(kind, list(of_kind))]
    found = torch.tensor(float(bool(words)), device=runtime.device)
    dist.all_reduce(found)
    return _of_all_ranks(words, runtime) if found.item() else ""


def ranks_with_losses(objectives: list[str], runtime: Runtime) -> str:
    """Returns a message with the ranks that have non-finite losses, and their first objective. All ranks call it."""
    return _of_all_ranks(_words("loss of", objectives), runtime)


@torch.no_grad()
def _nonfinite_weights(engine: Engine) -> list[str]:
    """The weights of forward passes on the device: those in 16 bits may overflow where fp32 masters are finite."""
    named = dict(engine.module.named_parameters())
    finite = torch.stack([local_part(each).isfinite().all() for each in named.values()])
    return [] if finite.all() else [name for name, each in zip(named, finite.tolist(), strict=True) if not each]


def _of_all_ranks(own: list[str], runtime: Runtime) -> str:
    found = [""] * runtime.world_size
    dist.all_gather_object(found, " and ".join(own))
    ranks = [f"{runtime.name_of(rank)}: {words}" for rank, words in enumerate(found) if words]
    more = f", and on {len(ranks) - _NAMED} more ranks" if len(ranks) > _NAMED else ""
    return f"not finite on {', on '.join(ranks[:_NAMED])}{more}" if ranks else ""


def _words(kind: str, names: list[str]) -> list[str]:
    return [f"{kind} {_first(names)}"] if names else []


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
