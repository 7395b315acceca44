"""The HTTP interface. Status codes of failed requests:

408  the body was not sent in time
413  the body is too large
422  bad input; the answer names the problem
429  the queue, or the memory for bodies, is full; the header Retry-After says when to try again
500  the model failed on this batch
501  the model does not draw, or has not learned to answer questions
503  the service is stopping, or has too many connections
504  the deadline passed

Bodies are read and decoded outside of the event loop, before they are queued. Their memory is bounded: the bodies of
all requests together hold at most ``MAX_HELD_BYTES``, and at most ``NUM_THREADS`` bodies are decoded at the same time.
"""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field as FormField
from python_multipart.multipart import File, parse_options_header
from starlette.requests import ClientDisconnect

from m6.data.sources.pictures import BadPicture, encode_bitmap
from m6.errors import UserError, nearest
from m6.serving.batcher import Batcher, QueueFull, Stopping
from m6.serving.tasks import Captioning, CaptionJob, Drawing, DrawJob
from m6.validation import describe

MAX_BODY_BYTES = 16 << 20
MAX_HELD_BYTES = 128 << 20
BODY_SECONDS = 20.0
NUM_THREADS = 2
MAX_TEXT_BYTES = 64 << 10
WARNINGS = "M6-Warnings"

Result = TypeVar("Result")


class BadInput(ValueError):
    """Invalid input from a client; the message names the problem."""


class BodyTooLarge(Exception):
    """A body is larger than its limit."""


class BodyTooSlow(Exception):
    """A body was not complete within ``BODY_SECONDS``."""


class TooManyBodies(Exception):
    """The bodies of all requests together hold ``MAX_HELD_BYTES``."""


class Intake:
    """Reads and decodes the bodies of requests within limits of memory and time."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="intake")

    @asynccontextmanager
    async def body(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """Yields the body of a request; its memory counts until the end of the context.

        Raises:
            BodyTooLarge: the body is larger than ``max_bytes``.
            BodyTooSlow: the body takes longer than ``BODY_SECONDS``.
            TooManyBodies: the bodies of other requests leave no room.
        """
        parts: list[bytes] = []
        try:
            try:
                await asyncio.wait_for(self._read(request, parts, max_bytes), BODY_SECONDS)
            except asyncio.TimeoutError:
                raise BodyTooSlow(f"the body of the request was not complete after {BODY_SECONDS:g} seconds") from None
            yield b"".join(parts)
        finally:
            self.held_bytes -= sum(map(len, parts))

    async def _read(self, request: Request, parts: list[bytes], max_bytes: int) -> None:
        # Read in parts: the size must be checked before the whole body is in memory.
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise BodyTooLarge(f"the body of the request is larger than {_in_units(max_bytes)}")
            if self.held_bytes + len(part) > MAX_HELD_BYTES:
                raise TooManyBodies("the bodies of other requests leave no memory for this one")
            parts.append(part)
            self.held_bytes += len(part)

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Calls a function in one of ``NUM_THREADS`` threads. A cancelled call is dropped if it has not begun."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        """Ends the threads after their running calls; waiting calls are dropped."""
        self._threads.shutdown(cancel_futures=True)


def uploaded_file(content_type: str, body: bytes) -> bytes:
    """Returns the file in a body: the body itself, or the one file of a ``multipart/form-data`` form.

    Raises:
        BadInput: the form is damaged, has other fields, or does not have exactly one file.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        return body
    files: list[File] = []
    fields: list[FormField] = []
    try:
        # In memory: the limit of the body holds for its files.
        limits = {"MAX_MEMORY_FILE_SIZE": len(body)}
        parser = FormParser(
            "multipart/form-data", fields.append, files.append, boundary=options[b"boundary"], config=limits
        )
        parser.write(body)
        parser.finalize()
    except (FormParserError, KeyError) as error:
        raise BadInput(f"the form of the request cannot be read: {error or 'it names no boundary'}") from None
    if fields:
        name = (fields[0].field_name or b"").decode("utf-8", "replace")[:64]
        raise BadInput(
            f'the form of the request has the field "{name}", expected the picture alone; parameters belong to the '
            "query, as in /caption?max_new_tokens=24"
        )
    if len(files) != 1:
        raise BadInput(f"the form of the request has {len(files)} files, expected one, as curl -F picture=@FILE sends")
    file = files[0].file_object
    file.seek(0)
    return file.read()


