"""``m6 generate``, ``m6 classify`` and ``m6 serve``: the use of a trained model."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m6.cli.options import (
    Checkpoint,
    DecodingWay,
    Passes,
    TopK,
    TopP,
    check_file,
    check_model,
    check_utf8,
    open_picture,
    refuse_options,
)
from m6.data.workers import check_number, usable_cores
from m6.decoding import TEMPERATURE
from m6.errors import UserError
from m6.files import atomic_path, read_lines, why_unwritable
from m6.generation.grid import CAPTIONS_NAME, write_pictures

if TYPE_CHECKING:
    from PIL.Image import Image

    from m6.generation.sampling import Sampling

_FOR_PICTURES = ("num", "candidates", "guidance", "decoding", "passes", "batch_size")
_SHOWN_WARNINGS = 8  # at most, of captions unknown to the model
_FOR_TEXTS = ("max_new_tokens", "num_beams")
_LONGEST_DEADLINE = 86_400.0  # a day
_FOR_SERVED_PICTURES = ("guidance", "temperature", "top_k", "top_p", "decoding", "passes")


def generate(
    context: typer.Context,
    run: Checkpoint,
    prompt: Annotated[
        str, typer.Argument(help="the caption of the pictures, the beginning of a text, or a question to --image")
    ] = "",
    image: Annotated[
        list[Path] | None,
        typer.Option(help="a picture to caption or to ask of; can be repeated. With --mask: the picture to repaint"),
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(help="LEFT,TOP,RIGHT,BOTTOM in pixels: only this box of --image is drawn, as the caption says"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="generate pictures: one PNG to write, with all pictures in a grid"),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(help=f"generate pictures: folder for PNG files and {CAPTIONS_NAME}; must not exist or be empty"),
    ] = None,
    captions: Annotated[
        Path | None,
        typer.Option(help="generate pictures of many captions: a text file with one caption per line"),
    ] = None,
    num: Annotated[int, typer.Option(min=1, help="pictures per caption")] = 1,
    candidates: Annotated[
        int | None,
        typer.Option(min=1, help="pictures generated per caption, of which the --num with the best scores are kept"),
    ] = None,
    guidance: Annotated[float, typer.Option(min=0.0, help="classifier-free guidance; 1: no guidance")] = 2.0,
    top_k: TopK = None,
    top_p: TopP = None,
    decoding: DecodingWay = None,
    passes: Passes = None,
    batch_size: Annotated[int, typer.Option(min=1, help="pictures generated at once")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest text in tokens")] = 48,
    num_beams: Annotated[int, typer.Option(min=1, help="beams for a text; 1: greedy")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help=f"0: deterministic; default: 0 for texts; for pictures the model's, {TEMPERATURE}"),
    ] = None,
    seed: int = 0,
) -> None:
    """Generates pictures of captions, captions of pictures or answers about them, or the continuation of a text."""
    is_text_to_image = out is not None or out_dir is not None
    # Arguments are checked before torch and the model are loaded, as loading takes seconds.
    if is_text_to_image:
        refuse_options(context, _FOR_TEXTS, "is for texts")
    else:
        refuse_options(context, _FOR_PICTURES, "is for pictures, which --out and --out-dir draw")
    check_utf8(context, prompt)
    if is_text_to_image:
        if bool(prompt) == bool(captions) or bool(image) != bool(mask):
            raise UserError(
                "generate: --out and --out-dir generate pictures: give either a caption or --captions; to repaint a "
                "picture, give also --image and --mask"
            )
        if image and len(image) > 1:
            raise UserError(f"generate: --mask repaints one picture, found {len(image)} with --image")
        box = None if mask is None else _read_box(mask)
        texts = [prompt] if captions is None else read_captions(captions)
        if out_dir is not None:
            if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
                raise UserError(f"{out_dir} exists and is not an empty folder; choose another one")
            if reason := why_unwritable(out_dir.absolute().parent):
                raise UserError(f"--out-dir {out_dir}: cannot be written: {reason}")
        if out is not None:
            check_file(out, "the PNG")
            if out.suffix.lower() != ".png":
                raise UserError(f"--out {out}: pictures are written as PNG; expected a name that ends in .png")
            if out_dir is not None and out.parent.absolute() == out_dir.absolute() and out.stem.isdigit():
                raise UserError(f"--out {out}: a picture of --out-dir may get this name; expected another one")
    elif not (prompt or image) or captions is not None or mask is not None:
        raise UserError(
            "generate: give a text to continue, or --image, with or without a question; to generate pictures, give "
            "--out or --out-dir"
        )
    elif (top_k or top_p) and not temperature:
        raise UserError("generate: --top-k and --top-p of texts need --temperature above 0; its default is 0")
    pictures = [open_picture(path) for path in image or ()]
    check_model(run)
    from m6.generation.sampling import Sampling

    temperature = 0.0 if temperature is None and not is_text_to_image else temperature
    sampling = Sampling(guidance, temperature, top_k, top_p, decoding, passes)
    from m6.runs.processes import default_device

    device = default_device()
    if not is_text_to_image:
        _write_texts(run, device, prompt, image or [], pictures, max_new_tokens, num_beams, sampling, seed)
        return
    equal = num * max(Counter(texts).values())
    if temperature == 0 and equal > 1:
        print(f"warning: with --temperature 0 the {equal} pictures of a caption are equal", file=sys.stderr)
    from m6.generation.drawing import Repaint
    from m6.generation.pipeline import M6TextToImagePipeline

    repaint = None if box is None else Repaint(pictures[0], box)
    pipeline = M6TextToImagePipeline.from_pretrained(run, device)
    generated = pipeline(
        texts,
        num_images=num,
        num_candidates=candidates,
        repaint=repaint,
        sampling=sampling,
        seed=seed,
        batch_size=batch_size,
    )
    for warning in generated.warnings[:_SHOWN_WARNINGS]:
        print(f"warning: {warning}", file=sys.stderr)
    if len(generated.warnings) > _SHOWN_WARNINGS:
        print(f"warning: and {len(generated.warnings) - _SHOWN_WARNINGS} more of this kind", file=sys.stderr)
    if out_dir is not None:  # before the grid, as the grid may be a file in this folder
        write_pictures(generated.images, [text for text in texts for _ in range(num)], out_dir)
        print(out_dir)
    if out is not None:
        from m6.generation.grid import in_rows, picture_grid

        # A row for each caption; the pictures of a single one stand alone.
        several = len(texts) > 1
        grid = picture_grid(in_rows(generated.images, num if several else None), texts if several else ())
        with atomic_path(out) as temporary:
            grid.save(temporary, format="PNG")
        print(out)


def read_captions(path: Path) -> list[str]:
    """Returns the lines of a text file, without empty ones.

    Raises:
        UserError: the file cannot be read, or has no caption.
    """
    captions = [line.strip() for line in read_lines(path) if line.strip()]
    if not captions:
        raise UserError(f"{path}: holds no caption")
    return captions


def _read_box(text: str) -> tuple[int, int, int, int]:
    numbers = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*", text)
    if numbers is None:
        raise UserError(f'--mask "{text}": expected LEFT,TOP,RIGHT,BOTTOM in pixels, such as 0,0,32,32')
    left, top, right, bottom = map(int, numbers.groups())
    return left, top, right, bottom


def _write_texts(
    run: Path,
    device: Any,
    prompt: str,
    paths: list[Path],
    pictures: list[Image],
    max_new_tokens: int,
    num_beams: int,
    sampling: Sampling,
    seed: int,
) -> None:
    import torch

    from m6.checkpoints.loading import load_run_model
    from m6.generation.captioning import caption, continue_as_learned, warn_unless_learned

    model, processor = load_run_model(run, device)
    torch.manual_seed(seed % 2**64)  # PyTorch's range of seeds; the generation of images accepts any integer
    options: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "do_sample": False}
    if sampling.effective_temperature > 0:
        # 0 is all tokens; without a value transformers draws from the 50 most likely ones.
        options |= {"do_sample": True, "temperature": sampling.effective_temperature, "top_k": sampling.top_k or 0}
        options |= {"top_p": sampling.top_p} if sampling.top_p else {}
    if pictures:
        objective, written = ("visual_question_answering", "answers") if prompt else ("image_captioning", "captions")
        warn_unless_learned(model, run, [objective], written)
        questions = [prompt] * len(pictures) if prompt else None
        texts = caption(model, processor, pictures, questions, **options)
        for path, text in zip(paths, texts, strict=True):
            print(f"{path}\t{text}")
        return
    warn_unless_learned(model, run, ["language_modelling", "text_continuation"], "texts")
    print(continue_as_learned(model, processor, [prompt], **options)[0])


def classify(
    command: typer.Context,
    run: Checkpoint,
    labels: Annotated[list[str], typer.Option("--label", help="one of the labels; give two or more")],
    text: Annotated[str, typer.Argument(help="the text; with --image a question, or a caption that may match")] = "",
    context: Annotated[str, typer.Option(help="what follows the text, if the model learned texts with a context")] = "",
    texts: Annotated[
        Path | None, typer.Option(help="a text file with one text per line; a tab and its context may follow")
    ] = None,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="a picture beside the text; can be repeated")
    ] = None,
) -> None:
    """Prints a line of each text or picture: it, a tab, its most likely label, a tab, the label's probability.

    The probabilities are among the given labels. Whether pictures match a caption is asked with the labels 是 and 不是.
    """
    # Arguments are checked before torch and the model are loaded, as loading takes seconds.
    check_utf8(command, text, context, *labels)
    if bool(text) == bool(texts) or (texts and images):
        raise UserError("classify: give a text, with or without --image, or a file of texts with --texts")
    if context and (texts or images):
        raise UserError("classify: --context follows a text without --image; a context of --texts follows a tab")
    if len({*labels}) < max(2, len(labels)) or not all(label.strip() for label in labels):
        raise UserError(f"classify: --label: expected two or more different labels, found {', '.join(labels)}")
    read = [(text, context)] if texts is None else _read_texts(texts)
    pictures = [open_picture(path) for path in images or ()]
    check_model(run)
    from m6.checkpoints.finetuning import is_exported
    from m6.checkpoints.loading import load_run_model
    from m6.config.run import load_config
    from m6.data.objectives import context_ids, max_text_tokens
    from m6.generation.captioning import warn_unless_learned
    from m6.generation.likelihood import label_log_likelihoods
    from m6.runs.processes import default_device
    from m6.tokenizers.pictures import square_pixels

    model, processor = load_run_model(run, default_device())
    of_pictures = ["visual_question_answering", "image_text_matching"]
    warn_unless_learned(model, run, of_pictures if pictures else ["text_classification"], "labels")
    config = model.config
    length = config.max_position_embeddings
    if not is_exported(run):
        settings = load_config(run / "config.json").m6
        length = settings.data.sequence_length  # training cut texts to this length
        if settings.objectives.text_classification.with_context and not (pictures or any(after for _, after in read)):
            print("warning: the model learned texts with a context, and none is given", file=sys.stderr)
    objective = "visual_question_answering" if pictures else "text_classification"
    room = max_text_tokens(objective, length, config.num_patches)
    tokenizer = processor.tokenizer
    sources = [tokenizer.encode_ids(each) for each, _ in read]
    if cut := sum(len(source) > room for source in sources):
        print(f"warning: {cut} of {len(sources)} texts are longer than {room} tokens, and cut", file=sys.stderr)
    for source, (_, after) in zip(sources, read, strict=True):
        del source[room:]
        source += context_ids(after, room - len(source), tokenizer)
    pixels = [square_pixels(picture, config.image_size) for picture in pictures]
    if pixels:
        sources *= len(pixels)
    scores = label_log_likelihoods(model, processor, sources, labels, pixels or None)
    best = scores.softmax(dim=1).max(dim=1)
    names: Sequence[object] = images or [each for each, _ in read]
    for name, index, share in zip(names, best.indices.tolist(), best.values.tolist(), strict=True):
        print(f"{name}\t{labels[index]}\t{share:.4f}")


def _read_texts(path: Path) -> list[tuple[str, str]]:
    """The lines of a file as (text before the tab, text after it). Lines without a text are left out."""
    parts = [line.partition("\t") for line in read_lines(path)]
    found = [(text, context) for text, _, context in parts if text.strip()]
    if not found:
        raise UserError(f"{path}: holds no text")
    return found


def serve(
    context: typer.Context,
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0: all of this machine")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free one")] = 8000,
    max_batch_size: Annotated[int, typer.Option(min=1, help="most requests of a batch")] = 16,
    max_waiting: Annotated[int, typer.Option(min=1, help="most requests in the queue; others get status 429")] = 64,
    deadline: Annotated[float, typer.Option(help="longest time of a request in seconds")] = 60.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest caption in tokens")] = 48,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: PyTorch's choice")] = None,
    guidance: Annotated[float, typer.Option(min=0.0, help="pictures: classifier-free guidance; 1: none")] = 2.0,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help=f"pictures: 0 is deterministic; default: the model's, {TEMPERATURE}"),
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    decoding: DecodingWay = None,
    passes: Passes = None,
) -> None:
    """Serves a model over HTTP, with a demo page, until Ctrl-C or SIGTERM."""
    if not 0.001 <= deadline <= _LONGEST_DEADLINE:  # typer's own limits let nan pass
        raise UserError(f"serve: --deadline must be from 0.001 to {_LONGEST_DEADLINE:g} seconds, found {deadline}")
    for package in ("fastapi", "uvicorn", "python_multipart"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f'serve needs the package {package}: pip install "m6-recipes[serve]"')
    if threads is not None:
        check_number("--threads", threads, usable_cores())
    check_model(checkpoint)
    from m6.generation.sampling import Sampling

    sampling = Sampling(guidance, temperature, top_k, top_p, decoding, passes)
    from m6.serving.server import draws
    from m6.serving.server import serve as serve_folder

    if not draws(checkpoint):
        refuse_options(context, _FOR_SERVED_PICTURES, f"is for pictures, which the model of {checkpoint} does not draw")
    serve_folder(
        checkpoint,
        host=host,
        port=port,
        max_batch_size=max_batch_size,
        max_waiting=max_waiting,
        deadline_s=deadline,
        max_new_tokens=max_new_tokens,
        threads=threads,
        sampling=sampling,
    )
