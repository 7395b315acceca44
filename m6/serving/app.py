"""The HTTP interface: what may be asked, and with which status a request ends that is not answered.

422  bad input: the body says what is wrong
429  the queue is full; Retry-After says when to try again
503  the service is stopping
504  not done before the deadline
"""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m6.data.sources.pictures import BadPicture, encode_bitmap
from m6.errors import UserError
from m6.serving.batcher import Batcher, DeadlinePassed, QueueFull, Stopping
from m6.serving.tasks import Captioning, CaptionJob, Drawing, DrawJob
from m6.validation import describe

MAX_BODY_BYTES = 16 << 20
# A picture of 16 MiB may be 200 MB when it is decoded.
MAX_DECODED_AT_ONCE = 2


class BadInput(ValueError):
    """What a client sent cannot be used; the message says why."""


class DrawRequest(BaseModel):
    """The body of a request for a picture."""

    model_config = ConfigDict(extra="forbid")

    text: str
    seed: int = 0
    index: int = Field(0, ge=0, description="number of the picture among those of this text and seed")


def create_app(
    batcher: Batcher, captioning: Captioning, drawing: Drawing | None = None, *, deadline_s: float
) -> FastAPI:
    """The service around a queue.

    Args:
        batcher: with the lane "caption", and "generate" if there is ``drawing``; entered and left with the application.
        captioning: the task of the former.
        drawing: the task of the latter; None where the model does not draw.
        deadline_s: the longest that a request may take; it may ask for less.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with batcher:
            yield

    decoding = asyncio.Semaphore(MAX_DECODED_AT_ONCE)
    app = FastAPI(title="m6-recipes", lifespan=lifespan)
    # Annotations of this file are values, not strings: FastAPI reads them, and they depend on the arguments above.
    Deadline = Annotated[
        float, Query(alias="deadline_s", gt=0, le=deadline_s, description="seconds until the request is given up")
    ]

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return files("m6.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "tasks": batcher.tasks, **batcher.status()}

    @app.post("/caption")
    async def caption(
        request: Request,
        max_new_tokens: Annotated[int, Query(ge=1, le=captioning.max_new_tokens)] = captioning.max_new_tokens,
        deadline: Deadline = deadline_s,
    ) -> dict[str, str]:
        """Describes the picture (PNG, JPEG, WebP, GIF, BMP or TIFF) that is the body of the request."""
        data = await _read_body(request)
        async with decoding:  # in a thread, because a large picture takes a while
            picture = await asyncio.to_thread(open_picture, data, captioning.model.config.image_size)
        return {"text": await batcher.submit("caption", CaptionJob(picture, max_new_tokens), deadline)}

    if drawing is not None:

        @app.post("/generate", response_class=Response)
        async def generate(request: Request, deadline: Deadline = deadline_s) -> Response:
            """Draws the ``text`` of the JSON in the body; answers with one PNG."""
            try:
                body = DrawRequest.model_validate_json(await _read_body(request))
                job = DrawJob(body.text, body.seed, body.index)
                drawing.check(job)
            except ValidationError as error:
                raise BadInput(describe(error, DrawRequest, "")) from None
            except UserError as error:
                raise BadInput(str(error)) from None
            return Response(await batcher.submit("generate", job, deadline), media_type="image/png")

    statuses = {BadInput: 422, QueueFull: 429, Stopping: 503, DeadlinePassed: 504}
    for kind, status in statuses.items():
        app.add_exception_handler(kind, _answer_with(status))
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    return app


def open_picture(data: bytes, image_size: int) -> Image.Image:
    """A client's picture as training saw its pictures; BadInput if it is none, damaged or too large."""
    try:
        return Image.open(io.BytesIO(encode_bitmap(data, image_size)))
    except BadPicture as problem:
        reason = str(problem)
    except Exception:  # some of Pillow's decoders raise what nobody expects, such as struct.error
        reason = "corrupt image"
    raise BadInput(f"the body of the request is not a usable picture: {reason}")


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BadInput(f"the body of the request is larger than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)


def _answer_with(status: int) -> Any:
    headers = {"Retry-After": "1"} if status == 429 else None

    def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status, headers)

    return answer


def _answer_invalid(request: Request, error: Any) -> JSONResponse:
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"][1:])
    return JSONResponse({"detail": f"{name}: {problem['msg']}"}, 422)
