"""The form in which rows travel between ranks."""

from typing import Literal, Protocol

import torch
from torch import Tensor

Payload = Literal["same", "bfloat16", "float8"]
_LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
_SCALE_BYTES = 4


class Codec(Protocol):
    """Rows in one tensor with as many rows, so that one collective carries them and they split by rows."""

    def encode(self, rows: Tensor) -> Tensor: ...

    def decode(self, buffer: Tensor, dtype: torch.dtype) -> Tensor: ...


class Same:
    """As they are."""

    def encode(self, rows: Tensor) -> Tensor:
        return rows.contiguous()

    def decode(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        return buffer


class BFloat16:
    """Rounded to bfloat16, by at most 2^-8 of each number; float16 rows stay what they are."""

    def encode(self, rows: Tensor) -> Tensor:
        return (rows if rows.element_size() == 2 else rows.bfloat16()).contiguous()

    def decode(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        return buffer.to(dtype)


class Float8:
    """e4m3 numbers and one float32 scale a row, [R, D + 4] bytes; off by at most 2^-4 of a number, or 2^-18 of the
    row's largest where that is more."""

    def encode(self, rows: Tensor) -> Tensor:
        rows = rows.float()
        scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST_FLOAT8
        numbers = (rows / scale).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(torch.float8_e4m3fn)
        return torch.cat((numbers.view(torch.uint8), scale.flatten().view(torch.uint8).view(-1, _SCALE_BYTES)), 1)

    def decode(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = buffer[:, :-_SCALE_BYTES].contiguous().view(torch.float8_e4m3fn)
        scale = buffer[:, -_SCALE_BYTES:].flatten().view(torch.float32)[:, None]
        return (numbers.float() * scale).to(dtype)


SAME = Same()
# To the experts, and back from them, where outputs or gradients are yet to be summed: DeepSeek-V3 (arXiv 2412.19437),
# section 3.3.3, keeps the second kind in bfloat16.
CODECS: dict[Payload, tuple[Codec, Codec]] = {
    "same": (SAME, SAME),
    "bfloat16": (BFloat16(), BFloat16()),
    "float8": (Float8(), BFloat16()),
}
