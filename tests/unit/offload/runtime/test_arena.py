"""Which slab a piece comes from, and when slabs are freed."""

from offload.runtime.activations import Arena


class Block:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.freed = num_bytes, 0

    def view(self, *arguments: object) -> None: ...

    def free(self) -> None:
        self.freed += 1


def test_pieces_fill_slabs_and_slabs_are_reused() -> None:
    arena = Arena(Block, slab_bytes=2048)
    (first, at_0), (again, at_512) = arena.take(1), arena.take(600)  # whole units of 512 bytes
    assert (at_0, at_512) == (0, 512)
    assert first is again
    second, at_0 = arena.take(513)  # 512 bytes are left
    assert at_0 == 0
    assert second is not first
    assert arena.take(512) == (first, 1536), "the first slab with room"
    large, _ = arena.take(5000)
    assert large.block.num_bytes == 5120
    assert arena.num_bytes == 2048 + 2048 + 5120
    arena.give(second)
    assert arena.take(2048) == (second, 0), "empty again"
    assert arena.num_bytes == 2048 + 2048 + 5120
    arena.give(large)
    arena.close()
    assert [slab.block.freed for slab in (first, second, large)] == [0, 0, 1]
    for _ in range(3):
        assert first.block.freed == 0
        arena.give(first)
    arena.give(second)
    assert [slab.block.freed for slab in (first, second, large)] == [1, 1, 1]
