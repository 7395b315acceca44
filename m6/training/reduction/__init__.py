"""Sums of gradients over ranks with fewer bytes than an all-reduce (``m6.communication``)."""
