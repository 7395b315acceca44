"""``m6 data``: data folders, text tokenizers, image codes, and corpora from recipes."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from m6.architecture.settings import LARGEST_VOCABULARY
from m6.cli.options import Overrides
from m6.data.sources import BUILT_IN, SourceOptions, find_sources
from m6.data.workers import check_number, usable_cores
from m6.errors import UserError
from m6.files import cache_folder

if TYPE_CHECKING:
    from m6.evaluation.caption_matcher import CaptionMatcher

app = typer.Typer(help="Data sets: build shards with a manifest.", no_args_is_help=True)


def _processes(option: str, given: int | None) -> int:
    """The number of processes of an option, by default the number of cores. UserError for far more than the cores."""
    cores = usable_cores()
    check_number(option, given or cores, cores)
    return given or cores


def _parse_limit(text: str) -> tuple[str, int]:
    """Parses ``N`` or ``SOURCE=N`` to the source (empty for ``N``) and the number of rows."""
    source, _, rows = text.rpartition("=")
    if not re.fullmatch("[0-9]{1,15}", rows):  # str.isdigit also accepts digits unknown to int, such as "²"
        raise UserError(f"--limit {text}: expected N or SOURCE=N, as in 500 or emoji=500")
    return source, int(rows)


def _parse_licence(text: str) -> tuple[str, str]:
    """Parses ``LICENCE`` or ``SOURCE=LICENCE`` to the source (empty for ``LICENCE``) and the licence."""
    source, _, licence = text.partition("=")
    if "=" not in text or not re.fullmatch(r"[\w-]+", source):  # a licence may hold "=", as a URL with a query does
        source, licence = "", text
    if not licence:
        raise UserError(f"--licence {text}: expected LICENCE or SOURCE=LICENCE, as in CC-BY-4.0 or photos=private")
    return source, licence


@app.command()
def build(
    source: Annotated[
        list[str],
        typer.Argument(
            help=f"Built-in sources ({', '.join(BUILT_IN)}), or your own data: a folder of pictures with captions, "
            "Parquet, JSONL, CSV, text or Markdown files, WebDataset tar files, a saved data set, or hf:NAME[:SPLIT]. "
            "CALLED=PATH sets its name."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The data folder to make.")],
    image_size: Annotated[int, typer.Option(help="Longest side of a stored picture, in pixels.")] = 64,
    passage_chars: Annotated[int, typer.Option(help="Longest passage or caption, in characters.")] = 256,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="Use only the first N rows of each source, or of one: SOURCE=N. Can be repeated."),
    ] = None,
    validation_share: Annotated[float, typer.Option(help="Share of the groups held out for validation.")] = 0.01,
    test_share: Annotated[float, typer.Option(help="Share of the groups held out for testing.")] = 0.01,
    max_bad_share: Annotated[float, typer.Option(help="Refuse a source if a larger share of its rows is bad.")] = 0.01,
    text_column: Annotated[str, typer.Option(help="Your own data: the column of captions or texts.")] = "text",
    image_column: Annotated[
        str | None, typer.Option(help='Your own data: the column of pictures (default: "image" if it exists).')
    ] = None,
    question_column: Annotated[
        str | None,
        typer.Option(help="Your own data: the column of questions about pictures, read instead of captions."),
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Your own data: the column of labels, or of the answers to questions.")
    ] = None,
    context_column: Annotated[
        str | None,
        typer.Option(
            help="Your own data: the column of what belongs to a labelled text, such as a headline's article."
        ),
    ] = None,
    split_column: Annotated[
        str | None, typer.Option(help="Your own data: the column of splits; default: names of folders or files.")
    ] = None,
    group_column: Annotated[
        str | None,
        typer.Option(
            help="Your own data: rows with the same value are in one split; default: equal captions or pictures."
        ),
    ] = None,
    licence: Annotated[
        list[str] | None,
        typer.Option(help="Your own data: its licence, or SOURCE=LICENCE for one source. Can be repeated."),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for fetched packages.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that convert pictures.")] = None,
) -> None:
    """Builds a data folder: Parquet shards per split, and a manifest with counts, checksums and licences."""
    from m6.data.build import BuildSettings
    from m6.data.build import build as build_folder

    limits = dict(_parse_limit(text) for text in limit or [])  # the empty name is the limit of all sources
    licences = dict(_parse_licence(text) for text in licence or [])
    settings = BuildSettings(
        image_size=image_size,
        passage_chars=passage_chars,
        limit=limits.pop("", None),
        limits=limits,
        validation_share=validation_share,
        test_share=test_share,
        max_bad_share=max_bad_share,
    )
    options = SourceOptions(
        cache=cache or cache_folder(),
        passage_chars=passage_chars,
        text_column=text_column,
        image_column=image_column,
        question_column=question_column,
        label_column=label_column,
        context_column=context_column,
        split_column=split_column,
        group_column=group_column,
        licence=licences.pop("", None),
        licences=licences,
    )
    sources = find_sources(source, options)
    manifest, built = build_folder(sources, out, settings, _processes("--workers", workers))
    typer.echo(f"{out} {'is built' if built else 'holds this data set already'}")
    for name, entry in manifest.sources.items():
        rows = ", ".join(f"{split} {part.rows:,}" for split, part in entry.splits.items())
        size = sum(part.bytes for part in entry.splits.values()) / 1e6
        typer.echo(f"  {name}: {rows} rows, {size:.1f} MB, {entry.licence}, skipped {sum(entry.skipped.values())}")


@app.command()
def verify(
    data: Annotated[Path, typer.Argument(help="The data folder.")],
    threads: Annotated[
        int | None, typer.Option(min=1, help="Shards read at once; default: as many as there are cores.")
    ] = None,
) -> None:
    """Compares the sizes and checksums of all shards with the manifest, as before a long run on a copied folder."""
    from m6.data.manifest import Manifest
    from m6.data.verification import verify_folder

    number, problems = verify_folder(Manifest.load(data), _processes("--threads", threads))
    if problems:
        for problem in problems:
            typer.echo(problem)
        raise UserError(f"{len(problems)} of {number} shards of {data} are missing or damaged")
    typer.echo(f"{data}: all {number} shards are as in the manifest")


@app.command()
def tokenizer(
    data: Annotated[Path, typer.Argument(help='The data folder, made by "m6 data build".')],
    out: Annotated[Path, typer.Option(help="The tokenizer folder to make.")],
    vocab_size: Annotated[
        int, typer.Option(min=258, max=LARGEST_VOCABULARY, help="Text pieces, including 256 for single bytes.")
    ] = 21128,
    image_vocab_size: Annotated[
        int, typer.Option(min=0, max=LARGEST_VOCABULARY, help="Image codes in the joint vocabulary.")
    ] = 8192,
    character_coverage: Annotated[
        float, typer.Option(min=0.9, max=1.0, help="Share of the characters with pieces; the others become bytes.")
    ] = 0.9998,
    max_piece_length: Annotated[
        int, typer.Option(min=1, max=16, help="Characters of the longest piece; 2: captions can be composed of words.")
    ] = 16,
    sample_megabytes: Annotated[int, typer.Option(min=1, help="Size of the random sample of rows to train on.")] = 256,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tokenizer that is in the folder.")] = False,
) -> None:
    """Trains a SentencePiece tokenizer on the train split of a data folder."""
    # Imported here, as "m6 data build" must not wait for torch.
    from m6.data.manifest import Manifest
    from m6.training.tokenizers.text import train_text_tokenizer

    trained = train_text_tokenizer(
        Manifest.load(data),
        out,
        vocab_size,
        image_vocab_size=image_vocab_size,
        character_coverage=character_coverage,
        max_piece_length=max_piece_length,
        sample_bytes=sample_megabytes << 20,
        overwrite=overwrite,
    )
    typer.echo(
        f"{out} holds {trained.text_vocab_size:,} text pieces; with special tokens and {image_vocab_size:,} image "
        f"codes the vocabulary is {trained.vocab_size:,}, fingerprint {trained.fingerprint[:12]}"
    )


@app.command()
def codes(
    data: Annotated[Path, typer.Argument(help='The data folder, made by "m6 data build".')],
    image_tokenizer: Annotated[
        str, typer.Option(help="Folder of an image tokenizer, or the name of a VQModel on the Hub.")
    ],
    source: Annotated[
        list[str] | None,
        typer.Option(help="A source to encode; can be repeated; default: all with pictures and captions."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures encoded at once.")] = 64,
    max_bad_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Fail if a larger share of a source's pictures is bad.")
    ] = 0.01,
) -> None:
    """Encodes the pictures of a data folder to image codes, stored under the image tokenizer's checksum."""
    from m6.data.codes import write_codes
    from m6.data.manifest import Manifest
    from m6.runs.processes import default_device
    from m6.tokenizers.image import load_image_tokenizer

    manifest = Manifest.load(data)
    device = default_device()
    tokenizer = load_image_tokenizer(image_tokenizer).to(device)
    folder, written = write_codes(
        manifest, tokenizer, source, batch_size=batch_size, max_bad_share=max_bad_share, device=device
    )
    typer.echo(
        f"{folder} holds {written.num_codes} codes of [0, {written.codebook_size:,}) for each picture, tokenizer "
        f"{written.tokenizer[:16]}"
    )
    for name, splits in written.sources.items():
        rows = ", ".join(f"{split} {entry.rows:,}" for split, entry in splits.items())
        typer.echo(f"  {name}: {rows} rows, skipped {sum(written.skipped.get(name, {}).values())}")


