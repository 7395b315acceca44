"""Runs the code of one rank of a large job without the job's memory and without other ranks.

Floating-point tensors are fake: they have a shape and no memory. Integers are real, so the router really counts and
sorts. Its choices are spread evenly over the experts. Collectives are counted and send nothing.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from m6.architecture.names import IGNORED_LABEL, IMAGE, TARGET
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model import outputs
from m6.training.sizes import BatchShape

_SMALL_NUMEL = 64  # smaller tensors stay real: scalars, sizes, learning rates
_aten = torch.ops.aten
_c10d = torch.ops.c10d
_CHOICES = (_aten.topk.default, _aten.max.dim, _aten.argmax.default)
_SORTS = (_aten.sort.default, _aten.sort.stable, _aten.argsort.default, _aten.argsort.stable)


class FakeWorld(TorchDispatchMode):
    """A dispatch mode with real integers and counts of memory and collectives; used inside a ``FakeTensorMode``.

    Attributes:
        live: bytes of the existing fake storages, by the module of their creation; "" is code outside of modules.
        total: the sum of ``live``.
        peak: the largest ``total`` since :meth:`restart_peak`.
        at_peak: ``live`` at that time.
        collectives: (operator, ranks of the group) -> [calls, input bytes of this rank; of a receive its output].
        modules: the names of the modules in their forward pass, outermost first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, int] = {}
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.collectives: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self.modules: list[str] = []
        self._storages: dict[int, tuple[int, str]] = {}

    def restart_peak(self) -> None:
        """Makes the present memory the peak."""
        self.peak, self.at_peak = self.total, dict(self.live)

    def watch(self, model: nn.Module) -> None:
        """From now on assigns storages made in forward passes of ``model`` to its modules. Layers count together."""
        for name, module in model.named_modules():
            folded = ".".join("*" if part.isdigit() else part for part in name.split("."))
            module.register_forward_pre_hook(lambda *_, name=folded: self.modules.append(name))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _leave(self) -> None:
        if self.modules:
            self.modules.pop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operator, on fake or on real tensors."""
        kwargs = kwargs or {}
        if function.namespace == "c10d":
            return self._collective(function, args)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if function is _aten._local_scalar_dense.default and fake:
            return 1.0 if tensors[0].dtype.is_floating_point else tensors[0].dtype.is_signed
        if function is _aten.empty_like.default and not fake and tensors[0].device.type == "meta":
            # Module.to_empty. The fake mode would keep a reference to the meta tensor, so a new tensor is made.
            return self._create(torch.empty, tensors[0].shape, dtype=tensors[0].dtype)
        if not fake and not _makes_large_floats(function, tensors, args, kwargs):
            with _disable_current_modes():
                return function(*args, **kwargs)
        if "_grouped_mm" in str(function):
            output = _grouped_mm(*args, **kwargs)
        elif function is _aten.nonzero.default and fake:
            raise RuntimeError("torch.nonzero of a fake tensor: its values do not exist")
        else:
            output = function(*args, **kwargs)
        if function in _CHOICES:
            output = _with_even_choices(output, args[0])
        elif function in _SORTS:
            output = _in_order(output)
        self._count(output)
        return output

    def _create(self, factory: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        output = factory(*args, **kwargs)
        self._count(output)
        return output

    def _count(self, output: Any) -> None:
        for tensor in tree_leaves(output):
            if not isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._storages:
                continue
            name = self.modules[-1] if self.modules else ""
            self._storages[key] = (storage.nbytes(), name)
            self.live[name] = self.live.get(name, 0) + storage.nbytes()
            self.total += storage.nbytes()
            weakref.finalize(storage, self._free, key)
            if self.total > self.peak:
                self.restart_peak()

    def _free(self, key: int) -> None:
        num_bytes, name = self._storages.pop(key)
        self.live[name] -= num_bytes
        self.total -= num_bytes

    def _collective(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Counts a collective. It sends nothing; an all-to-all of real tensors returns its input."""
        from torch._C._distributed_c10d import FakeWork, ProcessGroup
        from torch.distributed._tools.fake_collectives import CollectiveOp

        name = function._schema.name.removeprefix("c10d::").strip("_").removesuffix("_base")
        if function not in CollectiveOp.PG_ARG_1 | CollectiveOp.PG_ARG_2:
            raise RuntimeError(f"no rule for the collective {function}")
        group = CollectiveOp.get_process_group(function, args)
        if isinstance(group, ProcessGroup) and name != "barrier":
            ranks = tuple(dist.get_process_group_ranks(group))
            # Those with the group as third argument have output and input; the others work in place.
            inputs = args[1] if function in CollectiveOp.PG_ARG_2 else args[0]
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            entry = self.collectives.setdefault((name, ranks), [0, 0])
            entry[0] += 1
            entry[1] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if name == "alltoall" and not isinstance(args[0], FakeTensor) and not isinstance(args[1], FakeTensor):
                with _disable_current_modes():
                    args[0].copy_(args[1])
        work = FakeWork().boxed()
        return (args[0], work) if function in CollectiveOp.WK_ARG_1 else work


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Inside ``with`` this process is ``rank`` of ``world_size``. The other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from m6.config.deepspeed import prepare_deepspeed

    prepare_deepspeed()
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}):
        import deepspeed
        from deepspeed.utils import groups

        groups_before = {
            name: copy.copy(value) if isinstance(value, dict) else value
            for name, value in vars(groups).items()
            if name.isupper()
        }
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
            yield
        finally:
            dist.destroy_process_group()
            deepspeed.comm.comm.cdb = None
            vars(groups).update(groups_before)  # DeepSpeed caches groups, but the groups of the fake job are destroyed


