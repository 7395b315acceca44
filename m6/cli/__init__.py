"""The commands of ``m6``, one file for each group."""