@app.command()
def corpus(
    recipe: Annotated[Path, typer.Argument(help="JSON of the corpus, or the name of a shipped recipe.")],
    executor: Annotated[
        Literal["local", "slurm"], typer.Option(help="local: processes of this machine; slurm: arrays of jobs.")
    ] = "local",
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of a stage. The result does not depend on it.")] = 1,
    overrides: Overrides = None,
) -> None:
    """Makes a data folder from large inputs: cleans, filters, removes copies and what is held out."""
    from m6.corpus.launch import make_corpus
    from m6.corpus.output import load_record
    from m6.corpus.recipe import load_recipe

    settings = load_recipe(recipe, tuple(overrides or ()))
    if executor == "local":
        check_number("--tasks", tasks, usable_cores())
    launched = make_corpus(settings, executor, tasks, open_scorer)
    if launched.jobs:
        for stage, job in launched.jobs.items():
            typer.echo(f"{stage}: job {job}")
        typer.echo(f"{launched.out} is complete when they have ended; the same command continues after a failure")
        return
    typer.echo(f"{launched.out} {'holds this corpus already' if launched.was_built else 'is built'}")
    record = load_record(launched.out)
    for name, counters in record.inputs.items():
        removed = ", ".join(f"{stage} {sum(reasons.values()):,}" for stage, reasons in counters.removed.items())
        typer.echo(
            f"  {name}: {counters.documents:,} documents read, {counters.kept:,} kept in {counters.rows:,} rows; "
            f"removed: {removed or 'none'}"
        )
    for name, counters in record.sets.items():
        typer.echo(
            f"  the set {name}: {counters.kept:,} of {counters.documents:,} texts compared with training documents"
        )


def open_scorer(run: Path) -> "CaptionMatcher":
    """Opens a recipe's ``matching_model``. The tasks of the corpus receive this function as an argument."""
    from m6.evaluation.caption_matcher import CaptionMatcher  # imports torch; most recipes do not need it

    return CaptionMatcher(run)


@app.command()
def report(
    data: Annotated[Path, typer.Argument(help='A data folder, made by "m6 data corpus".')],
    out: Annotated[Path | None, typer.Option(help="Folder of the page; default DATA/report.")] = None,
) -> None:
    """Writes a page about a corpus: what was read, removed and kept, with histograms and examples."""
    from m6.plots.corpus import write_corpus_page

    typer.echo(write_corpus_page(data, out or data / "report"))
