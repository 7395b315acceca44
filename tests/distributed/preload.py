"""What the server that forks ranks imports once for all of them."""

import gc
import importlib
from pathlib import Path

from PIL import Image

MODULES = (
    # DeepSpeed imports its experts and its Muon, and with it PyTorch's compiler, for every engine.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "m6.planning.prediction",
    "m6.training.loop",
    "moe.expert_parallel",
    # The functions that ranks call, and pytest with them: half of what it takes to start a rank.
    *(f"tests.distributed.{path.stem}" for path in Path(__file__).parent.glob("test_*.py")),
)
for name in MODULES:
    importlib.import_module(name)
Image.preinit()  # the formats of pictures

# A full collection in a rank would visit the half a million objects of these modules, and copy the pages that it shares
# with the server: half of the time that a rank needs for a few steps.
gc.collect()
gc.freeze()
