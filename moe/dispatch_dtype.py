"""Number formats of rows exchanged between ranks (all-to-all, all-gather, reduce-scatter)."""

from typing import Protocol

import torch
from torch import Tensor

from moe.config import DispatchDtype

_LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
_SCALE_BYTES = 4


class Codec(Protocol):
    """Encodes rows as one tensor with as many rows. A single collective can then carry them and split them by rows."""

    def encode(self, rows: Tensor) -> Tensor:
        """Encodes [R, D] as [R, ...], contiguous."""

    def decode(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """Decodes the result of ``encode`` into [R, D] of type ``dtype``."""

    def row_bytes(self, width: int, element_bytes: int) -> int:
        """Returns the bytes of an encoded row of ``width`` numbers; each has ``element_bytes`` before encoding."""


class Identity:
    """Sends rows in their own type."""

    def encode(self, rows: Tensor) -> Tensor:
        """See ``Codec``."""
        return rows.contiguous()

    def decode(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``Codec``."""
        return buffer

    def row_bytes(self, width: int, element_bytes: int) -> int:
        """See ``Codec``."""
        return width * element_bytes


class BFloat16:
    """Rounds to bfloat16, with a relative error of at most 2^-8; float16 rows are not changed."""

    def encode(self, rows: Tensor) -> Tensor:
        """See ``Codec``."""
        return (rows if rows.element_size() == 2 else rows.bfloat16()).contiguous()

    def decode(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``Codec``."""
        return buffer.to(dtype)

    def row_bytes(self, width: int, element_bytes: int) -> int:
        """See ``Codec``."""
        return width * 2


class Float8:
    """Rounds to float8 e4m3 with one float32 scale for each row: [R, D + 4] bytes.

    The error of a number is at most 2^-4 of the number or 2^-18 of the row's largest number, whichever is larger.
    """

    def encode(self, rows: Tensor) -> Tensor:
        """See ``Codec``."""
        rows = rows.float()
        scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST_FLOAT8
        numbers = (rows / scale).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(torch.float8_e4m3fn)
        return torch.cat((numbers.view(torch.uint8), scale.flatten().view(torch.uint8).view(-1, _SCALE_BYTES)), 1)

    def decode(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``Codec``."""
        numbers = buffer[:, :-_SCALE_BYTES].contiguous().view(torch.float8_e4m3fn)
        scale = buffer[:, -_SCALE_BYTES:].flatten().view(torch.float32)[:, None]
        return (numbers.float() * scale).to(dtype)

    def row_bytes(self, width: int, element_bytes: int) -> int:
        """See ``Codec``."""
        return width + _SCALE_BYTES


IDENTITY = Identity()
# The codecs of dispatch and combine. Outputs are summed after the combine, so "float8" sends them in bfloat16 like
# DeepSeek-V3 (arXiv 2412.19437), section 3.3.3. "float8_both" rounds them to float8 before the sum.
CODECS: dict[DispatchDtype, tuple[Codec, Codec]] = {
    "same": (IDENTITY, IDENTITY),
    "bfloat16": (BFloat16(), BFloat16()),
    "float8": (Float8(), BFloat16()),
    "float8_both": (Float8(), Float8()),
}
