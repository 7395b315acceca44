"""The recipe of a corpus: one JSON file with inputs, thresholds and the data folder.

In keys and names ``picture`` means an image.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from m6.data.sources import BUILT_IN
from m6.errors import UserError
from m6.shipped import shipped_file
from m6.validation import Section, read_document, validate


class FilterSettings(Section):
    """Thresholds of the quality filters. ``m6.corpus.rules`` says what each of them measures.

    The defaults are for web pages and news. Gopher is Rae et al. 2021 (arXiv 2112.11446, section A.1.1), and
    ChineseWebText is Chen et al. 2023 (arXiv 2311.01149); their rules about words are applied to characters.
    """

    min_chars: NonNegativeInt = Field(50, description="shortest document, in characters (Gopher: 50 words)")
    min_chinese_share: float = Field(
        0.3, ge=0, le=1, description="least share of Chinese characters among those that are not blank (ChineseWebText)"
    )
    max_symbol_share: float = Field(
        0.1, ge=0, le=1, description="largest share of #, ellipses and other symbols (Gopher: 0.1 for each word)"
    )
    max_bullet_lines: float = Field(0.9, ge=0, le=1, description="largest share of lines with a bullet (Gopher)")
    max_ellipsis_lines: float = Field(
        0.3, ge=0, le=1, description="largest share of lines that end in an ellipsis (Gopher)"
    )
    max_repeated_lines: float = Field(
        0.3, ge=0, le=1, description="largest share of lines that repeat another line (Gopher)"
    )
    max_repeated_line_chars: float = Field(
        0.2, ge=0, le=1, description="largest share of characters in lines that repeat another line (Gopher)"
    )
    max_repeated_ngrams: float = Field(
        0.5,
        ge=0,
        le=1,
        description="largest share of 13-character n-grams that occur before in the document (ChineseWebText)",
    )


class PictureFilterSettings(Section):
    """Thresholds of images and their captions. ``m6.corpus.rules`` says what each of them measures."""

    min_side: PositiveInt = Field(64, description="least width and height of a picture file in pixels")
    max_aspect: float = Field(3.0, ge=1, description="largest ratio of the longer side to the shorter one")
    allow_animation: bool = Field(False, description="whether files of several frames are used; their first is taken")
    min_contrast: float = Field(
        4.0, ge=0, description="least standard deviation of a colour channel, of 255 levels; less is a blank picture"
    )
    min_caption_chars: NonNegativeInt = Field(2, description="shortest caption")
    max_caption_chars: PositiveInt = Field(256, description="longest caption")
    min_chinese_share: float = Field(
        0.3, ge=0, le=1, description="least share of Chinese characters among those of a caption that are not blank"
    )
    max_caption_repeats: NonNegativeInt = Field(
        10,
        description="pictures that are kept of one caption, among all inputs; 0: all, for captions that are labels",
    )
    min_match: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="least probability, by matching_model, that a caption describes its picture; 0: it is not asked",
    )


def _has_secret(source: str) -> bool:
    """Whether a URL, or one of a chain such as ``zip://a.jsonl::https://a.org/b.zip``, holds what lets a user read it.

    A user without a password is a secret only on web servers, where it may be a token. A signed address has its secret
    in the query.
    """
    for link in source.split("::"):
        protocol, _, rest = link.strip().lower().partition("://")
        user, at, _ = rest.partition("/")[0].rpartition("@")
        is_web = protocol in ("http", "https")
        if (at and (":" in user or is_web)) or (is_web and "?" in rest):
            return True
    return False


class InputSettings(Section):
    """One input of the corpus.

    Raises:
        ValueError: a file, folder, URL or data set of the Hub has no name, or a URL holds a password.
    """

    source: str = Field(
        description="a built-in name, a file, a folder, hf:NAME[:SPLIT], or a URL such as s3://bucket/folder"
    )
    name: str | None = Field(None, pattern=r"^\w[\w-]*$", description="name in the manifest; required for own data")
    licence: str | None = Field(None, description="licence of own data; required for it")
    text_column: str = Field("text", description="own data: the column of texts")
    image_column: str | None = Field(None, description="own tables: the column of pictures; null: a table of texts")
    split_column: str | None = Field(None, description="own data: the column that names the split of a row")
    group_column: str | None = Field(None, description="own data: rows with the same value are in one split")
    filters: FilterSettings | None = Field(None, description="thresholds of this input, instead of the recipe's")
    picture_filters: PictureFilterSettings | None = Field(None, description="the same, for pictures with captions")

    @model_validator(mode="after")
    def _check(self) -> InputSettings:
        if self.name is None and self.source not in BUILT_IN:
            raise ValueError('name is missing: what shall the manifest call this input? For example "web"')
        if _has_secret(self.source):
            raise ValueError(
                "source has a user's name, a password or a query in its address, which the manifest would publish; "
                "give them to fsspec by its configuration or environment, or copy the file"
            )
        return self

    @property
    def called(self) -> str:
        """Name in the manifest."""
        return self.name or self.source


class NearDuplicateSettings(Section):
    """MinHash over characters (datatrove).

    Two texts of Jaccard similarity s share a bucket with probability 1 - (1 - s^hashes)^buckets.
    """

    ngram_chars: PositiveInt = Field(5, description="characters of an n-gram")
    num_buckets: PositiveInt = Field(20, description="buckets; 20 x 8 find 97.5 % of the pairs at 0.8, 7.5 % at 0.5")
    hashes_per_bucket: PositiveInt = Field(8, description="hashes that must agree in a bucket")


class NamedSet(Section):
    """A set of texts, such as a benchmark, to keep out of the training split."""

    name: str = Field(pattern=r"^\w[\w-]*$", description="name in the report")
    path: Path = Field(description="JSONL, Parquet or text files")
    text_column: str = Field("text", description="column of the texts")


class NamedPictures(Section):
    """A set of images, such as a benchmark, to keep out of the data folder."""

    name: str = Field(pattern=r"^\w[\w-]*$", description="name in the report")
    path: Path = Field(description="pictures, WebDataset tars, or Parquet files, such as a data folder")
    image_column: str = Field("image", description="Parquet files: the column of pictures")


class DecontaminationSettings(Section):
    """Removal of documents that leak held-out data.

    A training document is removed if it shares an n-gram with a held-out text (Brown et al. 2020, appendix C). An image
    is removed if it is a near duplicate of an image of a named set.
    """

    ngram_chars: int = Field(32, ge=5, description="characters of an n-gram, blanks and marks not counted")
    sets: list[NamedSet] = Field(default=[], description="further texts of which nothing may be in training")
    picture_sets: list[NamedPictures] = Field(default=[], description="pictures of which nothing may be in the corpus")


class SlurmSettings(Section):
    """Resources of each task under ``--executor slurm``."""

    partition: str | None = Field(None, description="Slurm's partition")
    account: str | None = Field(None, description="Slurm's account")
    time_limit_min: PositiveInt = Field(240, description="wall-clock limit of a task in minutes")
    memory_gb: PositiveInt = Field(4, description="memory of a task in GiB")


class CorpusRecipe(Section):
    """A corpus of texts, of images with captions, or of both.

    Raises:
        ValueError: two inputs or two sets have the same name, the shares leave nothing to train on, ``min_match`` is
            set without ``matching_model``, or ``matching_model`` without ``min_match``.
    """

    out: Path = Field(description="the data folder to make; OUT.work beside it holds what is not finished")
    inputs: list[InputSettings] = Field(min_length=1, description="what is read")
    document_chars: int = Field(
        100_000, ge=1000, le=1_000_000, description="longer documents are cut to several; bounds the memory of a task"
    )
    passage_chars: int = Field(256, ge=16, description="longest row of the data folder, in characters")
    image_size: int = Field(256, ge=32, le=4096, description="longest side of a stored picture in pixels")
    to_simplified: bool = Field(False, description="whether traditional characters are written as simplified ones")
    remove_boilerplate: bool = Field(True, description="whether lines of buttons, notices and scripts are removed")
    mask_personal_data: bool = Field(True, description="whether telephone numbers and the like become placeholders")
    filters: FilterSettings = FilterSettings()
    picture_filters: PictureFilterSettings = PictureFilterSettings()
    picture_buckets: PositiveInt = Field(
        16,
        description="units in which near duplicates of pictures are searched; each keeps 6 kB / buckets for a picture",
    )
    matching_model: Path | None = Field(
        None,
        description="a run that was fine-tuned on image_text_matching; with picture_filters.min_match it compares "
        "pictures with their captions",
    )
    near_duplicates: NearDuplicateSettings = NearDuplicateSettings()
    decontamination: DecontaminationSettings = DecontaminationSettings()
    validation_share: float = Field(0.01, ge=0, lt=1, description="share of the groups held out for validation")
    test_share: float = Field(0.01, ge=0, lt=1, description="share of the groups held out for testing")
    slurm: SlurmSettings = SlurmSettings()

    @model_validator(mode="after")
    def _check(self) -> CorpusRecipe:
        names = [*(each.called for each in self.inputs), *(each.name for each in self.decontamination.picture_sets)]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f'two inputs are called "{repeated[0]}"')
        sets = [each.name for each in self.decontamination.sets]
        if repeated := [name for name in sets if sets.count(name) > 1]:
            raise ValueError(f'two of decontamination.sets are called "{repeated[0]}"')
        if self.validation_share + self.test_share >= 1:
            raise ValueError(
                f"validation_share {self.validation_share} and test_share {self.test_share} leave nothing to train on"
            )
        thresholds = [self.picture_filters_of(each.called).min_match for each in self.inputs]
        if any(thresholds) and self.matching_model is None:
            raise ValueError(
                f"picture_filters.min_match is {max(thresholds):g}, but there is no matching_model that says how well "
                "a caption fits"
            )
        if self.matching_model is not None and not any(thresholds):
            raise ValueError(
                "matching_model would compare nothing: picture_filters.min_match is 0 for all inputs; set it, such as "
                "to 0.5"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Returns all settings with an effect on the contents of the data folder, for its manifest."""
        return self.model_dump(mode="json", exclude={"out", "slurm"}, exclude_none=True)

    def input(self, name: str) -> InputSettings:
        """Returns the input called ``name`` in the manifest."""
        return next(each for each in self.inputs if each.called == name)

    def picture_filters_of(self, name: str) -> PictureFilterSettings:
        """Returns the image thresholds of the input called ``name`` in the manifest."""
        return self.input(name).picture_filters or self.picture_filters


def load_recipe(path: Path, overrides: tuple[str, ...] = ()) -> CorpusRecipe:
    """Reads a recipe.

    Args:
        path: the JSON file, or the name of a shipped recipe.
        overrides: ``key.path=value`` strings.

    Raises:
        UserError: there is no such file, or it is invalid; the message names the file and the key.
    """
    file = shipped_file(path, "corpus recipe")
    try:
        return validate(CorpusRecipe, read_document(file, overrides), "")
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(str(file)) else f"{file}: {error}") from None