@contextmanager
def fake_tensors() -> Iterator[FakeWorld]:
    """Inside ``with`` large floating-point tensors are made without memory. Yields the counting mode."""
    from deepspeed.accelerator import get_accelerator

    world = FakeWorld()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        world,
        mock.patch.object(nn.Module, "_apply", _apply),
        # The loss in one piece, as on a GPU. On a CPU a large micro-batch would have thousands of cache-sized pieces.
        mock.patch.object(outputs, "ROWS_IN_CACHE", sys.maxsize),
        # No number is computed here, so this machine need not support these types.
        mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True),
        mock.patch.object(get_accelerator(), "is_bf16_supported", return_value=True),
    ):
        yield world


_real_apply = nn.Module._apply


def _apply(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` for fake parameters. PyTorch's own swaps tensors, but fake tensors have weak references,
    and these forbid a swap."""
    if not any(isinstance(parameter, FakeTensor) for parameter in self.parameters()):
        return _real_apply(self, function, recurse)
    for child in self.children() if recurse else ():
        child._apply(function)
    with torch.no_grad():
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None:
                tensor.data = function(tensor)
    return self


def _makes_large_floats(function: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
    """Whether an operator on real tensors, or without tensors, has to make a fake tensor."""
    dtype = kwargs.get("dtype")
    if function is _aten.full.default and dtype is None and isinstance(args[1], int):
        return False
    if str(kwargs.get("device")) == "meta" or (dtype is not None and not dtype.is_floating_point):
        return False
    if tensors:
        # Results of real tensors are real, except casts of large ones to floating point.
        return dtype is not None and max(tensor.numel() for tensor in tensors) > _SMALL_NUMEL
    shape = next((arg for arg in args if isinstance(arg, (list, tuple, torch.Size))), ())
    return math.prod(shape) > _SMALL_NUMEL


def _with_even_choices(output: Any, scores: Tensor) -> Any:
    """``output`` of topk or max with real indices, the same number of rows for all experts.

    With k choices, row t chooses tk + z, tk + z + 1, ... modulo the number of scores in prototype z. So a row has other
    experts in each prototype.
    """
    values, indices = output if isinstance(output, (tuple, list)) else (None, output)
    rows, *between, num_choices = indices.shape if indices.dim() == scores.dim() else (*indices.shape, 1)
    with _disable_current_modes():
        first = torch.arange(rows).view(rows, *[1] * len(between), 1) * num_choices
        places = torch.arange(math.prod(between)).view(*between, 1) + torch.arange(num_choices)
        even = (first + places).remainder(scores.shape[-1]).view(tuple(indices.shape))
    return even if values is None else (values, even)


def _in_order(output: Any) -> Any:
    """``output`` of sort or argsort along the last dimension with real indices, which leave all rows as they are."""
    values, indices = output if isinstance(output, (tuple, list)) else (None, output)
    with _disable_current_modes():
        places = torch.arange(indices.shape[-1]).expand(tuple(indices.shape)).clone()
    return places if values is None else (values, places)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Any, **kwargs: Any) -> Tensor:
    """The shape of a grouped product, in any data type. The fake kernel of PyTorch 2.13 takes bfloat16 only."""
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        return a.new_empty(len(offs), a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def to_fake(world: FakeWorld, tensors: Any) -> Any:
    """``tensors`` with the floating-point ones replaced by fake ones."""

    def convert(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.dtype.is_floating_point else tensor

    return tree_map_only(Tensor, convert, tensors)


def fake_batch(config: RunConfig, shape: BatchShape, world: FakeWorld) -> MicroBatch:
    """Makes a micro-batch with one sample in each row: an image, if ``shape`` has pictures, then target tokens."""
    model = config.model
    rows, length, patches = shape.rows, shape.sequence_length, model.num_patches if shape.pictures else 0
    input_ids = torch.zeros(rows, length, dtype=torch.int64)
    input_ids[:, :patches] = model.image_token_id
    types = torch.full((rows, length), TARGET)
    types[:, :patches] = IMAGE
    positions = torch.arange(length).repeat(rows, 1)
    positions[:, patches:] -= patches  # positions restart where the target begins
    labels = torch.zeros(rows, length, dtype=torch.int64)
    labels[:, 0] = IGNORED_LABEL  # the first token has no token before it to predict it from
    return MicroBatch(
        input_ids=input_ids,
        token_type_ids=types,
        position_ids=positions,
        sample_ids=torch.ones(rows, length, dtype=torch.int64),
        labels=labels,
        objective_ids=torch.zeros(rows, length, dtype=torch.int64),
        data_source_ids=torch.zeros(rows, length, dtype=torch.int64),
        pixel_values=to_fake(world, torch.empty(shape.pictures, 3, model.image_size, model.image_size)),
        num_target_tokens=rows * (length - 1),
        num_tokens=rows * length,
        num_samples=rows,
        num_token_pairs=rows * length**2,
    )
