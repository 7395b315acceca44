"""Derives missing token types and positions of rows, for example of prompts for ``generate``."""

import torch
from torch import Tensor

from m6.architecture.special_tokens import IMAGE, SOURCE, TARGET


def derive_token_type_ids(input_ids: Tensor, real: Tensor, image_token_id: int, bos_token_id: int) -> Tensor:
    """Derives the token types of rows with one sample each; the target begins at the last ``<bos>`` of the row.

    Args:
        input_ids: int64 [B, S].
        real: bool [B, S], False at padding.

    Returns:
        int64 [B, S]; a row without ``<bos>`` has no target.
    """
    is_bos = (input_ids == bos_token_id) & real
    bos_count = is_bos.cumsum(dim=1)
    is_target = (bos_count > 0) & (bos_count == bos_count[:, -1:])
    is_image = (input_ids == image_token_id) & ~is_target
    types = torch.where(is_target, TARGET, torch.where(is_image, IMAGE, SOURCE))
    return types.masked_fill(~real, IMAGE)


def derive_position_ids(token_type_ids: Tensor, sample_ids: Tensor) -> Tensor:
    """Derives positions. They restart at 0 where the sample or the token type changes.

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
