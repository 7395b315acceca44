"""How pictures are stored: kept, shrunk, turned, or refused."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from m6.corpus.recipe import PictureFilterSettings
from m6.corpus.rules import problem_of_picture
from m6.data.sources.pictures import MAX_SIDE, BadPicture, decode, encode
from tests.fixtures.photographs import file_of, photograph
from tests.fixtures.pictures import picture


def decoded(data):
    return Image.open(io.BytesIO(data))


def test_a_picture_that_fits_is_kept():
    for kind in ("PNG", "JPEG", "WEBP"):
        data = picture((64, 64), kind=kind)
        assert encode(data, 64) == data


@pytest.mark.parametrize("surplus", ["texts", "frames", "pixels"])
def test_what_nobody_reads_of_a_picture_that_fits_is_not_kept(surplus):
    image, options = Image.new("RGB", (8, 8), "red"), {}
    if surplus == "texts":
        options = {"pnginfo": PngImagePlugin.PngInfo()}
        options["pnginfo"].add(b"prVt", bytes(1 << 20))
    elif surplus == "frames":
        options = {"save_all": True, "append_images": [Image.new("RGB", (8, 8), (n, 0, 0)) for n in range(20)]}
    data = file_of(image, "PNG", **options)
    if surplus == "pixels":  # behind the last row
        pixels = zlib.compress(np.random.default_rng(0).bytes(100_000))
        chunk = struct.pack(">I", len(pixels)) + b"IDAT" + pixels + struct.pack(">I", zlib.crc32(b"IDAT" + pixels))
        data = data[: data.index(b"IEND") - 4] + chunk + data[data.index(b"IEND") - 4 :]
    kept = encode(data, 8)
    assert len(kept) < 200
    assert decoded(kept).tobytes() == image.tobytes()


def test_a_large_picture_shrinks_onto_a_white_square():
    image = decoded(encode(picture((200, 100), "blue"), 64))
    assert (image.size, image.mode, image.format) == ((64, 64), "RGB", "PNG")
    assert image.getpixel((32, 32)) == (0, 0, 255)
    assert image.getpixel((32, 10)) == image.getpixel((32, 53)) == (255, 255, 255)  # 16 rows above and below


def test_a_small_picture_is_not_enlarged():
    assert decoded(encode(picture((30, 20)), 64)).size == (30, 30)


@pytest.mark.parametrize(
    ("kind", "options", "stored"),
    [
        ("JPEG", {"quality": 95}, "JPEG"),
        ("JPEG", {"quality": 20}, "JPEG"),
        ("WEBP", {"quality": 80}, "WEBP"),
        ("WEBP", {"lossless": True}, "PNG"),
        ("PNG", {}, "PNG"),
    ],
)
def test_a_stored_picture_is_no_larger_than_it_came(kind, options, stored):
    noise = np.random.default_rng(0).normal(0, 12, (96, 128, 3)) + np.linspace(40, 200, 128)[None, :, None]
    photograph = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
    buffer = io.BytesIO()
    photograph.save(buffer, kind, **options)
    data = encode(buffer.getvalue(), 96)
    assert len(data) <= len(buffer.getvalue())
    assert decoded(data).format == stored
    assert decoded(data).size == (96, 96)


def test_transparency_becomes_white():
    for mode, colour in (("RGBA", (255, 0, 0, 0)), ("LA", (0, 0))):
        image = decoded(encode(picture(colour=colour, mode=mode), 64))
        assert image.mode == "RGB"
        assert image.getpixel((5, 5)) == (255, 255, 255)


def test_grey_of_16_bits_keeps_its_levels():
    for kind in ("PNG", "TIFF"):
        image = decoded(encode(picture(colour=0x80FF, mode="I;16", kind=kind), 64))
        assert image.getcolors() == [(64 * 64, (128, 128, 128))]


@pytest.mark.parametrize(("mode", "colour"), [("I", 300), ("F", 300)])
def test_colours_that_are_not_read_are_not_called_corrupt(mode, colour):
    with pytest.raises(BadPicture, match="an image of colours that are not read"):
        encode(picture(colour=colour, mode=mode, kind="TIFF"), 64)


@pytest.mark.parametrize(
    ("mode", "colour", "kind", "rgb"),
    [
        ("1", 1, "PNG", (255, 255, 255)),
        ("L", 9, "PNG", (9, 9, 9)),
        ("I;16B", 0x80FF, "TIFF", (128, 128, 128)),
        ("CMYK", (0, 0, 0, 0), "JPEG", (255, 255, 255)),
        ("CMYK", (0, 0, 0, 255), "TIFF", (0, 0, 0)),
        ("YCbCr", (255, 128, 128), "TIFF", (255, 255, 255)),
        ("P", 0, "GIF", (0, 0, 0)),
        ("LA", (9, 255), "TIFF", (9, 9, 9)),
    ],
)
def test_colours_of_all_other_modes_are_read(mode, colour, kind, rgb):
    image = Image.new(mode, (64, 64), colour)
    image = decoded(encode(file_of(image, kind), 64)).convert("RGB")
    assert np.abs(np.subtract(image.getpixel((9, 9)), rgb)).max() <= 2  # JPEG is lossy


@pytest.mark.parametrize("kind", ["AVIF", "JPEG2000", "ICO", "PPM", "TGA", "PCX", "SGI", "DDS", "ICNS", "EPS"])
def test_a_picture_of_another_format_is_not_called_corrupt(kind):
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"Pillow here writes no {kind}")
    shown = {"JPEG2000": "JPEG 2000", "PPM": "PNM", "EPS": "PostScript"}.get(kind, kind)
    with pytest.raises(BadPicture, match=rf"^a format that is not read \({shown}\)$"):
        encode(file_of(Image.new("RGB", (64, 64)), kind), 64)


@pytest.mark.parametrize("options", [{}, {"compression": "tga_rle"}], ids=["plain", "run lengths"])
@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA"])
def test_tga_has_no_magic_bytes_and_is_named(mode, options):
    with pytest.raises(BadPicture, match=r"a format that is not read \(TGA\)"):
        encode(file_of(Image.new(mode, (20, 30)), "TGA", **options), 64)


@pytest.mark.parametrize("data", [b"", b"\0", bytes(18), bytes(1000), b"hello", b"\n", b"\x89PNG\r\n", b"GIF89a"])
def test_bytes_of_no_format_are_corrupt(data):
    with pytest.raises(BadPicture, match=r"^corrupt image$"):
        encode(data, 64)


def test_a_kind_of_tiff_that_is_not_read_is_not_called_corrupt():
    data = file_of(Image.new("F", (16, 16)), "TIFF")
    # 64 bits for each fraction: the tag of BitsPerSample is 0x0102, a short.
    data = data.replace(struct.pack("<HHII", 0x0102, 3, 1, 32), struct.pack("<HHII", 0x0102, 3, 1, 64))
    with pytest.raises(BadPicture, match="an image of a kind that is not read"):
        encode(data, 64)


def test_a_picture_with_much_metadata_is_not_called_corrupt():
    text = PngImagePlugin.PngInfo()
    text.add_text("a", "b" * (2 << 20), zip=True)
    with pytest.raises(BadPicture, match="more than 1 MiB of metadata"):
        encode(file_of(Image.new("RGB", (16, 16)), "PNG", pnginfo=text), 64)


def test_a_photograph_stays_jpeg_and_is_turned_upright():
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: rotate by 90 degrees clockwise
    image = Image.new("RGB", (64, 32), "blue")
    image.paste("red", (0, 0, 32, 32))
    image.save(buffer, "JPEG", exif=exif, quality=95)
    upright = decoded(encode(buffer.getvalue(), 64))
    assert upright.format == "JPEG"
    assert upright.size == (64, 64)
    red, blue = upright.getpixel((32, 10)), upright.getpixel((32, 54))
    assert red[0] > 200 > 50 > red[2]  # JPEG is lossy, so far from exact on purpose
    assert blue[2] > 200 > 50 > blue[0]


@pytest.mark.parametrize("size", [(300, 200), (64, 64)])
def test_a_photograph_with_a_preview_is_a_jpeg_that_does_not_move(size):
    data = file_of(photograph(0, *size), "MPO", save_all=True, append_images=[photograph(1, 160, 120)])
    whole = decode(data, 64)
    assert (whole.width, whole.height) == size
    assert problem_of_picture(whole, PictureFilterSettings()) is None
    stored = encode(data, 64)
    assert decoded(stored).format == "JPEG"
    assert len(stored) < len(data)  # without the preview
    shrunk = photograph(0, *size).resize(whole.picture.size)
    assert np.abs(np.subtract(whole.picture, shrunk, dtype=float)).mean() < 20  # the preview differs by 50 and more


CUT_EXIF = b"II*\0"
# The orientation 6 (turn by 90 degrees) and a tag that Pillow reads and cannot write.
TURNED_EXIF = struct.pack("<4sIHHHIIHHIIIII", b"II*\0", 8, 2, 0x0112, 3, 1, 6, 0x014A, 5, 1, 38, 0, 72, 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(("exif", "size"), [(CUT_EXIF, (60, 40)), (TURNED_EXIF, (40, 60))], ids=["cut", "turned"])
def test_a_picture_with_damaged_exif_data_is_whole(kind, exif, size):
    options = {"dpi": (72, 72)} if kind == "JPEG" else {}  # without it, Pillow looks for EXIF data when it opens a JPEG
    data = file_of(Image.new("RGB", (60, 40)), kind, exif=b"Exif\0\0" + exif, **options)
    whole = decode(data, 64)
    assert (whole.width, whole.height) == whole.picture.size == size
    assert not decoded(encode(file_of(Image.new("RGB", (64, 64)), kind, exif=b"Exif\0\0" + exif), 64)).getexif()


def test_a_damaged_part_behind_the_pixels_is_a_bad_picture():
    profile = struct.pack(">I4sI", 0, b"iCCP", zlib.crc32(b"iCCP"))
    data = picture()
    end = data.index(b"IEND") - 4
    with pytest.raises(BadPicture, match="corrupt image"):
        encode(data[:end] + profile + data[end:], 64)


def test_a_drawing_is_rendered_at_the_full_size():
    pytest.importorskip("cairosvg")
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><rect width="4" height="8" fill="red"/></svg>'
    image = decoded(encode(svg, 32))
    assert image.size == (32, 32)
    assert image.getpixel((5, 5)) == (255, 0, 0)
    assert image.getpixel((25, 5)) == (255, 255, 255)


def test_a_drawing_reads_no_other_file(tmp_path):
    pytest.importorskip("cairosvg")
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture())
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8">{}</svg>'
    image = decoded(encode(svg.format(f'<image href="file://{secret}" width="8" height="8"/>').encode(), 32))
    assert image.getcolors() == [(32 * 32, (255, 255, 255))]
    entity = f'<!DOCTYPE svg [<!ENTITY secret SYSTEM "file://{secret}">]>'
    with pytest.raises(BadPicture, match="drawing with entities"):
        encode((entity + svg.format("<text>&secret;</text>")).encode(), 32)
    with pytest.raises(BadPicture, match="corrupt image"):
        encode(svg.format("<rect").encode(), 32)


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr("m6.data.sources.pictures.MAX_PIXELS", 10_000)
    with pytest.raises(BadPicture, match="image too large"):
        encode(picture((101, 100)), 64)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)  # Pillow itself refuses twice this number
    with pytest.raises(BadPicture, match="image too large"):
        encode(picture((90, 90)), 64)


def test_a_picture_of_few_pixels_with_a_side_that_no_camera_makes_is_refused():
    encode(picture((1, MAX_SIDE)), 64)
    with pytest.raises(BadPicture, match="image too large"):
        encode(picture((1, MAX_SIDE + 1)), 64)
