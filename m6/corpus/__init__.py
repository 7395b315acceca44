"""The corpus pipeline: tasks clean, filter, deduplicate and decontaminate many inputs in parallel."""
