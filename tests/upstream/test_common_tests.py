"""transformers' own common tests of models, configurations, processors, tokenizers and image processors, run on M6."""

import copy
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.model import M6Config, M6ForConditionalGeneration, M6Model
from m6.tokenizers import M6ImageProcessor, M6Processor, M6Tokenizer, load_text_tokenizer
from tests.fixtures.tiny_data import build_tiny_tokenizer
from tests.upstream.sources import make_importable, module

pytestmark = pytest.mark.slow
problem = make_importable(Path.home() / ".cache" / "m6-recipes")
if problem:
    pytest.skip(problem, allow_module_level=True)

configurations, models = module("test_configuration_common"), module("test_modeling_common")
processors, images = module("test_processing_common"), module("test_image_processing_common")
tokenizers = module("test_tokenization_common")
# The common tests know models by these names. The model without a head has no loss to test.
models.MODEL_MAPPING_NAMES["m6"] = "M6Model"
models.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES["m6"] = "M6ForConditionalGeneration"

FIXED_VOCABULARY = "image codes follow the text pieces, so the vocabulary and its special tokens are fixed"
NOT_APPLICABLE = {
    "Models": {
        "test_inputs_embeds": "patches, token types and positions follow from the ids",
        "test_inputs_embeds_matches_input_ids": "patches, token types and positions follow from the ids",
        "test_causal_lm_loss_honors_shift_labels": "the loss shifts labels itself, and takes none that are shifted",
        "test_model_forward_default_config_values": f"it sets all special tokens to 0; {FIXED_VOCABULARY}",
    },
    "ModelWithExperts": {
        "test_batching_equivalence": "router_stats counts the tokens of the whole batch; the others are compared in "
        "tests/unit/model/test_contracts.py",
    },
    "Tokenizer": {
        "test_added_tokens_serialization": FIXED_VOCABULARY,
        "test_bos_token_with_add_bos_token_false": FIXED_VOCABULARY,
        "test_bos_token_with_add_bos_token_true": FIXED_VOCABULARY,
        "test_get_vocab": FIXED_VOCABULARY,
        "test_pad_token_initialization": FIXED_VOCABULARY,
        "test_save_and_load_tokenizer": FIXED_VOCABULARY,
        "test_tokenize_special_tokens": FIXED_VOCABULARY,
        "test_pretokenized_inputs": "Chinese words are joined without spaces",
    },
    "Processor": {
        "test_call_arguments_default_none": "the defaults of padding and tensors stand in the signature",
        "test_call_arguments_not_in_processor_kwargs": "the arguments of the text stand in the signature",
        "test_save_load_pretrained_additional_features": FIXED_VOCABULARY,
        "test_subprocessor_defaults_preserved_by_kwargs_0_images": "lengths and padding are arguments of a call only",
    },
    "Images": {
        "test_call_numpy_4_channels": "pictures become RGB, so that a mean of four channels fits none",
        "test_new_models_require_torchvision_backend": "there is one implementation, with PIL",
    },
}
"""Part -> test of transformers that does not apply to M6 -> why."""


def without(part: str) -> Any:
    """Leaves out the tests of a part that do not apply; each of them exists."""

    def decorate(cls: type) -> type:
        for name, reason in NOT_APPLICABLE[part].items():
            assert callable(getattr(cls, name)), name
            setattr(cls, name, unittest.skip(reason)(lambda self: None))
        return cls

    return decorate


SIZES: dict[str, Any] = {
    "text_vocab_size": 83, "image_vocab_size": 8, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4,
    "ffn_hidden_size": 40, "max_position_embeddings": 64, "image_size": 16, "patch_size": 8,
}  # fmt: skip


class Tester:
    """What the common tests ask of a model's tests."""

    batch_size, seq_length, num_hidden_layers, hidden_size, num_attention_heads = 3, 11, 2, 32, 4
    is_training, vocab_size = True, 107

    def __init__(self, with_pictures: bool, moe: dict[str, Any] | None) -> None:
        self.with_pictures, self.moe = with_pictures, moe

    def get_config(self) -> M6Config:
        return M6Config(**SIZES, moe=self.moe)

    def prepare_config_and_inputs_for_common(self) -> tuple[M6Config, dict[str, Any]]:
        config, ids = self.get_config(), torch.randint(0, 83, (self.batch_size, self.seq_length))
        ids[:, 6] = config.bos_token_id
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.with_pictures:
            ids[:, : config.num_patches] = config.image_token_id
            inputs["pixel_values"] = torch.rand(self.batch_size, 3, 16, 16) * 2 - 1
        return config, inputs


@without("Models")
class Models(models.ModelTesterMixin, models.GenerationTesterMixin):
    """The base of the tests of a model; its own class attributes say which one."""

    all_model_classes = (M6Model, M6ForConditionalGeneration)
    test_resize_embeddings = has_attentions = False
    with_pictures, moe = False, None

    def setUp(self) -> None:
        torch.manual_seed(0)
        self.model_tester = Tester(self.with_pictures, self.moe)
        self.config_tester = configurations.ConfigTester(self, config_class=M6Config, **SIZES)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def _prepare_for_class(
        self, inputs_dict: dict[str, Any], model_class: type, return_labels: bool = False
    ) -> dict[str, Any]:
        inputs = copy.deepcopy(inputs_dict)
        if return_labels and model_class is M6ForConditionalGeneration:
            inputs["labels"] = inputs["input_ids"].clone()
        return inputs


class TestModelOfText(Models, unittest.TestCase):
    """Without pictures and experts."""


class TestModelOfPictures(Models, unittest.TestCase):
    """Dense, with pictures."""

    with_pictures = True


@without("ModelWithExperts")
class TestModelWithExperts(Models, unittest.TestCase):
    """With pictures, and experts of which some get no token."""

    with_pictures, moe = True, {"num_experts": 4, "num_prototypes": 2}
    test_all_params_have_gradient = False


def tokenizer_folder() -> Path:
    return build_tiny_tokenizer(Path(tempfile.mkdtemp()) / "tokenizer")


@without("Tokenizer")
class TestTokenizer(tokenizers.TokenizerTesterMixin, unittest.TestCase):
    """The text tokenizer."""

    tokenizer_class, test_seq2seq = M6Tokenizer, False

    @classmethod
    def setUpClass(cls) -> None:
        cls.from_pretrained_id = str(tokenizer_folder())
        super().setUpClass()


@without("Processor")
class TestProcessor(processors.ProcessorTesterMixin, unittest.TestCase):
    """Tokenizer and image processor together."""

    processor_class = M6Processor

    @classmethod
    def _setup_tokenizer(cls) -> M6Tokenizer:
        return load_text_tokenizer(tokenizer_folder())

    @classmethod
    def _setup_image_processor(cls) -> M6ImageProcessor:
        return M6ImageProcessor(size={"height": 16, "width": 16})

    @staticmethod
    def prepare_processor_dict() -> dict[str, int]:
        return {"num_patches": 4}


class ImageTester(images.ImageProcessingTester):
    """What the common tests ask of an image processor's tests."""

    def _get_image_processing_classes(self) -> dict[str, type]:
        return {"pil": M6ImageProcessor}

    def prepare_image_processor_dict(self) -> dict[str, Any]:
        return {"size": {"height": 16, "width": 16}}

    def expected_output_image_shape(self, _: Any) -> tuple[int, int, int]:
        return 3, 16, 16


@without("Images")
class TestImages(images.ImageProcessingTestMixin, unittest.TestCase):
    """The image processor."""

    image_processor_tester_class = ImageTester
