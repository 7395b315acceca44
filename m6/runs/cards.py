"""Whether a build of PyTorch has kernels for a card. Only the standard library is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TURING = (7, 5)
_FOR_OLDER_CARDS = (
    "the CUDA 12.6 build has some: install torch==VERSION+cu126 from PyTorch's own index of wheels, whose address ends "
    "in whl/cu126 (TORCH_INDEX_URL of scripts/environment.sh and of the containers)"
)


def lacking_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> str:
    """The message for a build without kernels for a card; empty if it has some, or if its kernels are unknown.

    From PyTorch 2.11 on, the default build, of CUDA 13, begins with Turing. Volta (V100) is in the build of CUDA 12.6.

    Args:
        capability: compute capability of the card, such as (7, 0).
        architectures: of the build, by ``torch.cuda.get_arch_list``, such as ``sm_80`` and ``compute_120``.
    """
    if not architectures or any(_runs(architecture, capability) for architecture in architectures):
        return ""
    remedy = _FOR_OLDER_CARDS if capability < _TURING else "a newer build of PyTorch may have some"
    known = ", ".join(architectures)
    return f"sm_{capability[0]}{capability[1]}: this PyTorch has kernels for {known} alone; {remedy}"


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether kernels run on a card: binaries on their own generation, from their minor on; PTX on all later."""
    found = re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])([af]?)", architecture)
    if found is None:
        return False
    built = (int(found[2]), int(found[3]))
    if found[4] == "a":  # of one architecture alone
        return built == capability
    return built <= capability and (found[1] == "compute" or built[0] == capability[0])
