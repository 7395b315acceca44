"""Embeddings of tokens, patches, positions and segments, the input of the first block, and what is missing for them."""

import torch
from torch import Tensor, nn

from m6.architecture.names import IMAGE, SOURCE, TARGET
from m6.architecture.settings import ModelSettings
from m6.errors import UserError
from m6.model.patch_encoders import build_patch_encoder

NUM_SEGMENTS = 3  # image, source, target: the values of token_type_ids
_FIRST_CODE = 2  # position of the first code in a target, after <bos> and <boi>


class M6Embeddings(nn.Module):
    """The sum of content (token or patch), learned position in its modality, and segment (M6, section 3).

    With ``code_grid_size`` the embeddings of an image code's row and column are added too, also for a hidden code.
    """

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.image_token_id = config.image_token_id
        self.num_patches = config.num_patches
        self.image_size = config.image_size
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.text_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.patch_positions = nn.Embedding(config.num_patches, config.hidden_size)
        self.first_code_id, self.code_mask_id = config.first_code_id, config.code_mask_id
        self.code_grid_size, self.codes_per_place = config.code_grid_size, config.codes_per_place
        if self.code_grid_size:
            self.code_rows = nn.Embedding(config.code_grid_size, config.hidden_size)
            self.code_columns = nn.Embedding(config.code_grid_size, config.hidden_size)
        self.segments = nn.Embedding(NUM_SEGMENTS, config.hidden_size)
        self.patch_encoder = build_patch_encoder(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor, pixel_values: Tensor | None
    ) -> Tensor:
        """Embeds a batch of rows.

        Args:
            input_ids, token_type_ids, position_ids: int64 [B, S].
            pixel_values: [N, 3, image_size, image_size], in row-major order of the images' first placeholders.

        Returns:
            [B, S, hidden_size].

        Raises:
            UserError: the number of placeholders is not ``N * num_patches``, images have another size, or a text is
                longer than the model has positions.
        """
        is_patch = (input_ids == self.image_token_id) & (token_type_ids == IMAGE)
        # The positions of patches belong to another table and may exceed the size of the text's.
        text_positions = position_ids.masked_fill(is_patch, 0)
        self._check_length(text_positions, token_type_ids)
        embedded = self._embed_tokens(input_ids, text_positions)
        embedded = self._splice_patches(embedded, is_patch, position_ids, pixel_values)
        return self.dropout(embedded + self.segments(token_type_ids))

    def _check_length(self, text_positions: Tensor, token_type_ids: Tensor) -> None:
        # This check waits for the device, as the search for patches does. A decoding step must not wait, so it is not
        # checked here: generate checks the largest length of a target before its first step.
        limit = self.text_positions.num_embeddings
        if bool((text_positions >= limit).any()):
            last = int(text_positions.max())
            is_source = bool((token_type_ids[text_positions == last] == SOURCE).any())
            raise UserError(
                f"the {'source' if is_source else 'target'} has {last + 1} tokens, but the model has {limit} positions "
                "(max_position_embeddings); shorten it"
            )

    def _splice_patches(
        self, embedded: Tensor, is_patch: Tensor, position_ids: Tensor, pixel_values: Tensor | None
    ) -> Tensor:
        if pixel_values is None:
            # An empty batch of images gives the patch encoder a gradient of zeros. Data-parallel ranks with and without
            # images then reduce the same tensors.
            pixel_values = embedded.new_empty(0, 3, self.image_size, self.image_size)
        side = self.image_size
        if pixel_values.shape[1:] != (3, side, side):
            raise UserError(
                f"pixel_values have the shape {list(pixel_values.shape)}, but the model's image_size {side} needs "
                f"[N, 3, {side}, {side}]"
            )
        patch_index = is_patch.nonzero(as_tuple=True)
        placeholders, patches = patch_index[0].numel(), pixel_values.shape[0] * self.num_patches
        if placeholders != patches:
            raise UserError(
                f"input_ids hold {placeholders} <image> placeholders, but pixel_values hold {pixel_values.shape[0]} "
                f"pictures of {self.num_patches} patches, {patches} in all"
            )
        features = self.patch_encoder(pixel_values).flatten(0, 1) + self.patch_positions(position_ids[patch_index])
        return embedded.index_put(patch_index, features.to(embedded.dtype))

    def embed_targets(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embeds tokens without patches, as in a decoding step; all arguments are int64 [B, S]."""
        return self.dropout(self._embed_tokens(input_ids, position_ids) + self.segments(token_type_ids))

    def _embed_tokens(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        embedded = self.tokens(input_ids) + self.text_positions(position_ids)
        if self.code_grid_size:
            is_code = (input_ids >= self.first_code_id) | (input_ids == self.code_mask_id)
            # The lookup includes tokens other than codes, so both tables have a gradient on every rank.
            place = ((position_ids - _FIRST_CODE) // self.codes_per_place).clamp(0, self.code_grid_size**2 - 1)
            rows = self.code_rows(place // self.code_grid_size)
            embedded = embedded + is_code.unsqueeze(-1) * (rows + self.code_columns(place % self.code_grid_size))
        return embedded


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
