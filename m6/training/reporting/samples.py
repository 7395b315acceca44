"""Generates images of fixed captions during the training, to show its progress."""

from __future__ import annotations

from pathlib import Path

from m6.checkpoints.loading import make_processor
from m6.config.run import RunConfig
from m6.config.sections import SampleSettings
from m6.decoding import Decoding
from m6.files import atomic_path
from m6.generation.drawing import Draft, draw_codes
from m6.generation.grid import in_rows, picture_grid
from m6.generation.pipeline import paint
from m6.generation.sampling import Sampling
from m6.runs.processes import Runtime
from m6.tokenizers.image import ImageTokenizer, load_image_tokenizer
from m6.tokenizers.processor import M6Processor
from m6.tokenizers.text import M6Tokenizer
from m6.training.engine.engine import Engine


class SampleGrids:
    """Draws grids of images with one row per caption, always from the same random numbers.

    All ranks draw the same images, because layers may communicate. The main rank writes them.

    Args:
        decoding: how codes are drawn.
        folder: RUN/samples.
    """

    def __init__(
        self,
        settings: SampleSettings,
        processor: M6Processor,
        image_tokenizer: ImageTokenizer,
        decoding: Decoding,
        folder: Path,
        runtime: Runtime,
    ) -> None:
        self.settings, self.processor, self.folder, self.runtime = settings, processor, folder, runtime
        self.image_tokenizer = image_tokenizer.to(runtime.device)
        passes = settings.passes if decoding == "masked" else None
        self.sampling = Sampling(
            settings.guidance_scale, settings.temperature, settings.top_k, settings.top_p, decoding, passes
        )
        # The same drafts each time: images of two steps differ only by the training.
        self.drafts = [
            Draft(caption, 0, index) for caption in settings.captions for index in range(settings.num_images)
        ]

    def draw(self, engine: Engine, step: int) -> Path | None:
        """Draws a grid with the current weights; returns the path of the PNG on the main rank, else None."""
        with engine.evaluating():
            codes = draw_codes(
                engine.module,
                self.processor,
                self.drafts,
                grid=self.image_tokenizer,
                sampling=self.sampling,
            )
        if not self.runtime.is_main:  # other ranks only take part in the collectives of the layers
            return None
        rows = in_rows(paint(self.image_tokenizer, codes), self.settings.num_images)
        grid = picture_grid(rows, self.settings.captions)
        file = self.folder / f"step_{step:08d}.png"
        with atomic_path(file) as temporary:
            grid.save(temporary, format="PNG")
        return file


def open_sample_grids(config: RunConfig, tokenizer: M6Tokenizer, folder: Path, runtime: Runtime) -> SampleGrids | None:
    """Opens the sample grids of a run in ``folder``; None if the run has none."""
    settings, image_tokenizer = config.m6.samples, config.m6.data.image_tokenizer
    if settings is None or image_tokenizer is None:
        return None
    processor, decoding = make_processor(config.model, tokenizer), config.m6.objectives.decodings[0]
    return SampleGrids(settings, processor, load_image_tokenizer(image_tokenizer), decoding, folder, runtime)
