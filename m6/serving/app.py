"""The HTTP interface. Status codes of failed requests:

408  the body was not sent in time
413  the body is too large
422  bad input; the answer names the problem
429  the queue, or the memory for bodies, is full; the header Retry-After says when to try again
500  the model failed on this batch
501  the model does not draw
503  the service is stopping, or has too many connections
504  the deadline passed
"""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from m6.data.sources.pictures import BadPicture, encode_bitmap
from m6.errors import UserError, nearest
from m6.serving.batcher import Batcher, QueueFull, Stopping
from m6.serving.intake import (
    MAX_BODY_BYTES,
    BadInput,
    BodyTooLarge,
    BodyTooSlow,
    Intake,
    TooManyBodies,
    uploaded_file,
)
from m6.serving.tasks import Captioning, CaptionJob, Drawing, DrawJob
from m6.validation import describe

MAX_TEXT_BYTES = 64 << 10
WARNINGS = "M6-Warnings"

Result = TypeVar("Result")


class DeadlinePassed(Exception):
    """A request was not completed in time. Its job is not run if it still waits."""


class CannotDraw(Exception):
    """The checkpoint has no image tokenizer."""


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
        return {"status": "ok", "model": model_name, "tasks": batcher.tasks, **batcher.status()}

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
            raise CannotDraw(
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
        CannotDraw: 501,
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
