"""Special tokens and token types of the joint vocabulary: text pieces, then special tokens, then image codes."""

SPECIAL_TOKENS: tuple[str, ...] = (
    "<pad>",
    "<bos>",  # begins the target of every sample
    "<eos>",
    "<mask>",
    "<image>",  # placeholder at each position of an image's patch
    "<boi>",  # begins a sequence of image codes
    "<eoi>",
    "<sep>",
    "<code_mask>",  # a hidden image code
    *(f"<reserved_{k}>" for k in range(9, 16)),
)
NUM_SPECIAL_TOKENS = 16

IGNORED_LABEL = -100
"""The label of a position without a target; PyTorch's losses ignore it by default."""

# Token types: image patch (and padding), source, target including its <bos>.
IMAGE, SOURCE, TARGET = 0, 1, 2
