"""The shapes of micro-batches."""

from m6.config.run import parse_config
from m6.runs.data import open_data
from m6.training.sizes import BatchShape
from tests.fixtures.tiny_run import tiny_document


def test_a_batch_shape_holds_every_batch(tmp_path):
    data = open_data(parse_config(tiny_document(tmp_path)))
    batches = [data.micro_batch(index) for index in range(4)]
    shape = BatchShape.of(*batches)
    assert shape.real == max(batch.num_tokens for batch in batches)
    assert shape.targets == max(int((batch.labels != -100).sum()) for batch in batches)
    assert (shape.rows, shape.sequence_length) == (max(len(batch.input_ids) for batch in batches), 64)
    assert shape.pictures == max(len(batch.pixel_values) for batch in batches)
