"""Measured tables, and mistakes in a profile."""

from pathlib import Path

import pytest

from m6.errors import UserError
from m6.planning.machine.profile import MatmulPoint, Profile, load_profile


def test_measured_products_are_met_and_interpolated():
    points = [MatmulPoint(m=s, n=s, k=s, dtype="bf16", flops=f) for s, f in ((64, 1e12), (4096, 1e14))]
    profile = Profile(matmul=points)
    assert profile.measured_flops(64, 64, 64, "bf16") == pytest.approx(1e12, rel=1e-3)
    assert 1e12 < (profile.measured_flops(512, 512, 512, "bf16") or 0) < 1e14
    assert profile.measured_flops(64, 64, 64, "fp32") is None


def test_mistakes_in_a_profile(tmp_path: Path):
    (tmp_path / "profile.json").write_text('{"kernels": 1}')
    with pytest.raises(UserError, match=r"profile.json: kernels: unknown key"):
        load_profile(tmp_path / "profile.json")
    with pytest.raises(UserError, match=r"no such file; `m6 plan calibrate"):
        load_profile(tmp_path / "none.json")


def test_the_bounds_of_what_is_to_be_expected():
    fastest, slowest = Profile().bounds()
    for name in ("matmul_efficiency", "bandwidth_efficiency", "link_efficiency"):
        assert getattr(fastest, name) > getattr(Profile(), name) > getattr(slowest, name)
    fitted = Profile(calibrated=True, factors={"matmul": 2.0})
    assert [bound.factor("matmul") for bound in fitted.bounds()] == pytest.approx([1.6, 2.4])
    assert [bound.factor("host") for bound in fitted.bounds()] == pytest.approx([0.8, 1.2])
