"""What a run reports: losses, speed, experts, samples, non-finite steps."""
