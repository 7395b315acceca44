"""The seam to DeepSpeed: nothing outside of this folder reads inside of its engine."""
