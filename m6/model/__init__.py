"""The M6 model and its registration with transformers' ``Auto`` classes."""

from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from m6.model.configuration import M6Config
from m6.model.counting import num_parameters
from m6.model.initialization import initialize_parameters
from m6.model.modeling import M6ForConditionalGeneration, M6Model
from m6.model.outputs import M6ModelOutput, M6Output

AutoConfig.register("m6", M6Config)
AutoModel.register(M6Config, M6Model)
AutoModelForImageTextToText.register(M6Config, M6ForConditionalGeneration)

__all__ = [
    "M6Config",
    "M6ForConditionalGeneration",
    "M6Model",
    "M6ModelOutput",
    "M6Output",
    "initialize_parameters",
    "num_parameters",
]
