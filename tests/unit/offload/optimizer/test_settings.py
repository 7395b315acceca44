"""What the optimizer's settings refuse."""

import pytest

from offload import OptimizerSettings


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"kind": "adam"}, "kind"),
        ({"beta1": 1.0}, "beta1"),
        ({"momentum": -0.1}, "momentum"),
        ({"epsilon": -1}, "epsilon"),
    ],
)
def test_errors_begin_with_the_field(values, field):
    with pytest.raises(ValueError, match=f"^{field} is "):
        OptimizerSettings(**values)
