"""Opens a split of a data folder as a memory-mapped ``datasets.Dataset``."""

import sys
from typing import TYPE_CHECKING

from m6.data.manifest import Manifest
from m6.data.shards import SCHEMA
from m6.data.verification import verify_shards
from m6.errors import UserError

if TYPE_CHECKING:
    import datasets


def open_split(manifest: Manifest, source: str, split: str) -> "datasets.Dataset":
    """Returns the rows of one split in shard order, with the columns of ``m6.data.shards.SCHEMA``.

    Hugging Face Datasets converts the Parquet files once to Arrow files in its cache (``HF_HOME``) and memory-maps
    them. Indexing is then cheap, workers share the pages, and the rows need not fit into memory.

    Raises:
        UserError: the source or split is unknown or has no rows, or a shard is missing or damaged.
    """
    import datasets

    if not sys.stderr.isatty():  # progress bars would fill the logs of cluster jobs
        datasets.disable_progress_bars()
    files = manifest.files(source, split)
    if not files:
        raise UserError(f'{manifest.folder}: source "{source}" has no rows in split "{split}"')
    verify_shards(manifest.folder, manifest.split(source, split).shards)
    features = datasets.Features.from_arrow_schema(SCHEMA)
    data = datasets.Dataset.from_parquet([str(file.resolve()) for file in files], features=features)
    # Finds shards that were replaced without their manifest.
    if len(data) != manifest.split(source, split).rows:
        raise UserError(
            f'{manifest.folder}: source "{source}" has {len(data)} rows in split "{split}", '
            f"but the manifest says {manifest.split(source, split).rows}"
        )
    return data
