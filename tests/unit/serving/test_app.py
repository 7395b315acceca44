"""The real application over a tiny model, and the real server."""

import asyncio
import functools
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from m6.checkpoints.loading import load_run_model
from m6.data.captions import describe_captions
from m6.generation.captioning import caption
from m6.generation.pipeline import M6TextToImagePipeline
from m6.generation.sampling import Sampling
from m6.serving.app import WARNINGS, create_app
from m6.serving.batcher import Batcher, plan_by_arrival
from m6.serving.tasks import Captioning, CaptionJob, Drawing
from m6.tokenizers.image import ImageTokenizerConfig, M6ImageTokenizer
from tests.fixtures.fabricated_run import write_run_and_data
from tests.fixtures.tiny_data import draw_shape

PICTURES = [draw_shape("红色", "圆形", "大"), draw_shape("蓝色", "方块", "小"), draw_shape("绿色", "三角形", "大")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    # Large weights, so that descriptions differ between pictures and go on for long.
    write_run_and_data(folder, initializer_range=0.5)
    return folder / "run"


@pytest.fixture(scope="module")
def captioning(run: Path) -> Captioning:
    return Captioning(*load_run_model(run, torch.device("cpu")), max_new_tokens=12)


class Gated(Captioning):
    """Describes once the test opens the gate, or fails when told to."""

    def __init__(self, captioning: Captioning) -> None:
        super().__init__(captioning.model, captioning.processor, captioning.max_new_tokens)
        self.gate, self.entered, self.sizes = threading.Event(), threading.Event(), []

    def run(self, jobs: Sequence[CaptionJob]) -> list[str]:
        self.sizes.append(len(jobs))
        self.entered.set()
        assert self.gate.wait(30)
        return super().run(jobs)


def with_client(task: Captioning, scenario: Callable[[httpx.AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    """Runs a scenario against the application, which starts and stops around it."""
    options = {"max_waiting": 4, "deadline_s": 30.0, "drawing": None, **options}
    plan = functools.partial(plan_by_arrival, max_batch_size=4)
    lanes = {"caption": (task, plan)} | ({"generate": (options["drawing"], plan)} if options["drawing"] else {})

    async def main() -> Any:
        batcher = Batcher(lanes, options["max_waiting"])
        app = create_app(batcher, task, options["drawing"], deadline_s=options["deadline_s"], model_name="tiny")
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://m6")
        async with app.router.lifespan_context(app), client:
            return await scenario(client)

    return asyncio.run(main())


async def until_waiting(client: httpx.AsyncClient, number: int) -> None:
    for _ in range(1000):
        if (await client.get("/health")).json()["waiting"] == number:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"there are never {number} requests waiting")


def reference(task: Captioning, picture: bytes, max_new_tokens: int, question: str = "") -> str:
    image = Image.open(io.BytesIO(picture))
    options = {"num_beams": 1, "max_new_tokens": max_new_tokens, "do_sample": False}
    return caption(task.model, task.processor, [image], [question] if question else None, **options)[0]


def test_a_batch_of_different_lengths_equals_each_description_alone(captioning: Captioning):
    limits = [3, 12, 7]
    expected = [reference(captioning, *pair) for pair in zip(PICTURES, limits, strict=True)]
    assert len(set(expected)) == 3
    jobs = [CaptionJob(Image.open(io.BytesIO(p)), limit) for p, limit in zip(PICTURES, limits, strict=True)]
    assert captioning.run(jobs) == expected
    assert captioning.run(jobs * 22)[-3:] == expected, "66 at a time"


def test_questions_and_captions_share_a_batch(captioning: Captioning, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(captioning.model), "learned_objectives", ["visual_question_answering"])
    questions = ["蓝色的圆形", "", "红"]
    asked = list(zip(PICTURES, questions, strict=True))
    expected = [reference(captioning, picture, 9, question) for picture, question in asked]
    jobs = [captioning.job(Image.open(io.BytesIO(picture)), 9, question) for picture, question in asked]
    assert captioning.run(jobs) == expected

    async def scenario(client: httpx.AsyncClient) -> None:
        query = {"question": questions[0], "max_new_tokens": 9}
        answer = await client.post("/caption", params=query, content=PICTURES[0])
        assert answer.json() == {"text": expected[0]}
        refused = await client.post("/caption", params={"question": "红色的圆形" * 60}, content=PICTURES[0])
        assert (refused.status_code, "tokens, the model reads" in refused.text) == (422, True)

    with_client(captioning, scenario)


def test_requests_that_wait_share_a_batch_and_get_their_own_answers(captioning: Captioning):
    task = Gated(captioning)

    async def scenario(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/caption", content=PICTURES[0]))
        await asyncio.to_thread(task.entered.wait, 30)
        rest = [asyncio.create_task(client.post("/caption?max_new_tokens=5", content=p)) for p in PICTURES]
        await until_waiting(client, 3)
        task.gate.set()
        assert (await first).json() == {"text": reference(task, PICTURES[0], 12)}
        answers = [(await answer).json()["text"] for answer in rest]
        assert sorted(answers) == sorted(reference(task, picture, 5) for picture in PICTURES)
        assert answers == [reference(task, picture, 5) for picture in PICTURES]
        assert task.sizes == [1, 3]

    with_client(task, scenario)


def test_what_waits_for_a_client_that_has_gone_is_not_run(captioning: Captioning):
    task = Gated(captioning)

    async def scenario(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/caption", content=PICTURES[0]))
        await asyncio.to_thread(task.entered.wait, 30)
        application = client._transport.app  # type: ignore[attr-defined]
        said = [{"type": "http.request", "body": PICTURES[1]}, {"type": "http.disconnect"}]
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if len(said) == 1:
                await gone.wait()
            return said.pop(0)

        async def send(message: dict[str, Any]) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/caption", "query_string": b"", "headers": []}
        left = asyncio.create_task(application(scope, receive, send))
        await until_waiting(client, 1)
        gone.set()
        await until_waiting(client, 0)
        await left
        task.gate.set()
        assert (await first).status_code == 200
        assert task.sizes == [1]

    with_client(task, scenario)


def png_bomb() -> bytes:
    """A PNG of a few bytes whose header promises 40,000 x 40,000 pixels."""
    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


BAD = {
    "empty": (b"", "corrupt image"),
    "no picture": (b"hello", "corrupt image"),
    "half a picture": (PICTURES[0][:60], "corrupt image"),
    "bomb": (png_bomb(), "image too large"),
    "drawing": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "corrupt image"),
}


def test_bad_input_is_explained_and_the_service_goes_on(captioning: Captioning):
    async def scenario(client: httpx.AsyncClient) -> None:
        for body, reason in BAD.values():
            answer = await client.post("/caption", content=body)
            assert answer.status_code == 422
            assert reason in answer.json()["detail"]
        for query, name in (
            ("max_new_tokens=13", "max_new_tokens"),
            ("deadline_s=0", "deadline_s"),
            ("deadline_s=nan", ""),
        ):
            answer = await client.post(f"/caption?{query}", content=PICTURES[0])
            assert answer.status_code == 422
            assert answer.json()["detail"].startswith(name)
        assert (await client.post("/caption", content=PICTURES[0])).status_code == 200

    with_client(captioning, scenario)


def test_a_full_queue_is_429_and_a_passed_deadline_504(captioning: Captioning):
    task = Gated(captioning)

    async def scenario(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/caption", content=PICTURES[0]))
        await asyncio.to_thread(task.entered.wait, 30)
        late = await client.post("/caption?deadline_s=0.01", content=PICTURES[1])
        assert late.status_code == 504
        waits = asyncio.create_task(client.post("/caption", content=PICTURES[1]))
        await until_waiting(client, 1)
        refused = await client.post("/caption", content=PICTURES[2])
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        task.gate.set()
        assert {(await first).status_code, (await waits).status_code} == {200}
        health = (await client.get("/health")).json()
        assert (health["status"], health["tasks"]) == ("ok", ["caption"])
        assert (health["done"], health["rejected"], health["expired"], health["waiting"]) == (2, 1, 1, 0)

    with_client(task, scenario, max_waiting=1)


def test_an_error_of_the_model_is_500_and_the_service_goes_on(captioning: Captioning, monkeypatch: pytest.MonkeyPatch):
    def fail(jobs: Sequence[CaptionJob]) -> list[str]:
        raise RuntimeError("out of memory")

    async def scenario(client: httpx.AsyncClient) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(captioning, "run", fail)
            assert (await client.post("/caption", content=PICTURES[0])).status_code == 500
        assert (await client.post("/caption", content=PICTURES[0])).status_code == 200

    with_client(captioning, scenario)


def test_the_page(captioning: Captioning):
    async def scenario(client: httpx.AsyncClient) -> str:
        answer = await client.get("/")
        assert answer.headers["content-type"].startswith("text/html")
        return answer.text

    assert "/caption" in with_client(captioning, scenario)


@pytest.fixture(scope="module")
def drawing(captioning: Captioning) -> Drawing:
    torch.manual_seed(0)
    config = ImageTokenizerConfig(image_size=32, patch_size=8, channels=[8], codebook_size=16, codebook_dim=4)
    image_tokenizer = M6ImageTokenizer(config)
    captioning.model.decodings = ["left_to_right"]
    return Drawing(M6TextToImagePipeline(captioning.model, captioning.processor, image_tokenizer), Sampling())


def test_pictures_that_wait_share_a_batch_and_are_those_of_the_pipeline(captioning: Captioning, drawing: Drawing):
    texts = ["红色的圆形", "一个大的蓝色三角形，和今天早上公园里的熊猫。"]
    expected = [drawing.pipeline(text, num_images=2, seed=7, progress=False).images for text in texts]

    async def scenario(client: httpx.AsyncClient) -> None:
        bodies = [{"text": text, "seed": 7, "index": index} for text in texts for index in range(2)]
        answers = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
        assert {answer.headers["content-type"] for answer in answers} == {"image/png"}
        pictures = [np.asarray(Image.open(io.BytesIO(answer.content)), dtype=int) for answer in answers]
        for got, wanted in zip(pictures, [picture for row in expected for picture in row], strict=True):
            # The sums of a batch are rounded in another order, which may turn a grey value over.
            assert np.abs(got - np.asarray(wanted, dtype=int)).max() <= 1
        assert len({picture.tobytes() for picture in pictures}) == 4
        health = (await client.get("/health")).json()
        assert health["tasks"] == ["caption", "generate"]
        assert health["batches"] < 4
        for body, reason in (
            ({"text": ""}, "is empty"),
            ({"text": " \u3000 "}, "is empty"),
            ({"text": "七" * 300}, "the model reads 96"),
            ({"text": 5}, "text: input should be a valid string"),
            ({}, "text: missing"),
            ({"text": "红", "index": -1}, "index: "),
            ({"text": "红", "sed": 1}, 'sed: unknown key; did you mean "seed"?'),
        ):
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 422, body
            assert reason in answer.json()["detail"]
        for content in (b"", b"[", b'{"text": "\\ud800"}', b"\xff"):
            assert (await client.post("/generate", content=content)).status_code == 422

    with_client(captioning, scenario, drawing=drawing)


def test_what_a_caption_has_of_new_words_is_in_a_header(captioning: Captioning, drawing: Drawing):
    drawing.pipeline.seen = describe_captions(captioning.processor.tokenizer, {"shapes": ["红色的圆形"]})

    async def scenario(client: httpx.AsyncClient) -> None:
        known, new = [await client.post("/generate", json={"text": text}) for text in ("红色的圆形", "圆形的红色")]
        assert WARNINGS not in known.headers
        assert json.loads(unquote(new.headers[WARNINGS])) == drawing.pipeline.caption_warnings("圆形的红色")
        assert new.headers["content-type"] == "image/png"
        assert WARNINGS in (await client.get("/")).text, "the page reads it"

    try:
        with_client(captioning, scenario, drawing=drawing)
    finally:
        drawing.pipeline.seen = None


def test_a_model_that_does_not_draw_says_what_it_lacks(captioning: Captioning):
    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/generate", json={"text": "红色"})

    answer = with_client(captioning, scenario)
    assert answer.status_code == 501
    assert answer.json()["detail"].startswith(
        "tiny does not draw: it was trained without m6.objectives.image_code_denoising"
    )


def test_a_model_that_does_not_answer_says_so(captioning: Captioning, monkeypatch: pytest.MonkeyPatch):
    async def scenario(client: httpx.AsyncClient) -> list[httpx.Response]:
        asked = await client.post("/caption", params={"question": "红"}, content=PICTURES[0])
        return [await client.get("/health"), asked, await client.post("/caption", content=PICTURES[0])]

    for learned, answers in ((["image_captioning"], False), (["visual_question_answering"], True), ([], True)):
        monkeypatch.setattr(type(captioning.model), "learned_objectives", learned)
        health, asked, plain = with_client(captioning, scenario)
        assert health.json()["answers"] is answers
        assert (asked.status_code, plain.status_code) == (200 if answers else 501, 200)
        assert answers or asked.json()["detail"].startswith("tiny does not answer: it was trained without m6.obj")


@pytest.mark.parametrize("path", ["/caption", "/generate"])
def test_unknown_parameters_are_refused(captioning: Captioning, drawing: Drawing, path: str):
    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(f"{path}?deadline=3", content=PICTURES[0])

    answer = with_client(captioning, scenario, drawing=drawing)
    assert answer.status_code == 422
    assert answer.json()["detail"] == 'the query has an unknown parameter "deadline"; did you mean "deadline_s"?'


@pytest.mark.slow
def test_a_process_answers_and_ends_cleanly(run: Path):
    """SIGTERM while a request is on its way: it is answered, and the exit code is 0."""
    command = [sys.executable, "-m", "m6", "serve", "--checkpoint", run, "--port", "0", "--max-new-tokens", "8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = re.fullmatch(r"serving .* at http://127\.0\.0\.1:(\d+)\n", line)
            if address is None:
                process.kill()
                pytest.fail(line + process.communicate()[1])

            with socket.create_connection(("127.0.0.1", int(address[1])), timeout=300) as client:
                length = len(PICTURES[0])
                client.sendall(
                    b"POST /caption HTTP/1.1\r\nhost: m6\r\nconnection: close\r\nexpect: 100-continue\r\n"
                    b"content-length: %d\r\n\r\n" % length
                )
                assert client.recv(4096).startswith(b"HTTP/1.1 100 "), "the service waits for the body"
                client.sendall(PICTURES[0][:50])
                process.send_signal(signal.SIGTERM)
                client.sendall(PICTURES[0][50:])
                head, _, answer = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert json.loads(answer)["text"]
            assert process.wait(300) == 0
        finally:
            process.kill()
