"""Text generation: captions of images and continuations of prompts."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from m6.architecture.configuration import M6Config
from m6.model.modeling import M6ForConditionalGeneration

if TYPE_CHECKING:
    from PIL.Image import Image

    from m6.tokenizers import M6Processor, M6Tokenizer


class TextOnly(LogitsProcessor):
    """Restricts generation to text pieces and ``<eos>``; image codes and other special tokens get -inf."""

    def __init__(self, config: M6Config) -> None:
        self.text_vocab_size = config.text_vocab_size
        self.eos_token_id = config.eos_token_id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.full_like(scores, float("-inf"))
        for part in (slice(self.text_vocab_size), slice(self.eos_token_id, self.eos_token_id + 1)):
            allowed[:, part] = scores[:, part]
        return allowed


def caption(
    model: M6ForConditionalGeneration,
    processor: "M6Processor",
    images: Sequence["Image"],
    questions: Sequence[str] | None = None,
    *,
    num_beams: int = 5,
    max_new_tokens: int = 64,
    batch_size: int = 64,
    **generate_kwargs: Any,
) -> list[str]:
    """Generates a caption of each image (arXiv 2103.00823, section 3), or an answer to a question.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        images: N images.
        questions: N texts, used as sources with their images, as in the objective visual_question_answering; None:
            captions.
        num_beams: width of the beam search; 1 is greedy decoding.
        max_new_tokens: longest caption or answer, ``<eos>`` included.
        batch_size: texts generated at a time.
        generate_kwargs: passed to ``model.generate``.

    Returns:
        N texts.
    """
    generate_kwargs |= {"num_beams": num_beams, "max_new_tokens": max_new_tokens}
    texts = []
    for begin in range(0, len(images), batch_size):
        part = slice(begin, begin + batch_size)
        inputs = processor(images=list(images[part]), text=None if questions is None else list(questions[part]))
        texts += _generate_text(model, processor.tokenizer, dict(inputs), **generate_kwargs)
    return texts


def warn_unless_learned(
    model: M6ForConditionalGeneration, folder: Path, objectives: Sequence[str], written: str
) -> None:
    """Prints a warning if a model's list of learned objectives has none of these.

    Args:
        model: the model, loaded from the folder.
        folder: folder of the model, for the warning.
        objectives: objectives for the requested kind of output.
        written: the kind of output, such as "captions".
    """
    if not {*objectives} & {*model.learned_objectives}:
        print(
            f"warning: {folder}: the model does not say that it has learned m6.objectives.{' or '.join(objectives)}; "
            f"its {written} may mean nothing",
            file=sys.stderr,
        )


def continue_as_learned(
    model: M6ForConditionalGeneration, processor: "M6Processor", prompts: Sequence[str], **options: Any
) -> list[str]:
    """Continues texts by a learned objective of the model.

    The default is ``continue_text``. For a model trained on text_continuation and not on language_modelling, the prompt
    is the source, and the continuation is the target.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        prompts: B prompts of any lengths.
        options: passed to ``continue_text``, with ``max_new_tokens``.

    Returns:
        B texts, which include the prompts.
    """
    learned = model.learned_objectives
    if "text_continuation" not in learned or "language_modelling" in learned:
        return continue_text(model, processor, prompts, **options)
    rests = write_targets(model, processor, [processor.tokenizer.encode_ids(prompt) for prompt in prompts], **options)
    return [prompt + rest for prompt, rest in zip(prompts, rests, strict=True)]


def continue_text(
    model: M6ForConditionalGeneration,
    processor: "M6Processor",
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    **generate_kwargs: Any,
) -> list[str]:
    """Continues texts as a language model: the source is empty, and the target begins with the prompt.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        prompts: B prompts of any lengths.
        max_new_tokens: most tokens after the prompt, ``<eos>`` included.
        generate_kwargs: passed to ``model.generate``, such as ``do_sample=True, top_p=0.9``.

    Returns:
        B texts, which include the prompts.
    """
    tokenizer, config = processor.tokenizer, model.config
    rows = [[config.bos_token_id, *tokenizer.encode_ids(prompt)] for prompt in prompts]
    inputs = {"input_ids": _padded(rows, config.pad_token_id)}
    return _generate_text(model, tokenizer, inputs, max_new_tokens=max_new_tokens, **generate_kwargs)


def write_targets(
    model: M6ForConditionalGeneration,
    processor: "M6Processor",
    sources: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    **generate_kwargs: Any,
) -> list[str]:
    """Writes the targets of N sources, for objectives without images.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        sources: token ids of each source, of any lengths.
        max_new_tokens: longest target, ``<eos>`` included.
        batch_size: targets generated at a time.
        generate_kwargs: passed to ``model.generate``.

    Returns:
        N texts.
    """
    config, texts = model.config, []
    for begin in range(0, len(sources), batch_size):
        rows = [[*source, config.bos_token_id] for source in sources[begin : begin + batch_size]]
        inputs = {"input_ids": _padded(rows, config.pad_token_id)}
        texts += _generate_text(model, processor.tokenizer, inputs, max_new_tokens=max_new_tokens, **generate_kwargs)
    return texts


def _padded(rows: list[list[int]], pad_token_id: int) -> Tensor:
    """Pads on the left, so new tokens follow the prompts."""
    length = max(map(len, rows))
    return torch.tensor([[pad_token_id] * (length - len(row)) + row for row in rows])


def _generate_text(
    model: M6ForConditionalGeneration, tokenizer: "M6Tokenizer", inputs: dict[str, Any], **generate_kwargs: Any
) -> list[str]:
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    text_only = LogitsProcessorList([TextOnly(model.config)])
    sequences = model.generate(inputs.pop("input_ids"), logits_processor=text_only, **inputs, **generate_kwargs)
    # Prompt and continuation are decoded together: a word may be split between them.
    targets = [row[row.index(model.config.bos_token_id) + 1 :] for row in sequences.tolist()]
    texts = [[token for token in target if token < model.config.text_vocab_size] for target in targets]
    return [str(tokenizer.decode(text)) for text in texts]
