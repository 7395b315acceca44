"""The planner: the best layout of a run on a cluster, its memory, and the time of a step.

Imports go in one direction: ``machine`` <- ``cost`` <- ``search`` <- the modules of this folder.
"""
