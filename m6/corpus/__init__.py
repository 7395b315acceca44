"""The corpus pipeline: many inputs are cleaned, filtered, deduplicated and decontaminated by many tasks."""
