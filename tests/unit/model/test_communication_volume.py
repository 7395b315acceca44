"""Closed forms of what ranks receive for divided matrices, against numbers worked out by hand and published ratios."""

import pytest

from m6.architecture.communication_volume import (
    nearest_num_ranks,
    side,
    volume_of_attention,
    volume_of_expert,
    volume_of_feed_forward,
    volume_of_pair,
)


def test_shapes_worked_out_by_hand():
    """T 64, h 32, f 128: T h = 2048, T f = 8192, h f = 4096."""
    assert volume_of_pair("1d", 8, 64, 32, 128) == 4 * 7 / 8 * 2048
    assert volume_of_pair("2d", 4, 64, 32, 128) == 3 * (2048 + 8192 + 2 * 4096) / 4
    # 4 (q - 1) (Th + hf + Tf) / q^3 = 7168, and 2304 to gather inputs and matrices again.
    assert volume_of_pair("3d", 8, 64, 32, 128) == 7168 + 2304
    assert volume_of_feed_forward("1d", 8, 64, 32, 128) == volume_of_pair("1d", 8, 64, 32, 128)
    assert volume_of_feed_forward("3d", 8, 64, 32, 128) == 7168 + 2304 + 2 * 7 / 8 * (2048 + 128 + 32)
    assert volume_of_attention(8, 64, 32) == 7168
    assert volume_of_expert(8, 64, 32) == 7168 / 8


@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(4096, 1024, 4096), (4096, 4096, 16384), (4096, 12288, 49152)])
def test_the_cube_wins_with_many_ranks(tokens: int, hidden: int, inner: int):
    def ratio(ranks: int) -> float:
        one, cube = (volume_of_pair(name, ranks, tokens, hidden, inner) for name in ("1d", "3d"))
        return one / cube

    assert ratio(8) < ratio(64) < ratio(512)
    assert ratio(512) > 2


def test_grids():
    assert [side("2d", ranks) for ranks in (4, 9, 8)] == [2, 3, None]
    assert [side("3d", ranks) for ranks in (8, 27, 4)] == [2, 3, None]
    assert side("1d", 6) == 6
    assert nearest_num_ranks("2d", 6) == 4
    assert nearest_num_ranks("3d", 20) == 27
    assert nearest_num_ranks("3d", 2) == 8
