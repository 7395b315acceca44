"""Exports of a run: a folder in Hugging Face's format, with a model card and the modelling code."""

from m6.export.folder import check_push, export_hf, push

__all__ = ["check_push", "export_hf", "push"]
