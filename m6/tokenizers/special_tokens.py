"""The special tokens of the joint id space (text pieces, then these, then image codes), and the token types."""

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

IGNORED_LABEL = -100
"""The label of a position without a target; PyTorch's losses leave it out by default."""

# What a position belongs to: a picture's patch (and padding), the source, the target from <bos> on.
IMAGE, SOURCE, TARGET = 0, 1, 2
