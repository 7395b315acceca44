"""Token types and positions of a row that comes without them: at generation, from a bare prompt."""

import torch
from torch import Tensor

from m6.tokenizers.special_tokens import IMAGE, SOURCE, TARGET


def derive_token_type_ids(input_ids: Tensor, real: Tensor, image_token_id: int, bos_token_id: int) -> Tensor:
    """Token types of rows that hold one sample each: the target begins at the row's last ``<bos>``.

    Args:
        input_ids: int64 [B, S].
        real: bool [B, S], False at padding.

    Returns:
        int64 [B, S]; a row without ``<bos>`` is all source.
    """
    is_bos = (input_ids == bos_token_id) & real
    seen = is_bos.cumsum(dim=1)
    is_target = (seen > 0) & (seen == seen[:, -1:])
    is_image = (input_ids == image_token_id) & ~is_target
    types = torch.where(is_target, TARGET, torch.where(is_image, IMAGE, SOURCE))
    return types.masked_fill(~real, IMAGE)


def derive_position_ids(token_type_ids: Tensor, sample_ids: Tensor) -> Tensor:
    """Positions that restart at 0 where the sample or the token type changes.

    Args:
        token_type_ids: int64 [B, S].
        sample_ids: int64 [B, S], 0 at padding.

    Returns:
        int64 [B, S], 0 at padding.
    """
    index = torch.arange(token_type_ids.shape[1], device=token_type_ids.device).expand_as(token_type_ids)
    starts = torch.ones_like(token_type_ids, dtype=torch.bool)
    starts[:, 1:] = (token_type_ids[:, 1:] != token_type_ids[:, :-1]) | (sample_ids[:, 1:] != sample_ids[:, :-1])
    run_start = torch.where(starts, index, 0).cummax(dim=1).values
    return (index - run_start).masked_fill(sample_ids == 0, 0)
