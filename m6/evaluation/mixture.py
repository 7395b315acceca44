"""What a run has read of each source: the mixture as it came out, not as it was asked for."""

from m6.config.run import RunConfig
from m6.data.manifest import MANIFEST_NAME
from m6.formatting import markdown_table
from m6.runs.data import open_data


def describe_mixture(config: RunConfig, num_samples: int) -> str:
    """Returns a table of the sources with their shares and how often their rows were read; empty without the data.

    Args:
        config: configuration of the run.
        num_samples: samples that the run has read.
    """
    if not (config.m6.data.path / MANIFEST_NAME).is_file():
        return ""
    data = open_data(config)
    rows = [
        [source, f"{data.manifest.split(source, 'train').rows:,}", f"{share:.1%}", f"{times:.3g}"]
        for source, (share, times) in data.realised_mixture(num_samples).items()
    ]
    return "## What it read\n\n" + markdown_table(["source", "training rows", "samples", "times read"], rows)
