"""Where computing happens: CUDA, or a simulated device with a budget."""
