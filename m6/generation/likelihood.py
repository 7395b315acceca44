"""Log-likelihoods of given targets under a model.

The likelihood of a caption ranks candidate images. Likelihoods of labels classify a text or an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from m6.data.collate import Collator
from m6.data.objectives import Example
from m6.model.modeling import M6ForConditionalGeneration
from m6.tokenizers.pictures import square_pixels
from m6.tokenizers.processor import M6Processor

if TYPE_CHECKING:
    from PIL.Image import Image


@torch.no_grad()
def target_log_likelihoods(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    examples: Sequence[Example],
    pictures: Sequence[np.ndarray | None],
    batch_size: int = 64,
) -> Tensor:
    """Returns log p(target, <eos> | image, source) of N examples.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        examples: N examples.
        pictures: the image of each example, uint8 [image_size, image_size, 3], or None.
        batch_size: examples per forward pass. Examples are sorted by length to reduce padding.

    Returns:
        fp64 [N] on the CPU, in nats.
    """
    scores = torch.empty(len(examples), dtype=torch.float64)
    prefixes = [0 if picture is None else processor.num_patches for picture in pictures]
    lengths = [p + len(e.source_ids) + len(e.target_ids) + 2 for p, e in zip(prefixes, examples, strict=True)]
    order = sorted(range(len(examples)), key=lengths.__getitem__)
    for begin in range(0, len(order), batch_size):
        part = order[begin : begin + batch_size]
        collator = Collator(
            tokenizer=processor.tokenizer,
            sequence_length=lengths[part[-1]],  # the longest of the batch
            num_patches=processor.num_patches,
            image_size=model.config.image_size,
            packing=False,
        )
        batch = collator([examples[i] for i in part], [pictures[i] for i in part]).to(model.device)
        output = model(**batch.model_inputs(), labels=batch.labels, return_logits=False)
        losses = output.target_losses.double().cpu().split([len(examples[i].target_ids) + 1 for i in part])
        scores[part] = -torch.stack([loss.sum() for loss in losses])
    return scores


def caption_scores(
    model: M6ForConditionalGeneration, processor: M6Processor, images: Sequence[Image], captions: Sequence[str]
) -> Tensor:
    """Returns the likelihood of each caption given its image, for ranking candidates.

    Args:
        model: in evaluation mode, trained on image captioning.
        processor: processor of the model.
        images: B images.
        captions: B texts.

    Returns:
        fp64 [B], mean log-likelihood of the caption's tokens and ``<eos>``, in nats.
    """
    side = model.config.image_size
    examples = [Example(source_ids=[], target_ids=processor.tokenizer.encode_ids(caption)) for caption in captions]
    # Resized, since the image tokenizer and the model may differ in image size, and a repainted image keeps its own.
    pictures = [square_pixels(image, side) for image in images]
    lengths = torch.tensor([len(example.target_ids) + 1 for example in examples])
    return target_log_likelihoods(model, processor, examples, pictures) / lengths


def label_log_likelihoods(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    sources: Sequence[Sequence[int]],
    labels: Sequence[str],
    pictures: Sequence[np.ndarray] | None = None,
) -> Tensor:
    """Returns log p(label, <eos> | image, source) of N sources and L labels.

    Args:
        model: in evaluation mode, fine-tuned on text_classification, or with images on visual_question_answering or
            image_text_matching (with the labels ``MATCH`` and ``NO_MATCH``).
        processor: processor of the model.
        sources: the token ids of N texts.
        labels: L candidates.
        pictures: N images, uint8 [image_size, image_size, 3], or None.

    Returns:
        fp64 [N, L] on the CPU, in nats.
    """
    targets = [processor.tokenizer.encode_ids(label) for label in labels]
    examples = [Example(source_ids=list(source), target_ids=target) for source in sources for target in targets]
    shown = [None] * len(sources) if pictures is None else pictures
    repeated = [picture for picture in shown for _ in labels]
    return target_log_likelihoods(model, processor, examples, repeated).view(len(sources), len(labels))
