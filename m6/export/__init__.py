"""What leaves a run for others: a folder in Hugging Face's format, with a model card and the modelling code."""

from m6.export.folder import DTYPES, export_hf

__all__ = ["DTYPES", "export_hf"]
