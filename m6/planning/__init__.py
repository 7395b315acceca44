"""Which layout a run should use on a cluster, whether it fits, and how long a step takes.

The folders depend on each other in one direction: ``machine`` <- ``cost`` <- ``search`` <- the modules of this folder.
"""
