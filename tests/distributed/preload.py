"""What the server that forks ranks imports once for all of them."""

import gc

# DeepSpeed imports its Muon, and with it PyTorch's compiler, for every engine with ZeRO.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

import m6.training.loop  # noqa: F401

# A full collection in a rank would visit the half a million objects of these modules, and copy the pages that it shares
# with the server: half of the time that a rank needs for a few steps.
gc.collect()
gc.freeze()
