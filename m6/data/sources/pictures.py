"""Converts untrusted image files to small square ones, safe to decode.

An SVG of a few bytes can cost cairo hours of work, and a progressive JPEG libjpeg. Python's signal handlers do not run
inside C code, so such files are decoded in a separate process, under limits of time and memory. The kernel ends it when
its processor time is spent.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from m6.colours import to_rgba
from m6.errors import UserError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 50_000_000  # 200 MB when decoded; a larger image counts as a decompression bomb
MAX_SIDE = 65_535  # JPEG's limit. Decoders need memory and time for each row: an image of 1 x 50,000,000 costs 1 GB
# Python calls for an SVG: about 10 s. cairosvg makes 200 calls for an element, 70 for a letter, and the same again for
# each reference to them. References may nest.
MAX_CALLS = 10_000_000
_SMALL_DRAWING_BYTES = 100_000  # such an SVG without references and style rules makes fewer calls
_LARGEST_SURPLUS = 1 << 16  # bytes of a fitting image besides its pixels, such as a colour profile
# Limits of a bitmap for decoding in this process: seconds at most, for any contents.
_QUICK_BYTES, _QUICK_SCANS = 1 << 20, 64
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # an EXIF tag, and its values with exchanged width and height
_QUALITIES = (95, 90, 85, 75, 60, 40, 20)
_WEBP_HEADER = 1 << 16  # bytes; contains the name of the first chunk of pixels, even after a colour profile
# References and style rules, also if written with entities and escapes.
_REFERENCES = re.compile(rb"href|url|&|\\|style[\s>]")
_TIFF = (b"II", b"MM")
_JPEG = b"\xff\xd8"
_SCAN = re.compile(rb"\xff\xda")  # start of a scan of a JPEG; each scan may visit all pixels
# Magic bytes of unsupported formats, to tell them from damaged images. Pillow knows those of others.
_OTHERS = (
    (0, b"\x1f\x8b", "gzip"),
    (0, b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (0, b"\xffO\xffQ", "JPEG 2000"),
    (0, b"\x00\x00\x00\x0cJXL \r\n\x87\n", "JPEG XL"),
    (0, b"\xff\n", "JPEG XL"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftyp", "HEIF"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"v/1\x01", "OpenEXR"),
    *((0, b"P%d\n" % number, "PNM") for number in range(1, 8)),
)
# Pillow's messages for valid files of unsupported kinds.
_NOT_READ = re.compile(r"unsupported|not supported|unknown|not available|cannot handle|precision", re.IGNORECASE)
_UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


class BadPicture(Exception):
    """An unusable image. The message is the reason, counted in the manifest."""


@dataclass(frozen=True)
class Decoded:
    """An image file, decoded and shrunk.

    Attributes:
        picture: RGB or RGBA, upright, of at most ``image_size`` pixels a side, proportions kept.
        width, height: size of the upright image file in pixels; for an SVG, of its rendering.
        is_animated: whether the file has several frames; the first one is decoded.
        kind: format of the file, such as "JPEG".
        data: contents of the file; for an SVG, of its rendering.
        fits: whether the file needs no conversion: a square RGB image of the right size, without frames or data that
            nobody reads.
    """

    picture: Image.Image
    width: int
    height: int
    is_animated: bool
    kind: str | None
    data: bytes
    fits: bool


def encode(data: bytes, image_size: int) -> bytes:
    """Converts an image file to an opaque square PNG, JPEG or WebP of at most ``image_size`` pixels a side.

    Proportions are kept: the image is padded with white to a square. Transparent areas become white. Bitmaps are
    never enlarged; SVG drawings are rendered at ``image_size``. A fitting file is kept byte for byte. Other files do
    not grow in bytes, if possible.

    Raises:
        BadPicture: the file is damaged, too large, or no image.
    """
    return square(decode(data, image_size))


def encode_bitmap(data: bytes, image_size: int) -> bytes:
    """Like ``encode``, for bitmaps only: an SVG drawing raises BadPicture."""
    if _drawing(data) is not None:
        raise BadPicture("corrupt image")
    return encode(data, image_size)


def decode(data: bytes, image_size: int) -> Decoded:
    """Decodes an image file and shrinks it; the first half of ``encode``.

    Possibly slow files are decoded in another process with a time limit. Starting it takes a second.

    Raises:
        BadPicture: the file is damaged, too large, takes too long, or is no image.
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


def decode_here(data: bytes, image_size: int) -> Decoded:
    """Decodes an image in this process, however long it takes."""
    try:
        if (drawing := _drawing(data)) is not None:
            data = _render(drawing, image_size)
        return _decode_bitmap(data, image_size)
    except MemoryError:
        raise BadPicture(TOO_MUCH_MEMORY) from None


def _drawing(data: bytes) -> bytes | None:
    """The text of an SVG, in UTF-8 or its declared encoding; None for a bitmap."""
    if (encoding := _UTF_16.get(data[:2])) is not None:
        text = data[2:].decode(encoding, "replace")
        # The text is re-encoded, so its XML declaration is wrong now.
        data = re.sub(r"^\s*<\?xml.*?\?>", "", text, count=1, flags=re.DOTALL).encode("utf-8", "replace")
    return data if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<") else None


