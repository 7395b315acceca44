"""A processor, and models that draw without having been trained."""

from collections.abc import Callable

import pytest
import torch

from m6.model import M6Config, M6ForConditionalGeneration
from m6.tokenizers import load_text_tokenizer
from m6.tokenizers.processor import M6ImageProcessor, M6Processor
from tests.fixtures.tiny_data import TINY_IMAGE_VOCAB_SIZE, TINY_VOCAB_SIZE, build_tiny_tokenizer


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> M6Processor:
    tokenizer = load_text_tokenizer(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return M6Processor(M6ImageProcessor(size={"height": 32, "width": 32}), tokenizer, num_patches=4)


@pytest.fixture(scope="module", params=[None, {"num_experts": 4, "num_prototypes": 2}], ids=["dense", "moe"])
def make_model(request: pytest.FixtureRequest) -> Callable[..., M6ForConditionalGeneration]:
    """Makes a model in fp64, dense and with experts, with settings of its grid of codes."""

    def make(**grid: int) -> M6ForConditionalGeneration:
        torch.manual_seed(0)
        config = M6Config(
            text_vocab_size=TINY_VOCAB_SIZE,
            image_vocab_size=TINY_IMAGE_VOCAB_SIZE,
            hidden_size=32,
            num_layers=2,
            num_attention_heads=2,
            ffn_hidden_size=64,
            max_position_embeddings=32,
            image_size=32,
            patch_size=16,
            initializer_range=0.2,  # so that the untrained model is not indifferent
            moe=request.param,
            **grid,
        )
        return M6ForConditionalGeneration(config).double().eval()

    return make
