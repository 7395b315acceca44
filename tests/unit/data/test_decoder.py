"""Pictures that take long: the limit of time holds inside of C libraries, and costs one picture."""

import os
import signal
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from m6.data.build import BuildSettings, build
from m6.data.sources import SourceOptions, find_source, pictures
from m6.data.sources.pictures import BadPicture, decode, decode_here
from tests.fixtures.photographs import file_of, photograph


def scans(number: int) -> bytes:
    """A JPEG of 9 million pixels whose last scan is repeated: a small file, each scan of which visits all of them."""
    data = file_of(Image.new("L", (3000, 3000), 128), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * number + data[-2:]


@pytest.fixture(autouse=True)
def fresh_decoder():
    pictures._decoders.__dict__.clear()
    yield
    pictures._decoders.__dict__.clear()


@pytest.mark.timeout(120)
def test_a_picture_without_end_costs_one_row(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "CPU_SECONDS", 1)
    (tmp_path / "photos").mkdir()
    for name, content in (("a", scans(3000)), ("b", file_of(photograph(1), "TIFF"))):
        (tmp_path / "photos" / f"{name}.{'jpg' if name == 'a' else 'tif'}").write_bytes(content)
        (tmp_path / "photos" / f"{name}.txt").write_text(name)
    source = find_source(str(tmp_path / "photos"), SourceOptions(cache=tmp_path, licence="private"))
    settings = BuildSettings(max_bad_share=0.5, validation_share=0.0, test_share=0.0)
    manifest, _ = build([source], tmp_path / "out", settings)
    assert manifest.sources["photos"].skipped == {pictures.TOO_LONG: 1}
    assert manifest.split("photos", "train").rows == 1


@pytest.mark.parametrize("kind", ["TIFF", "JPEG", "PNG", "SVG"])
def test_the_other_process_decodes_as_this_one(kind):
    if kind == "SVG":
        pytest.importorskip("cairosvg")
        data = (
            b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><rect width="4" height="8" fill="red"/></svg>'
        )
    else:
        noise = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8)
        data = file_of(Image.fromarray(noise), kind, **({"quality": 100} if kind == "JPEG" else {}))
    here, there = decode_here(data, 64), decode(data, 64)
    assert pictures._decoders.current is not None
    assert there.picture.tobytes() == here.picture.tobytes()
    for name in ("width", "height", "is_animated", "kind", "data", "fits"):
        assert getattr(there, name) == getattr(here, name)
    with pytest.raises(BadPicture, match="corrupt image"):
        decode(b"II*\0" + data, 64)


def test_small_bitmaps_start_no_process():
    decode(file_of(photograph(1)), 64)
    assert not hasattr(pictures._decoders, "current")


def test_a_decoder_that_crashes_costs_one_picture():
    data = file_of(photograph(1), "TIFF")
    decode(data, 64)
    os.kill(pictures._decoders.current._process.pid, signal.SIGSEGV)
    with pytest.raises(BadPicture, match="ends the decoder"):
        decode(data, 64)
    assert decode(data, 64).kind == "TIFF"


def test_threads_have_decoders_of_their_own():
    data = file_of(photograph(1), "TIFF")
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(decode(data, 64).picture.tobytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [decode_here(data, 64).picture.tobytes()] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="the fork of a process that has a decoder")
def test_a_fork_does_not_take_the_answers_of_its_parent():
    data = file_of(photograph(1), "TIFF")
    decode(data, 64)
    mine = pictures._decoders.current
    child = os.fork()
    if child == 0:
        os._exit(0 if decode(data, 64).kind == "TIFF" and pictures._decoders.current is not mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert decode(data, 64).kind == "TIFF"
    assert pictures._decoders.current is mine
