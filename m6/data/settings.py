"""The section ``m6.data`` of a run."""

from pathlib import Path

from pydantic import Field

from m6.validation import Section


class DataSettings(Section):
    """The data of a run, and how samples are packed into rows."""

    path: Path = Field(description='data folder, made by "m6 data build"')
    tokenizer: Path = Field(description='tokenizer folder, made by "m6 data tokenizer"')
    image_tokenizer: str | None = Field(
        default=None,
        description="folder of the image tokenizer, or its name on the Hub; drawing is learned on its codes, "
        'which "m6 data codes" makes',
    )
    sources: dict[str, float] | None = Field(
        default=None, description="relative weight of each source; absent: all sources, in proportion to their rows"
    )
    temperature: float = Field(
        default=1.0,
        ge=1,
        le=100,
        description="without sources: weights are the numbers of rows to the power of 1 / temperature; above 1, small "
        "sources are read more often",
    )
    max_epochs: float | None = Field(
        default=None,
        gt=0,
        description="how often the rows of a source are read at most in total_steps; what is beyond goes to other "
        "sources of its kind, and the run cannot become longer; absent: without limit",
    )
    sequence_length: int = Field(
        default=512, gt=0, le=2**24, description="tokens in a row, pictures and padding included"
    )
    packing: bool = Field(default=True, description="whether a row can hold several samples")
    num_workers: int = Field(
        default=2, ge=0, description="processes that prepare micro-batches; 0: the training process prepares them"
    )
    max_bad_row_share: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="the run fails if a larger share of its rows cannot be used (damaged picture, no text)",
    )
