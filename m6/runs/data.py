"""Opens the data of a run and checks that the model can read it."""

from __future__ import annotations

from m6.config.checks import check_captions, check_codes_fit, check_tokenizer
from m6.config.run import RunConfig
from m6.data.pretraining import PretrainingData


def open_data(config: RunConfig, split: str = "train") -> PretrainingData:
    """Opens the run's micro-batches, of one split and of validation.

    Raises:
        UserError: the data folder, the tokenizer or the image tokenizer does not fit the model.
    """
    settings = config.m6
    data = PretrainingData(
        settings.data,
        settings.objectives,
        split=split,
        seed=settings.training.seed,
        micro_batch_size=config.deepspeed.micro_batch_size,
        image_size=config.model.image_size,
        patch_size=config.model.patch_size,
    )
    check_tokenizer(config, data.tokenizer)
    if data.codes is not None:
        check_codes_fit(config.model, data.codes.codebook_size, data.codes.num_codes)
        captions = [] if settings.samples is None else settings.samples.captions
        check_captions(config.model, data.tokenizer, captions, data.codes.num_codes)
    return data