def _in_units(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"


class DeadlinePassed(Exception):
    """A request was not completed in time. Its job is not run if it still waits."""


class NotLearned(Exception):
    """The model does not draw or answer; the message says what it does."""


class DrawRequest(BaseModel):
    """Body of a request to ``/generate``."""

    model_config = ConfigDict(extra="forbid")

    text: str
    seed: int = 0
    index: int = Field(0, ge=0, description="index of the picture among those of this text and seed")


def create_app(
    batcher: Batcher,
    captioning: Captioning,
    drawing: Drawing | None = None,
    *,
    deadline_s: float,
    model_name: str,
    background: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> FastAPI:
    """Makes the HTTP application.

    Args:
        batcher: queue with the lane "caption", and with "generate" if ``drawing`` is given. The application starts and
            stops it.
        captioning: task of the lane "caption".
        drawing: task of the lane "generate"; None if the model cannot generate images.
        deadline_s: longest time of a request in seconds, from its headers to its answer. A request can choose a
            shorter one.
        model_name: the name of the model on the demo page.
        background: runs concurrently with the requests, at most until the service stops.
    """
    intake = Intake()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with batcher:
            work = asyncio.create_task(background()) if background else None
            yield
            if work is not None:
                work.cancel()
        intake.close()

    app = FastAPI(title="m6-recipes", lifespan=lifespan)
    # FastAPI evaluates annotations, and this one depends on deadline_s. So this file must not import annotations from
    # __future__: they would become strings.
    Deadline = Annotated[
        float, Query(alias="deadline_s", gt=0, le=deadline_s, description="seconds until the request is given up")
    ]

    async def result_of(request: Request, lane: str, job: CaptionJob | DrawJob) -> Any:
        """Queues a job; if its client disconnects while it waits, it is not run."""
        done, gone = asyncio.ensure_future(batcher.submit(lane, job)), asyncio.ensure_future(disconnection(request))
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ClientDisconnect
            return done.result()
        finally:
            done.cancel()
            gone.cancel()

    async def within(seconds: float, answer: Awaitable[Result]) -> Result:
        try:
            return await asyncio.wait_for(answer, seconds)
        except asyncio.TimeoutError:
            batcher.counters.expired += 1
            raise DeadlinePassed(f"not done within {seconds:g} seconds") from None

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return files("m6.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "model": model_name,
            "tasks": batcher.tasks,
            "answers": captioning.answers,
            **batcher.status(),
        }

    @app.get("/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/caption")
    async def caption(
        request: Request,
        max_new_tokens: Annotated[int, Query(ge=1, le=captioning.max_new_tokens)] = captioning.max_new_tokens,
        question: str = "",
        deadline: Deadline = deadline_s,
    ) -> dict[str, str]:
        """Captions a picture, or answers a question about it.

        PNG, JPEG, WebP, GIF, BMP or TIFF, as the body or as the only file of a form.
        """
        check_parameters(request, "max_new_tokens", "question", "deadline_s")
        if question and not captioning.answers:
            raise NotLearned(
                f"{model_name} does not answer: it was trained without m6.objectives.visual_question_answering; "
                "without a question it captions the picture"
            )
        content_type, image_size = request.headers.get("content-type", ""), captioning.model.config.image_size

        async def answer() -> str:
            async with intake.body(request, MAX_BODY_BYTES) as body:
                picture = await intake.run(open_picture, content_type, body, image_size)
            job = await intake.run(read_question, captioning, picture, max_new_tokens, question)
            return await result_of(request, "caption", job)

        return {"text": await within(deadline, answer())}

    @app.post("/generate", response_class=Response)
    async def generate(request: Request, deadline: Deadline = deadline_s) -> Response:
        """Generates a picture of the ``text`` in the JSON body. The response is a PNG file.

        The header M6-Warnings says what of the text the model does not know: a JSON list in percent-encoding.
        """
        if drawing is None:
            raise NotLearned(
                f"{model_name} does not draw: it was trained without m6.objectives.image_code_denoising or "
                "text_to_image and has no image tokenizer; it captions pictures at /caption"
            )
        check_parameters(request, "deadline_s")

        async def answer() -> Response:
            async with intake.body(request, MAX_TEXT_BYTES) as body:
                # Before the job is queued, so a bad job cannot fail a batch.
                job = await intake.run(read_drawing, drawing, body)
            picture = await result_of(request, "generate", job)
            # Headers are ASCII, so the JSON is in percent-encoding.
            headers = {WARNINGS: quote(json.dumps(job.warnings, ensure_ascii=False))} if job.warnings else {}
            return Response(picture, media_type="image/png", headers=headers)

        return await within(deadline, answer())

    statuses = {
        ClientDisconnect: 400,  # nobody reads the answer
        BodyTooSlow: 408,
        BodyTooLarge: 413,
        BadInput: 422,
        QueueFull: 429,
        TooManyBodies: 429,
        NotLearned: 501,
        Stopping: 503,
        DeadlinePassed: 504,
    }
    for kind, status in statuses.items():
        app.add_exception_handler(kind, _answer_with(status))
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    return app


async def disconnection(request: Request) -> None:
    """Returns when the client disconnects; the body of the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_parameters(request: Request, *known: str) -> None:
    """Raises BadInput if the query of a request has a parameter unknown to the route."""
    for name in request.query_params:
        if name not in known:
            raise BadInput(f'the query has an unknown parameter "{name[:64]}"{nearest(name[:64], known)}')


def open_picture(content_type: str, body: bytes, image_size: int) -> Image.Image:
    """Converts a client's image in the same way as training images; BadInput if it is damaged or too large."""
    data = uploaded_file(content_type, body)
    try:
        return Image.open(io.BytesIO(encode_bitmap(data, image_size)))
    except BadPicture as problem:
        reason = str(problem)
    except Exception:  # some of Pillow's decoders raise undocumented types, such as struct.error
        reason = "corrupt image"
    raise BadInput(f"the body of the request is not a usable picture: {reason}")


def read_question(captioning: Captioning, picture: Image.Image, max_new_tokens: int, question: str) -> CaptionJob:
    """Makes the job of a request to ``/caption``; BadInput if its question is too long."""
    try:
        return captioning.job(picture, max_new_tokens, question)
    except UserError as error:
        raise BadInput(str(error)) from None


def read_drawing(drawing: Drawing, body: bytes) -> DrawJob:
    """Converts the body of a request to ``/generate``; BadInput if it is invalid, or its text is empty or too long."""
    try:
        values = DrawRequest.model_validate_json(body)
        return drawing.job(values.text, values.seed, values.index)
    except ValidationError as error:
        raise BadInput(describe(error, DrawRequest, "")) from None
    except UserError as error:
        raise BadInput(str(error)) from None


def _answer_with(status: int) -> Any:
    headers = {"Retry-After": "1"} if status == 429 else {}
    # The client may still be sending: without this header the connection would stay open until the end of its body.
    headers |= {"Connection": "close"} if status in (408, 413, 429, 501, 504) else {}

    def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status, headers)

    return answer


def _answer_invalid(request: Request, error: Any) -> JSONResponse:
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"][1:])
    return JSONResponse({"detail": f"{name}: {problem['msg']}"}, 422)