def _is_quick(data: bytes) -> bool:
    """Whether an image decodes in seconds, for any contents.

    A JPEG of a million bytes can have 10,000 scans of all its pixels. A TIFF can have as many pages, and counting them
    is slow.
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
        # Pillow raises many types for damaged files, such as IndexError for an empty colour profile of a PNG.
        raise BadPicture(_why_not_read(data, error)) from None


def _why_not_read(data: bytes, error: Exception) -> str:
    """Why a bitmap cannot be opened: damaged, or of an unsupported kind."""
    is_unidentified = isinstance(error, UnidentifiedImageError)
    if (name := _other_format(data, is_unidentified)) is not None:
        return f"a format that is not read ({name})"
    if is_unidentified:  # opens it again, to get the reason
        for name in FORMATS:
            open_as, accepts = Image.OPEN[name]
            if accepts is None or accepts(data[:16]) is True:
                try:
                    open_as(io.BytesIO(data), "")
                except Exception as reason:
                    error = reason
    if "too large" in str(error) or "Too much memory" in str(error):  # text and profile chunks of PNG
        return "image with more than 1 MiB of metadata"
    return "an image of a kind that is not read" if _NOT_READ.search(str(error)) else "corrupt image"


def _other_format(data: bytes, is_unidentified: bool) -> str | None:
    """The name of an unsupported format by its first bytes. Pillow's own formats are tried if it identified none."""
    names = (name for place, beginning, name in _OTHERS if data.startswith(beginning, place))
    if (name := next(names, None)) is not None or not is_unidentified:
        return name
    Image.init()
    with suppress(Exception):  # the only common format without magic bytes: its header is checked as a whole
        Image.OPEN["TGA"][0](io.BytesIO(data), "")
        return "TGA"
    for name in sorted(Image.OPEN.keys() - set(FORMATS)):
        accepts = Image.OPEN[name][1]
        with suppress(IndexError, struct.error):  # of too few bytes
            if accepts is not None and accepts(data[:16]):
                return name
    return None


def _decode(data: bytes, image_size: int) -> Decoded:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if max(image.size) > MAX_SIDE or image.width * image.height > MAX_PIXELS:
            raise BadPicture("image too large")
        # MPO: a JPEG with further images, mostly a camera's preview. Pillow reports it as animated.
        has_preview = image.format == "MPO"
        kind = "JPEG" if has_preview else image.format
        width, height = image.size
        is_animated = bool(getattr(image, "is_animated", False)) and not has_preview
        fits = width == height <= image_size and image.mode == "RGB" and not (has_preview or is_animated)
        fits = fits and len(data) <= 3 * width * height + _LARGEST_SURPLUS
        image.draft("RGB", (2 * image_size, 2 * image_size))  # JPEG only: decodes faster at a reduced size
        image.load()
        has_exif, is_turned = _turn_upright(image)
        fits = fits and kind in ("PNG", "JPEG", "WEBP") and not has_exif and "transparency" not in image.info
        if is_turned:
            width, height = height, width
        # Avoids a copy of a large image if its mode can be resized directly.
        as_it_is = image.mode in ("RGB", "RGBA") and "transparency" not in image.info
        picture: Image.Image = image if as_it_is else _in_colours(image)
        # HAMMING takes half the time of LANCZOS. Only BOX is faster, but coarse.
        picture.thumbnail((image_size, image_size), Image.Resampling.HAMMING)
        return Decoded(picture, width, height, is_animated, kind, data, fits)


def _in_colours(image: Image.Image) -> Image.Image:
    try:
        return to_rgba(image)
    except ValueError:
        colours = {"I": "whole numbers of 32 bits or with a sign", "F": "fractions of 32 bits"}.get(
            image.mode, image.mode
        )
        raise BadPicture(f"an image of colours that are not read ({colours})") from None


def _turn_upright(image: Image.Image) -> tuple[bool, bool]:
    """Rotates an image by its EXIF data. Returns whether it has EXIF data, and whether its sides are exchanged.

    Damaged EXIF data are ignored: the image itself is whole.
    """
    has_exif, is_turned = True, False
    with suppress(Exception):  # Pillow raises many types for damaged EXIF data
        exif = image.getexif()
        has_exif, is_turned = bool(exif), exif.get(_ORIENTATION, 1) in _TURNED
        ImageOps.exif_transpose(image, in_place=True)  # rotates before rewriting the other EXIF data
    return has_exif, is_turned


def on_white(picture: Image.Image) -> Image.Image:
    """Converts RGBA to RGB: transparent areas become white."""
    if picture.mode == "RGB":
        return picture
    canvas = Image.new("RGB", picture.size, "white")
    canvas.paste(picture, mask=picture)
    return canvas


