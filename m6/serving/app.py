"""The HTTP interface. Status codes of requests that fail:

422  bad input; the body names the problem
429  the queue is full; the header Retry-After says when to try again
503  the service is stopping
504  the deadline passed
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
# Pictures decoded at the same time: a file of 16 MiB can take 200 MB when decoded.
MAX_CONCURRENT_DECODES = 2


class BadInput(ValueError):
    """Invalid input from a client; the message says what is wrong."""


class DrawRequest(BaseModel):
    """Body of a request to ``/generate``."""

    model_config = ConfigDict(extra="forbid")

    text: str
    seed: int = 0
    index: int = Field(0, ge=0, description="index of the picture among those of this text and seed")


def create_app(
    batcher: Batcher, captioning: Captioning, drawing: Drawing | None = None, *, deadline_s: float
) -> FastAPI:
    """Makes the HTTP application.

    Args:
        batcher: queue with the lane "caption", and with "generate" if ``drawing`` is given. The application starts and
            stops it.
        captioning: task of the lane "caption".
        drawing: task of the lane "generate"; None if the model cannot generate pictures.
        deadline_s: longest time of a request in seconds. A request can choose a shorter one.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with batcher:
            yield

    decoding = asyncio.Semaphore(MAX_CONCURRENT_DECODES)
    app = FastAPI(title="m6-recipes", lifespan=lifespan)
    # FastAPI evaluates annotations, and this one depends on deadline_s. So this file must not import annotations from
    # __future__, which would turn them into strings.
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
        """Captions a picture. The body of the request is a PNG, JPEG, WebP, GIF, BMP or TIFF file."""
        data = await _read_body(request)
        async with decoding:  # in a thread: decoding a large picture would block the event loop
            picture = await asyncio.to_thread(open_picture, data, captioning.model.config.image_size)
        return {"text": await batcher.submit("caption", CaptionJob(picture, max_new_tokens), deadline)}

    if drawing is not None:

        @app.post("/generate", response_class=Response)
        async def generate(request: Request, deadline: Deadline = deadline_s) -> Response:
            """Generates a picture of the ``text`` in the JSON body. The response is a PNG file."""
            try:
                body = DrawRequest.model_validate_json(await _read_body(request))
                job = DrawJob(body.text, body.seed, body.index)
                drawing.check(job)  # before the job is queued, so that a bad one cannot fail a batch
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
    """Converts a client's picture as training pictures are converted; BadInput if it is damaged or too large."""
    try:
        return Image.open(io.BytesIO(encode_bitmap(data, image_size)))
    except BadPicture as problem:
        reason = str(problem)
    except Exception:  # some of Pillow's decoders raise undocumented types, such as struct.error
        reason = "corrupt image"
    raise BadInput(f"the body of the request is not a usable picture: {reason}")


async def _read_body(request: Request) -> bytes:
    # Read in parts: the size must be checked before the whole body is in memory.
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
