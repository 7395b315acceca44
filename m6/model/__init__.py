"""The M6 model and its registration with transformers' ``Auto`` classes."""

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoProcessor,
    AutoTokenizer,
)

from m6.architecture.configuration import M6Config
from m6.model.initialization import initialize_parameters
from m6.model.modeling import M6ForConditionalGeneration, M6Model
from m6.model.outputs import M6ModelOutput, M6Output
from m6.model.parameters import num_parameters
from m6.tokenizers import M6ImageProcessor, M6Processor, M6Tokenizer

# Lets the ``from_pretrained`` of the Auto classes load exports of ``m6 export``.
AutoConfig.register("m6", M6Config)
AutoModel.register(M6Config, M6Model)
AutoModelForCausalLM.register(M6Config, M6ForConditionalGeneration)
AutoModelForImageTextToText.register(M6Config, M6ForConditionalGeneration)
AutoModelForMultimodalLM.register(M6Config, M6ForConditionalGeneration)
AutoTokenizer.register(M6Config, tokenizer_class=M6Tokenizer)
AutoImageProcessor.register(M6Config, image_processor_classes={"pil": M6ImageProcessor})
AutoProcessor.register(M6Config, M6Processor)

__all__ = [
    "M6Config",
    "M6ForConditionalGeneration",
    "M6Model",
    "M6ModelOutput",
    "M6Output",
    "initialize_parameters",
    "num_parameters",
]
