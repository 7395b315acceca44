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


def test_shapes_of_states():
    matrices, vectors = (3, 4, 5), (3, 4)
    assert OptimizerSettings("adamw").states(matrices) == {"exp_avg": matrices, "exp_avg_sq": matrices}
    assert OptimizerSettings("sgd", momentum=0.9).states(vectors) == {"momentum_buffer": vectors}
    assert OptimizerSettings("sgd", momentum=0.0).states(vectors) == {}
    assert OptimizerSettings("adafactor").states(matrices) == {"row_var": (3, 4, 1), "col_var": (3, 1, 5)}
    assert OptimizerSettings("adafactor").states(vectors) == {"row_var": (3, 1), "col_var": (3, 4)}
    muon = OptimizerSettings("muon", momentum=0.9)
    assert muon.states(matrices) == {"momentum_buffer": matrices}
    assert muon.states(vectors) == {"exp_avg": vectors, "exp_avg_sq": vectors}
    assert muon.state_shape("exp_avg", matrices) == (3, 0)
