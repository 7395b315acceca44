"""Which chunks lie where: the linear programme, its trace, and predicted times."""
