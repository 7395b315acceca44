"""Converts picture files to small square ones that are safe to decode."""

import io
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from m6.colours import to_rgba
from m6.data.sources.decoder import TOO_MUCH_MEMORY, DecoderEnded, ask
from m6.errors import UserError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 50_000_000  # 200 MB when decoded; a larger picture is taken for a decompression bomb
MAX_SIDE = 65_535  # JPEG's limit. Decoders take memory and time for each row, so a picture of 1 x 50,000,000 costs 1 GB
# Of a drawing: about 10 s. cairosvg makes 200 calls for an element and 70 for a letter, and as many again for each
# reference to them, which may nest.
MAX_CALLS = 10_000_000
_SMALL_DRAWING_BYTES = 100_000  # makes fewer calls, without references and rules of style
# Of a bitmap that is decoded in this process: seconds at most, whatever is in it.
_QUICK_BYTES, _QUICK_SCANS = 1 << 20, 64
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # a tag of EXIF, and its values that exchange width and height
_QUALITIES = (95, 90, 85, 75, 60, 40, 20)
_WEBP_HEADER = 1 << 16  # bytes; the name of the first chunk of pixels is in them, also after a colour profile
# References and rules of style, also as they may be written with entities and escapes.
_REFERENCES = re.compile(rb"href|url|&|\\|style[\s>]")
_TIFF = (b"II", b"MM")
_JPEG = b"\xff\xd8"
_SCAN = re.compile(rb"\xff\xda")  # how one of a JPEG begins; each may visit all its pixels
# How other formats begin, which are no damaged pictures.
_OTHERS = (
    (0, b"\x1f\x8b", "gzip"),
    (0, b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (0, b"\xffO\xffQ", "JPEG 2000"),
    (0, b"\x00\x00\x00\x0cJXL \r\n\x87\n", "JPEG XL"),
    (0, b"\xff\n", "JPEG XL"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftyp", "HEIF"),
    (0, b"\x00\x00\x01\x00", "ICO"),
    (0, b"8BPS", "PSD"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"v/1\x01", "OpenEXR"),
    (0, b"qoif", "QOI"),
)
# What Pillow says of files that may be whole.
_NOT_READ = re.compile(r"unsupported|not supported|unknown|not available|cannot handle|precision", re.IGNORECASE)
_UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


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
    if _drawing(data) is not None:
        raise BadPicture("corrupt image")
    return encode(data, image_size)


def decode(data: bytes, image_size: int) -> Decoded:
    """Decodes a picture file and shrinks it; the first half of ``encode``.

    What may take long is decoded in another process with a limit of time, whose start takes a second.

    Raises:
        BadPicture: the file is damaged, too large, takes too long, or is no picture.
    """
    if _is_quick(data):
        return decode_here(data, image_size)
    try:
        described, pixels, rendered = ask(data, image_size)
    except DecoderEnded as error:
        raise BadPicture(str(error)) from None
    if (problem := described.pop("problem", None)) is not None:
        raise BadPicture(problem)
    if (mistake := described.pop("mistake", None)) is not None:
        raise UserError(mistake)
    picture = Image.frombytes(described.pop("mode"), tuple(described.pop("size")), pixels)
    return Decoded(picture=picture, data=rendered or data, **described)


def answer(data: bytes, image_size: int) -> tuple[dict[str, Any], bytes, bytes]:
    """Decodes a picture for ``decode`` in another process.

    Returns:
        What there is to say of the picture, or why there is none; its pixels; and of a drawing its rendering.
    """
    try:
        decoded = decode_here(data, image_size)
    except BadPicture as problem:
        return {"problem": str(problem)}, b"", b""
    except UserError as mistake:
        return {"mistake": str(mistake)}, b"", b""
    described = {name: getattr(decoded, name) for name in ("width", "height", "is_animated", "kind", "fits")}
    described |= {"mode": decoded.picture.mode, "size": decoded.picture.size}
    return described, decoded.picture.tobytes(), b"" if decoded.data is data else decoded.data


def decode_here(data: bytes, image_size: int) -> Decoded:
    """Decodes a picture in this process, however long it takes."""
    try:
        if (drawing := _drawing(data)) is not None:
            data = _render(drawing, image_size)
        return _decode_bitmap(data, image_size)
    except MemoryError:
        raise BadPicture(TOO_MUCH_MEMORY) from None


def _drawing(data: bytes) -> bytes | None:
    """The text of a drawing in UTF-8, or in the encoding that it names; None for a bitmap."""
    if (encoding := _UTF_16.get(data[:2])) is not None:
        text = data[2:].decode(encoding, "replace")
        # Its bytes are other ones now than its declaration says.
        data = re.sub(r"^\s*<\?xml.*?\?>", "", text, count=1, flags=re.DOTALL).encode("utf-8", "replace")
    return data if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<") else None


def _is_quick(data: bytes) -> bool:
    """Whether a picture is decoded in seconds, whatever is in it.

    A JPEG of a million bytes can have 10,000 scans of all its pixels, and a TIFF as many pages, which are counted.
    """
    if len(data) > _QUICK_BYTES or data.startswith(_TIFF) or _drawing(data) is not None:
        return False
    return not data.startswith(_JPEG) or len(_SCAN.findall(data)) <= _QUICK_SCANS


def _decode_bitmap(data: bytes, image_size: int) -> Decoded:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is a lower limit
            return _decode(data, image_size)
    except Image.DecompressionBombError:
        raise BadPicture("image too large") from None
    except (BadPicture, MemoryError):
        raise
    except Exception as error:
        # Pillow raises exceptions of many types for damaged files, such as IndexError for a PNG's empty colour profile.
        raise BadPicture(_why_not_read(data, error)) from None


def _why_not_read(data: bytes, error: Exception) -> str:
    """Why a bitmap cannot be opened: it is damaged, or of a kind that is not read."""
    for place, beginning, name in _OTHERS:
        if data.startswith(beginning, place):
            return f"a format that is not read ({name})"
    if isinstance(error, UnidentifiedImageError):  # asked again, for a reason
        for name in FORMATS:
            open_as, accepts = Image.OPEN[name]
            if accepts is None or accepts(data[:16]) is True:
                try:
                    open_as(io.BytesIO(data), "")
                except Exception as reason:
                    error = reason
    if "too large" in str(error) or "Too much memory" in str(error):  # texts and profiles of PNG
        return "image with more than 1 MiB of metadata"
    return "an image of a kind that is not read" if _NOT_READ.search(str(error)) else "corrupt image"


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
        picture: Image.Image = image if as_it_is else _in_colours(image)
        # Of Pillow's filters for shrinking it takes the least time but for BOX, which is coarse: half that of LANCZOS.
        picture.thumbnail((image_size, image_size), Image.Resampling.HAMMING)
        return Decoded(picture, width, height, is_animated, kind, data, fits)


def _in_colours(image: Image.Image) -> Image.Image:
    try:
        return to_rgba(image)
    except ValueError:
        colours = {"I": "whole numbers of 32 bits", "F": "fractions of 32 bits"}.get(image.mode, image.mode)
        raise BadPicture(f"an image of colours that are not read ({colours})") from None


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
    is_small = len(svg) <= _SMALL_DRAWING_BYTES and not _REFERENCES.search(svg)
    try:  # without unsafe=True, cairosvg opens no other files or URLs and expands no XML entities
        with nullcontext() if is_small else _limited_calls(MAX_CALLS):
            png: bytes = cairosvg.svg2png(bytestring=svg, **options)
        return png
    except (_TooManyCalls, RecursionError):
        raise BadPicture("drawing too complex") from None
    except MemoryError:
        raise
    except Exception as error:
        raise BadPicture(_why_not_drawn(svg, error)) from None


def _why_not_drawn(svg: bytes, error: Exception) -> str:
    """Why a drawing cannot be rendered; cairosvg has no type of exceptions of its own."""
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import ParseError, fromstring

    if isinstance(error, DefusedXmlException):
        return "drawing with entities, which are not read"
    if "NO_MEMORY" in str(error) or "out of memory" in str(error):
        return TOO_MUCH_MEMORY
    try:
        root = fromstring(svg)
    except (ParseError, ValueError, LookupError):
        return "corrupt image"
    return "drawing that cairosvg cannot draw" if root.tag.rpartition("}")[2] == "svg" else "corrupt image"


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
