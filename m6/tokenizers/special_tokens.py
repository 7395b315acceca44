"""The special tokens of the joint id space: text pieces, then these, then image codes."""

SPECIAL_TOKENS: tuple[str, ...] = (
    "<pad>",
    "<bos>",  # opens the target of every sample
    "<eos>",
    "<mask>",
    "<image>",  # stands at the position of a picture's patch
    "<boi>",  # opens a run of image codes
    "<eoi>",
    "<sep>",
    *(f"<reserved_{k}>" for k in range(8, 16)),
)
NUM_SPECIAL_TOKENS = 16
