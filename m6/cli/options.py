"""Arguments of several commands, with one name and one explanation each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m6.decoding import Decoding
from m6.errors import UserError
from m6.files import why_unwritable

if TYPE_CHECKING:
    from PIL.Image import Image


ConfigFile = Annotated[Path, typer.Argument(help="the run's JSON, or the name of a shipped one, for example m6_smoke")]
ConfigFiles = Annotated[list[Path], typer.Argument(help="JSONs of runs, or names of shipped ones")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY.PATH=VALUE, overrides a value of the JSON; can be repeated"),
]
RunFolder = Annotated[Path, typer.Argument(help="the folder of a run")]
NewRunFolder = Annotated[
    Path | None,
    typer.Option("--run-dir", help="folder of the run; default runs/NAME of the JSON; an existing run is resumed"),
]
Restart = Annotated[
    bool,
    typer.Option("--restart", help="begin at step 0; the files of the old run are kept under another name"),
]
Checkpoint = Annotated[Path, typer.Option("--checkpoint", help="the folder of a run, or of an exported model")]
TopK = Annotated[int | None, typer.Option(min=1, help="draw from the k most likely codes")]
TopP = Annotated[float | None, typer.Option(help="draw from the fewest codes whose probabilities sum to p")]
DecodingWay = Annotated[
    Decoding | None,
    typer.Option(
        "--decoding",
        help="pictures: masked (all codes in several passes) or left_to_right; default: as the model was trained",
    ),
]
Passes = Annotated[
    int | None,
    typer.Option(min=1, help="pictures: passes of the model for a picture, if it draws masked; default: 12"),
]
ProfileFile = Annotated[Path | None, typer.Option("--profile", help="profile that m6 plan calibrate wrote")]


def refuse_options(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Raises UserError if one of the parameters ``names`` is given on the command line; ``reason`` follows its name."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"{context.info_name}: --{name.replace('_', '-')} {reason}")


def check_run(folder: Path) -> None:
    """Raises UserError if there is no folder of a run, before the import of torch."""
    if not folder.is_dir():
        raise UserError(f"{folder / 'config.json'}: no such file; is {folder} the folder of a run?")


def check_model(folder: Path) -> None:
    """Raises UserError if there is no such folder of a run or of an exported model, before the import of torch."""
    if not folder.is_dir():
        raise UserError(f"{folder}: neither a run nor an exported model (no readable config.json)")


def check_utf8(context: typer.Context, *texts: str) -> None:
    """Raises UserError if a text of the command line is not in UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{context.info_name}: the text {text!r} is not in UTF-8") from None


def check_file(out: Path, expected: str) -> None:
    """Raises UserError if a command could not write to ``out`` at its end. Called before the work of the command."""
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder; expected {expected} to write")
    if reason := why_unwritable(out.parent):
        raise UserError(f"--out {out}: cannot be written: {reason}; expected {expected} in another folder")


def check_report(out: Path) -> None:
    """Raises UserError if ``out`` cannot be a Markdown report. Its numbers go to NAME.json in the same folder."""
    check_file(out, "the Markdown file")
    if out.suffix == ".json":
        raise UserError(
            f"--out {out}: the numbers get this name; expected a Markdown file, such as {out.with_suffix('.md')}"
        )


def open_picture(path: Path) -> Image:
    """Opens an image file in RGBA; UserError if it is missing or not an image."""
    from PIL import Image

    from m6.colours import to_rgba

    try:
        return to_rgba(Image.open(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error and more for damaged files
        raise UserError(f"{path}: not a readable picture: {error}") from None
