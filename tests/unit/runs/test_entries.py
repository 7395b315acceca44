"""Lines of metrics as the training writes them are no damage."""

import pytest

from m6.runs.directory import check_entry


def test_bytes_of_an_exchange_are_by_link():
    sent = {"within_nodes": 86400, "between_nodes": 0}
    assert (
        check_entry({"step": 1, "experts": {"load_cv": [0.5, None], "sent_bytes": sent}})["experts"]["sent_bytes"]
        == sent
    )
    for damaged in ([1, 2], {"within_nodes": "many"}, 7):
        with pytest.raises(ValueError, match="sent_bytes"):
            check_entry({"step": 1, "experts": {"sent_bytes": damaged}})
