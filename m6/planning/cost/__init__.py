"""The cost of a layout: bytes of memory and seconds of a step."""