def square(decoded: Decoded) -> bytes:
    """Pads an image with white to a square and encodes it; the second half of ``encode``."""
    if decoded.fits:
        return decoded.data
    picture = on_white(decoded.picture)
    side = max(picture.size)
    canvas = Image.new("RGB", (side, side), "white")
    canvas.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return _compressed(canvas, decoded.kind, decoded.data)


def _compressed(picture: Image.Image, kind: str | None, original: bytes) -> bytes:
    """Encodes in the best quality with no more bytes than the original file; failing that, in the fewest bytes.

    Lossy originals stay lossy, with several times fewer bytes; lossless originals stay exact.
    """
    options: list[tuple[str, dict[str, Any]]]
    if kind == "JPEG":
        # Below 85 with halved colour resolution, as usual in cameras and programs.
        options = [("JPEG", {"quality": quality, "subsampling": 2 * (quality < 85)}) for quality in _QUALITIES]
        # Optimal Huffman codes take three times as long: only if nothing else is small enough.
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
    """Why an SVG cannot be rendered; cairosvg has no exception type of its own."""
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
    """A BaseException, since cairosvg may catch Exception."""


@contextmanager
def _limited_calls(limit: int) -> Iterator[None]:
    """Limits the Python calls of this thread: unlike seconds, their number is the same on all machines."""
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


CPU_SECONDS = 30  # for each image: a photograph of 50 million pixels takes 2 or 3
# Wall-clock limit. A busy machine needs longer than the processor time; a process stuck forever must end too.
_CLOCK_SECONDS = 20 * CPU_SECONDS
_MEMORY_BYTES = 8 << 30  # of address space, since libraries reserve some; the largest image takes 400 MB
TOO_LONG = f"takes longer than {CPU_SECONDS} s to decode"
TOO_MUCH_MEMORY = "takes too much memory to decode"

_decoders = threading.local()


class DecoderEnded(Exception):
    """The process ended without an answer; the message is the reason."""


def ask(data: bytes, image_size: int) -> tuple[dict[str, Any], bytes, bytes]:
    """Decodes an image by ``answer`` in the decoder process of this thread, started on demand.

    Returns:
        The result of ``answer``.

    Raises:
        DecoderEnded: a limit was reached, or the decoder crashed.
    """
    decoder: _Decoder | None = getattr(_decoders, "current", None)
    if decoder is None or decoder.owner != os.getpid():  # after a fork the decoder belongs to the parent
        decoder = _decoders.current = _Decoder()
    try:
        return decoder.ask(data, image_size)
    except BaseException:
        _decoders.current = None  # also after Ctrl-C: its late answer would be taken for the next image's
        decoder.end()
        raise


class _Decoder:
    def __init__(self) -> None:
        self.owner = os.getpid()
        self._connection: Connection
        self._connection, theirs = Pipe()
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()}, {CPU_SECONDS})"]
        # The decoder imports the same modules as this process.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        # Runs at the end of its thread, and at the end of this process.
        self.end = weakref.finalize(self, _end, self.owner, self._process, self._connection)

    def ask(self, data: bytes, image_size: int) -> tuple[dict[str, Any], bytes, bytes]:
        try:
            self._connection.send_bytes(image_size.to_bytes(8, "little"))
            self._connection.send_bytes(data)
            if not self._connection.poll(_CLOCK_SECONDS):
                raise DecoderEnded(TOO_LONG)
            described = json.loads(self._connection.recv_bytes())
            return described, self._connection.recv_bytes(), self._connection.recv_bytes()
        except (EOFError, OSError):
            ended = self._process.wait()
            if ended == -signal.SIGXCPU:
                raise DecoderEnded(TOO_LONG) from None
            raise DecoderEnded(f"ends the decoder ({_name_of(ended)})") from None


def _end(owner: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    if owner == os.getpid():
        process.kill()
        process.wait()


def _name_of(ended: int) -> str:
    """The signal or exit code of an ended process, for messages."""
    with suppress(ValueError):
        return signal.Signals(-ended).name
    return f"exit code {ended}"


def serve(descriptor: int, cpu_seconds: int) -> None:
    """Answers the requests of ``ask`` until the other process is gone.

    Args:
        descriptor: file descriptor of the socket of requests.
        cpu_seconds: processor time for each request.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    connection = Connection(descriptor)
    while True:
        try:
            image_size = int.from_bytes(connection.recv_bytes(), "little")
            data = connection.recv_bytes()
        except (EOFError, OSError):
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + cpu_seconds + 1)
        described, pixels, rendered = answer(data, image_size)
        connection.send_bytes(json.dumps(described).encode())
        connection.send_bytes(pixels)
        connection.send_bytes(rendered)


def answer(data: bytes, image_size: int) -> tuple[dict[str, Any], bytes, bytes]:
    """Decodes an image for ``decode`` in another process.

    Returns:
        The attributes of ``Decoded``, or the problem; the pixels; and the rendering of an SVG.
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


def _limit(kind: int, value: int) -> None:
    """Sets a soft limit, at most the hard limit. The hard limit stays, so the soft limit can be raised again."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
