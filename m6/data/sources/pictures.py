"""Converts picture files to small square ones that are safe to decode."""

import io
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from PIL import Image, ImageOps

from m6.colours import to_rgba
from m6.errors import UserError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 50_000_000  # 200 MB when decoded; a larger picture is taken for a decompression bomb
MAX_SIDE = 65_535  # JPEG's limit. Decoders take memory and time for each row, so a picture of 1 x 50,000,000 costs 1 GB
# An element that others refer to is drawn again for each of them, and references may nest. In a drawing without
# references cairosvg makes about 300 calls for an element, and 3 for a byte of the file.
_CALLS, _CALLS_PER_BYTE = 1_000_000, 10
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # a tag of EXIF, and its values that exchange width and height
_QUALITIES = (95, 90, 85, 75, 60, 40, 20)
_WEBP_HEADER = 1 << 16  # bytes; the name of the first chunk of pixels is in them, also after a colour profile
_REFERENCES = re.compile(rb"href|url|&|\\|@import")  # also as they may be written with entities and escapes


class BadPicture(Exception):
    """A picture that cannot be used. The message is the reason under which the manifest counts it."""


@dataclass(frozen=True)
class Decoded:
    """A picture file, decoded and shrunk.

    Attributes:
        picture: RGB or RGBA, upright, of at most ``image_size`` pixels a side, proportions kept.
        width, height: of the file as it is shown, in pixels; of a drawing (SVG), as it was rendered.
        is_animated: whether the file has several frames; the first is decoded.
        kind: format of the file, such as "JPEG".
        data: contents of the file; of a drawing, of its rendering.
        fits: whether the file is a square RGB picture of the right size, which needs no conversion.
    """

    picture: Image.Image
    width: int
    height: int
    is_animated: bool
    kind: str | None
    data: bytes
    fits: bool


def encode(data: bytes, image_size: int) -> bytes:
    """Converts a picture file to an opaque square PNG, JPEG or WebP of at most ``image_size`` pixels a side.

    Proportions are kept: the picture is padded with white to a square. Transparent areas become white. Bitmaps are
    never enlarged; SVG drawings are rendered at ``image_size``. A file that already fits is kept byte for byte, and
    others take no more bytes than they came with, if that is possible.

    Raises:
        BadPicture: the file is damaged, too large, or no picture.
    """
    return square(decode(data, image_size))


def encode_bitmap(data: bytes, image_size: int) -> bytes:
    """Like ``encode``, for bitmaps only: an SVG drawing raises BadPicture."""
    return square(_decode_bitmap(data, image_size))


def decode(data: bytes, image_size: int) -> Decoded:
    """Decodes a picture file and shrinks it; the first half of ``encode``.

    Raises:
        BadPicture: the file is damaged, too large, or no picture.
    """
    if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        data = _render(data, image_size)
    return _decode_bitmap(data, image_size)


def _decode_bitmap(data: bytes, image_size: int) -> Decoded:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is a lower limit
            return _decode(data, image_size)
    except Image.DecompressionBombError:
        raise BadPicture("image too large") from None
    except BadPicture:
        raise
    except Exception:
        # Pillow raises exceptions of many types for damaged files, such as IndexError for a PNG's empty colour profile.
        raise BadPicture("corrupt image") from None


def _decode(data: bytes, image_size: int) -> Decoded:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if max(image.size) > MAX_SIDE or image.width * image.height > MAX_PIXELS:
            raise BadPicture("image too large")
        # A JPEG with further pictures in it, by most cameras its preview; Pillow takes it for animated.
        has_preview = image.format == "MPO"
        kind = "JPEG" if has_preview else image.format
        width, height = image.size
        is_animated = bool(getattr(image, "is_animated", False)) and not has_preview
        fits = width == height <= image_size and image.mode == "RGB" and not has_preview
        image.draft("RGB", (2 * image_size, 2 * image_size))  # JPEG only: decodes at a reduced size, which is faster
        image.load()
        has_exif, is_turned = _turn_upright(image)
        fits = fits and kind in ("PNG", "JPEG", "WEBP") and not has_exif and "transparency" not in image.info
        if is_turned:
            width, height = height, width
        # A copy of a large picture is avoided where its colours can be resized as they are.
        as_it_is = image.mode in ("RGB", "RGBA") and "transparency" not in image.info
        picture: Image.Image = image if as_it_is else to_rgba(image)
        # Of Pillow's filters for shrinking it takes the least time but for BOX, which is coarse: half that of LANCZOS.
        picture.thumbnail((image_size, image_size), Image.Resampling.HAMMING)
        return Decoded(picture, width, height, is_animated, kind, data, fits)


