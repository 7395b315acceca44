"""Text-to-image pipeline: model, processor and image tokenizer in one object."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from m6.checkpoints.loading import load_run_image_tokenizer, load_run_model
from m6.checkpoints.tokenizers import IMAGE_TOKENIZER
from m6.config.checks import check_captions, check_codes_fit, unknown_characters
from m6.data.captions import SeenCaptions
from m6.data.pictures import to_bytes
from m6.errors import UserError
from m6.generation.drawing import Draft, Repaint, draw_codes, num_steps, resolve_sampling
from m6.generation.likelihood import caption_scores
from m6.generation.sampling import Sampling
from m6.runs.data import kept_captions, write_captions
from m6.tokenizers.image import ImageTokenizer

if TYPE_CHECKING:
    from m6.model.modeling import M6ForConditionalGeneration
    from m6.tokenizers import M6Processor


@dataclass(frozen=True)
class TextToImageOutput:
    """Images of B captions; the ``num_images`` images of a caption are consecutive.

    Attributes:
        images: B * num_images images.
        codes: int64 [B * num_images, N], the image codes of each generated image.
        scores: fp64 [B * num_images], mean log-likelihood of the caption given the image, in nats. The images of a
            caption are sorted by score, best first. None without ``num_candidates``.
        warnings: unknown parts of the captions, see ``M6TextToImagePipeline.caption_warnings``.
    """

    images: list[Image.Image]
    codes: Tensor
    scores: Tensor | None
    warnings: list[str]


class M6TextToImagePipeline:
    """M6's text-to-image generation (arXiv 2103.00823, section 5.4): generate image codes from text and decode them.

    Args:
        model: fine-tuned on the objective image_code_denoising or text_to_image.
        processor: processor of the model.
        image_tokenizer: the image tokenizer of the model's training data.
        seen: record of the training captions; None: unknown.

    Raises:
        UserError: the model's vocabulary has too few image codes for the image tokenizer.
    """

    def __init__(
        self,
        model: M6ForConditionalGeneration,
        processor: M6Processor,
        image_tokenizer: ImageTokenizer,
        seen: SeenCaptions | None = None,
    ) -> None:
        check_codes_fit(
            model.config, image_tokenizer.codebook_size, image_tokenizer.num_codes, image_tokenizer.codes_per_place
        )
        self.model, self.processor, self.seen = model.eval(), processor, seen
        self.image_tokenizer = image_tokenizer.to(model.device).eval()

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: torch.device | str = "cpu") -> M6TextToImagePipeline:
        """Loads a folder written by ``save_pretrained`` or ``m6 export``, or a run's newest checkpoint.

        Raises:
            UserError: the folder holds no model, or a model without an image tokenizer.
        """
        folder = Path(folder)
        image_tokenizer = load_run_image_tokenizer(folder)
        return cls(*load_run_model(folder, torch.device(device)), image_tokenizer, kept_captions(folder))

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes model, processor and image tokenizer in the format of ``from_pretrained``."""
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        self.image_tokenizer.save_pretrained(Path(folder, IMAGE_TOKENIZER))
        if self.seen is not None:
            write_captions(Path(folder), self.seen)

    def caption_warnings(self, caption: str) -> list[str]:
        """Returns warnings of characters unknown to the tokenizer, and of parts missing in all training captions.

        Without a record of training captions (``seen``), only unknown characters are found.
        """
        tokenizer, warnings = self.processor.tokenizer, []
        if unknown := unknown_characters(tokenizer, caption):
            warnings.append(f'the caption "{caption}" has characters that the tokenizer does not know: {unknown}')
        new = None if self.seen is None else self.seen.warning(tokenizer, caption)
        return warnings if new is None else [*warnings, new]

    def __call__(
        self,
        captions: str | Sequence[str],
        *,
        num_images: int = 1,
        num_candidates: int | None = None,
        repaint: Repaint | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        seed: int = 0,
        batch_size: int = 16,
        progress: bool = True,
    ) -> TextToImageOutput:
        """Generates images of each caption.

        An image depends only on its caption, its index and the seed, not on ``batch_size`` or the other captions. But
        rounding differs between shapes and devices, and in bf16 this is enough to change images.

        Args:
            captions: a text, or B texts. Without ``num_candidates``, a text given twice gets the same images as one
                text with twice as many.
            num_images: images per caption.
            num_candidates: if given, the number of images generated per caption. The best ``num_images`` are kept,
                ranked by the caption's likelihood under the model, as in M6.
            repaint: an image and a part of it to draw anew by the caption.
            sampling: settings for sampling codes.
            seed: any integer.
            batch_size: images generated at once.
            progress: show a progress bar on a terminal.

        Raises:
            UserError: there is no caption, a caption is empty or too long, there are fewer candidates than images,
                the model was not trained for the decoding, or candidates are requested and it was not trained for
                captioning.
        """
        texts = [captions] if isinstance(captions, str) else list(captions)
        num_drawn = num_images if num_candidates is None else num_candidates
        if not texts or batch_size < 1:
            raise UserError(f"found {len(texts)} captions and batch_size {batch_size}; expected at least 1 of each")
        if not 1 <= num_images <= num_drawn:
            raise UserError(f"num_images {num_images} must be at least 1 and at most num_candidates {num_drawn}")
        if num_candidates is not None and "image_captioning" not in self.model.learned_objectives:
            raise UserError(
                "num_candidates: the model cannot choose among pictures: it does not say that it has learned "
                "m6.objectives.image_captioning; if it has, and an older version exported it, export it again"
            )
        if repaint is not None and sampling.decoding is None:
            sampling = replace(sampling, decoding="masked")  # left_to_right sees only the codes before
        sampling = resolve_sampling(self.model, sampling)
        if repaint is not None and sampling.decoding != "masked":
            raise UserError(f'repainting needs the decoding "masked", found "{sampling.decoding}"')
        grid = self.image_tokenizer
        # Fails before the first long batch.
        check_captions(
            self.model.config,
            self.processor.tokenizer,
            texts,
            grid.num_codes,
            as_targets=num_candidates is not None,
        )
        warnings = [each for text in dict.fromkeys(texts) for each in self.caption_warnings(text)]
        known = None if repaint is None else repaint.known_codes(grid)
        # The index of a repeated caption goes on: with equal indices its images would be the same.
        counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        drafts = [Draft(text, seed, next(counts[text])) for text in texts for _ in range(num_drawn)]
        codes, images, scores = [], [], []
        steps = -(-len(drafts) // batch_size) * num_steps(grid, sampling)
        with tqdm(total=steps, unit="pass", desc="drawing", disable=None if progress else True) as bar:
            for batch in _batches(drafts, batch_size):
                codes.append(
                    draw_codes(
                        self.model,
                        self.processor,
                        batch,
                        grid=grid,
                        sampling=sampling,
                        known=None if known is None else known.expand(len(batch), -1),
                        on_step=bar.update,
                    )
                )
                painted = paint(grid, codes[-1])
                images += painted if repaint is None else [repaint.framed(picture) for picture in painted]
                if num_candidates is not None:
                    batch_captions = [draft.caption for draft in batch]
                    scores.append(caption_scores(self.model, self.processor, images[-len(batch) :], batch_captions))
        if num_candidates is None:
            return TextToImageOutput(images, torch.cat(codes), None, warnings)
        # Codes, images and scores are ordered by caption, then by candidate. The sort is stable: equal scores keep the
        # order of the candidates on every device.
        ranking = torch.cat(scores).view(len(texts), num_drawn).argsort(dim=1, descending=True, stable=True)
        best = (ranking[:, :num_images] + torch.arange(len(texts)).unsqueeze(1) * num_drawn).flatten()
        chosen = [images[i] for i in best.tolist()]
        return TextToImageOutput(chosen, torch.cat(codes)[best], torch.cat(scores)[best], warnings)


@torch.no_grad()
def paint(image_tokenizer: ImageTokenizer, codes: Tensor) -> list[Image.Image]:
    """Decodes int64 codes [B, N] to images."""
    device = next(image_tokenizer.parameters()).device
    return [Image.fromarray(picture) for picture in to_bytes(image_tokenizer.decode(codes.to(device)))]


def _batches(items: list[Draft], size: int) -> Iterator[list[Draft]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
