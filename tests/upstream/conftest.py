"""The markers of transformers' tests."""

import pytest

MARKERS = (
    "accelerate_tests", "all_flash_attn_test", "bitsandbytes", "flash_attn_test", "flash_attn_3_test",
    "flash_attn_4_test", "generate", "is_agent_test", "is_expert_parallel_test", "is_fsdp_test", "is_pipeline_test",
    "is_staging_test", "is_tensor_parallel_test", "is_training_test", "torch_compile_test", "torch_export_test",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    for name in MARKERS:
        config.addinivalue_line("markers", f"{name}: of transformers")