def _turn_upright(image: Image.Image) -> tuple[bool, bool]:
    """Turns a picture as its EXIF data say. Returns whether it has such data, and whether they exchange its sides.

    A picture with damaged EXIF data is whole, and is taken as it is.
    """
    has_exif, is_turned = True, False
    with suppress(Exception):  # Pillow raises exceptions of many types for damaged EXIF data
        exif = image.getexif()
        has_exif, is_turned = bool(exif), exif.get(_ORIENTATION, 1) in _TURNED
        ImageOps.exif_transpose(image, in_place=True)  # turns the picture before it writes its other EXIF data anew
    return has_exif, is_turned


def on_white(picture: Image.Image) -> Image.Image:
    """Returns an RGB picture; transparent areas of an RGBA one become white."""
    if picture.mode == "RGB":
        return picture
    canvas = Image.new("RGB", picture.size, "white")
    canvas.paste(picture, mask=picture)
    return canvas


def square(decoded: Decoded) -> bytes:
    """Pads a picture with white to a square and encodes it; the second half of ``encode``."""
    if decoded.fits:
        return decoded.data
    picture = on_white(decoded.picture)
    side = max(picture.size)
    canvas = Image.new("RGB", (side, side), "white")
    canvas.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return _compressed(canvas, decoded.kind, decoded.data)


def _compressed(picture: Image.Image, kind: str | None, original: bytes) -> bytes:
    """The picture in the best quality that takes no more bytes than the original file, or in the fewest bytes.

    Photographs stay lossy, which takes several times fewer bytes, and drawings stay exact.
    """
    options: list[tuple[str, dict[str, Any]]]
    if kind == "JPEG":
        # Below 85 with half the resolution of colours, as cameras and programs store it.
        options = [("JPEG", {"quality": quality, "subsampling": 2 * (quality < 85)}) for quality in _QUALITIES]
        # Optimal codes take three times as long: only where nothing else is small enough.
        options.append(("JPEG", {"quality": _QUALITIES[-1], "optimize": True}))
    elif kind == "WEBP" and b"VP8L" not in original[:_WEBP_HEADER]:
        options = [("WEBP", {"quality": quality}) for quality in _QUALITIES]
    else:
        options = [("PNG", {"optimize": True}), ("WEBP", {"lossless": True})]
    files = []
    for name, settings in options:
        buffer = io.BytesIO()
        picture.save(buffer, name, **settings)
        files.append(buffer.getvalue())
        if len(files[-1]) <= len(original):
            return files[-1]
    return min(files, key=len)


def _render(svg: bytes, size: int) -> bytes:
    try:
        import cairosvg
    except ImportError:
        raise UserError('drawings (SVG) need cairosvg: pip install "m6-recipes[data]"') from None
    except OSError:
        raise UserError("cairosvg needs the cairo library: apt-get install libcairo2") from None

    options = {"output_width": size, "output_height": size, "background_color": "white"}
    try:  # without unsafe=True, cairosvg opens no other files or URLs and expands no XML entities
        if not _REFERENCES.search(svg):
            png: bytes = cairosvg.svg2png(bytestring=svg, **options)
            return png
        with _limited_calls(_CALLS + _CALLS_PER_BYTE * len(svg)):
            png = cairosvg.svg2png(bytestring=svg, **options)
    except _TooManyCalls:
        raise BadPicture("drawing too complex") from None
    except Exception:
        # cairosvg has no exception type of its own: bad XML, numbers and sizes raise different types.
        raise BadPicture("corrupt image") from None
    return png


class _TooManyCalls(BaseException):
    """Not an Exception, which cairosvg may catch."""


@contextmanager
def _limited_calls(limit: int) -> Iterator[None]:
    """A context in which this thread may make so many calls: unlike seconds, they are equal on all machines."""
    number = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event == "call"
        if number > limit:
            raise _TooManyCalls

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
