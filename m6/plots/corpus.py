"""The page about a corpus: numbers read, removed and kept, with histograms, examples and sheets of thumbnails."""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from PIL import Image

from m6.corpus.counters import KEPT, Counters, Histogram, Sample
from m6.corpus.output import load_record
from m6.files import atomic_path, write_text
from m6.formatting import markdown_table
from m6.plots.style import plotting, save_figure

_CELL = 96  # pixels, the largest side of images in the record
_GAP = 8
_COLUMNS = 10  # images, or half as many pairs


def write_sheet(samples: Sequence[Sample], out: Path) -> None:
    """Writes a PNG with the images of samples in rows. Next to a removed duplicate stands the kept image.

    Args:
        samples: samples with images.
        out: the PNG file.
    """
    cells = [[each.picture] if each.kept_picture is None else [each.picture, each.kept_picture] for each in samples]
    width = max(map(len, cells))
    columns = min(_COLUMNS // width, len(cells))
    rows = math.ceil(len(cells) / columns)
    step = width * _CELL + _GAP
    sheet = Image.new("RGB", (columns * step - _GAP, rows * (_CELL + _GAP) - _GAP), "white")
    for number, cell in enumerate(cells):
        for place, picture in enumerate(cell):
            if picture is not None:
                corner = (number % columns * step + place * _CELL, number // columns * (_CELL + _GAP))
                sheet.paste(Image.open(io.BytesIO(base64.b64decode(picture))), corner)
    with atomic_path(out) as temporary:
        sheet.quantize(256).save(temporary, "PNG", optimize=True)


_SHOWN = 5  # examples of each reason
_COPIES = "duplicates: near duplicate"


def write_corpus_page(data: Path, out: Path) -> Path:
    """Writes ``report.md`` and its figures.

    Args:
        data: a folder made by ``m6 data corpus``.
        out: the folder of the page.

    Returns:
        The page.

    Raises:
        UserError: ``data`` has no record of a corpus.
    """
    inputs = load_record(data).inputs
    total = Counters()
    for counters in inputs.values():
        total.add(counters)
    out.mkdir(parents=True, exist_ok=True)
    _plot_lengths(total.histograms, out / "lengths.png")
    _plot_shares(total.histograms, out / "chinese.png")
    pairs = [sample for sample in total.samples.get(_COPIES, []) if sample.picture is None]
    page = "\n\n".join(
        (
            f"# The corpus {data.resolve().name}",
            "## Documents and pictures\n" + _funnel(inputs | {"all": total}),
            "## Characters, of captions too\n" + _characters(inputs | {"all": total}),
            "## Changed inside of documents\n" + _changed(inputs | {"all": total}),
            "## Lengths and shares of Chinese\n![Lengths](lengths.png)\n\n![Shares of Chinese characters](chinese.png)",
            *_pictures(inputs, total, out),
            "## Near duplicates of texts and what was kept\n" + _pairs(pairs),
            "## Removed documents\n" + _examples(total.samples),
        )
    )
    write_text(out / "report.md", page + "\n")
    return out / "report.md"


def _pictures(inputs: Mapping[str, Counters], total: Counters, out: Path) -> Iterator[str]:
    """Writes contact sheets and yields their sections; nothing without images."""
    if "read" not in total.histograms or not total.histograms["read"].sides:
        return
    _plot_sides(total.histograms["read"], out / "sides.png")
    yield "## Pictures\n![Shorter sides of the pictures](sides.png)"
    kept = {f"Kept of {name}": counters.samples.get(KEPT, []) for name, counters in inputs.items()}
    removed = {f"Removed, {name}": samples for name, samples in sorted(total.samples.items()) if name != KEPT}
    for title, samples in (kept | removed).items():
        if shown := [sample for sample in samples if sample.picture is not None]:
            file = re.sub(r"\W+", "_", title.lower()) + ".png"
            write_sheet(shown, out / file)
            beside = " Beside each is what was kept instead." if shown[0].kept_picture else ""
            captions = "; ".join(_cell(sample.text) for sample in shown)
            yield f"### {title}\n![{title}]({file})\n\nIn order: {captions}.{beside}"


def _funnel(tallies: Mapping[str, Counters]) -> str:
    lines = [("read", [counters.documents for counters in tallies.values()])]
    for stage, reason in _reasons(tallies.values()):
        lines.append(
            (f"- {stage}: {reason}", [counters.removed.get(stage, Counter())[reason] for counters in tallies.values()])
        )
    lines.append(("kept", [counters.kept for counters in tallies.values()]))
    lines.append(("rows of the data folder", [counters.rows for counters in tallies.values()]))
    return markdown_table(["", *tallies], [[name, *map(_number, counts)] for name, counts in lines])


def _characters(tallies: Mapping[str, Counters]) -> str:
    stages = dict.fromkeys(stage for counters in tallies.values() for stage in counters.removed_characters)
    lines = [["usable", *(_number(counters.characters) for counters in tallies.values())]]
    for stage in stages:
        lines.append([f"- {stage}", *(_number(counters.removed_characters[stage]) for counters in tallies.values())])
    kept = [
        f"{_number(counters.kept_characters)} ({_share(counters.kept_characters, counters.characters)})"
        for counters in tallies.values()
    ]
    return markdown_table(["", *tallies], [*lines, ["kept", *kept]])


def _changed(tallies: Mapping[str, Counters]) -> str:
    counts = [
        counters.changed + Counter({f"members not read: {kind}": number for kind, number in counters.unread.items()})
        for counters in tallies.values()
    ]
    kinds = sorted({kind for each in counts for kind in each})
    return markdown_table(["", *tallies], [[kind, *(_number(each[kind]) for each in counts)] for kind in kinds])


def _pairs(samples: list[Sample]) -> str:
    if not samples:
        return "There are none."
    rows = [
        [_cell(sample.id), _cell(sample.text), _cell(sample.kept_id or ""), _cell(sample.kept_text or "")]
        for sample in samples
    ]
    return markdown_table(["removed", "its text", "kept", "its text"], rows, "llll")


def _examples(samples: Mapping[str, list[Sample]]) -> str:
    rows = [
        [_cell(reason), _cell(sample.id), _cell(sample.text)]
        for reason, found in sorted(samples.items())
        if reason != _COPIES
        for sample in found[:_SHOWN]
        if sample.picture is None
    ]
    return markdown_table(["reason", "document", "text"], rows, "lll") if rows else "None was removed."


def _reasons(tallies: Iterable[Counters]) -> list[tuple[str, str]]:
    """All stages and reasons: stages in their order, the most frequent reason first."""
    counts: dict[str, Counter[str]] = {}
    for counters in tallies:
        for stage, reasons in counters.removed.items():
            counts.setdefault(stage, Counter()).update(reasons)
    order = dict.fromkeys(["read", "filter", "matching", "duplicates", "captions", "decontamination", *counts])
    return [(stage, reason) for stage in order for reason, _ in counts.get(stage, Counter()).most_common()]


def _plot_lengths(histograms: Mapping[str, Histogram], out: Path) -> None:
    powers = sorted({power for histogram in histograms.values() for power in histogram.lengths})
    bars = {name: [histogram.lengths[power] for power in powers] for name, histogram in histograms.items()}
    _plot(bars, [f"{2**power:,}" for power in powers], "characters of a document, at least", out)


def _plot_shares(histograms: Mapping[str, Histogram], out: Path) -> None:
    bars = {name: [histogram.shares[tenth] for tenth in range(10)] for name, histogram in histograms.items()}
    _plot(bars, [f"{tenth * 10} %" for tenth in range(10)], "share of Chinese characters, at least", out)


def _plot_sides(read: Histogram, out: Path) -> None:
    powers = sorted(read.sides)
    bars = {"read": [read.sides[power] for power in powers]}
    _plot(bars, [f"{2**power:,}" for power in powers], "shorter side of a picture in pixels, at least", out)


def _plot(bars: Mapping[str, list[int]], ticks: list[str], title: str, out: Path) -> None:
    with plotting() as pyplot:
        figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
        for number, (name, counts) in enumerate(bars.items()):
            places = [place + (number - (len(bars) - 1) / 2) * 0.4 for place in range(len(ticks))]
            axes.bar(places, counts, width=0.4, label=name)
        axes.set_xticks(range(len(ticks)), ticks, fontsize="small")
        axes.set(title=title, ylabel="documents")
        axes.legend()
        save_figure(figure, out)


def _cell(text: str) -> str:
    # Texts of strangers: escape their markup, and line breaks, since these would end the table.
    return html.escape(text).replace("|", "&#124;").replace("`", "&#96;").replace("\n", " ⏎ ").replace("[", "&#91;")


def _number(count: int) -> str:
    return f"{count:,}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
