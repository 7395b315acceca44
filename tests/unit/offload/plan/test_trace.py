"""What a trace tells about its uses, by hand."""

from offload.plan.trace import Interval, Moment, Trace

FORWARD = (Moment(0, nonmodel_bytes=10), Moment(1, pinned=(0,), nonmodel_bytes=20))
BACKWARD = (Moment(1, True, (), 30), Moment(0, True, (), 40))
STEP = Trace(FORWARD + BACKWARD, outside_bytes=5)


def test_intervals_lie_between_two_uses() -> None:
    assert list(STEP.intervals()) == [Interval(1, 1, 2, forced=True), Interval(0, 0, 3, forced=False)]
    pinned = Trace((Moment(0), Moment(1, pinned=(0,)), Moment(0)))
    assert list(pinned.intervals()) == [Interval(0, 0, 2, forced=True)]


def test_micro_batches_that_are_alike() -> None:
    assert STEP.repeat_last(4, 2).moments == (FORWARD + BACKWARD) * 3
    assert STEP.repeat_last(3, 1).moments == FORWARD + BACKWARD + FORWARD[1:] + BACKWARD
    assert STEP.repeat_last(4, 0) == STEP
    assert STEP.repeat_last(1, 2).gradients_per_chunk() == {0: 3, 1: 1}
    assert Trace(FORWARD).gradients_per_chunk() == {}


def test_the_larger_nonmodel_bytes_of_two_traces() -> None:
    other = Trace((Moment(0, nonmodel_bytes=11), Moment(1), Moment(1, True, (), 31), Moment(0, True)), outside_bytes=4)
    merged = STEP.with_nonmodel_bytes_of(other)
    assert [moment.nonmodel_bytes for moment in merged.moments] == [11, 20, 31, 40]
    assert merged.outside_bytes == 5
    assert [moment.pinned for moment in merged.moments] == [(), (0,), (), ()]
    assert STEP.with_nonmodel_bytes_of(Trace(FORWARD, 9)) is STEP
