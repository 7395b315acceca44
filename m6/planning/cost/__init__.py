"""What a layout costs: bytes of memory and seconds of a step."""
