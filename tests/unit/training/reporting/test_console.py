"""What a run says of itself without a terminal."""

from collections.abc import Callable

import pytest

from m6.training.loop import Trainer
from m6.training.reporting.console import Console

ENTRY = {
    "step": 2,
    "loss": 3.14159,
    "objectives": {"text_denoising": 3.5, "image_captioning": 2.0},
    "tokens_per_second": 12345.6,
    "step_time_s": 100.0,
}


def test_a_line_of_training_has_the_time_that_is_left(capsys: pytest.CaptureFixture[str]):
    with Console("run", 3000, 998, enabled=True) as console:
        for _ in range(2):
            console.advance()
        console.show(ENTRY)
        by_source = {"text_denoising": {"news": 3.0, "poems": 3.5}}
        console.show({"step": 2, "validation": {"text_denoising": 3.25}, "validation_by_source": by_source})
        console.saved(1000, 0.25)
        console.show({**ENTRY, "loss": None, "objectives": {}})
        experts = {"experts_per_token": 1.25, "tokens_without_expert": 0.7791, "gate_sum": 0.01}
        console.show({**ENTRY, "objectives": {}, **experts, "dropped_fraction": 0.98})
        console.show({**ENTRY, "objectives": {}, **experts, "dropped_fraction": 0.0})
    lines = [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "step 1,000 of 3,000: loss 3.142 (text_denoising 3.500, image_captioning 2.000), 12,346 tokens/s, "
        "2 d 7:33:20 left",
        "step 1,000: validation text_denoising 3.250 (news 3.000, poems 3.500)",
        "step 1,000: saves a checkpoint; training waited for 0.2 s",
        "step 1,000 of 3,000: loss none (), 12,346 tokens/s, 2 d 7:33:20 left",
        "step 1,000 of 3,000: loss 3.142 (), 12,346 tokens/s, 1.250 experts a token, 77.9% of tokens without one, "
        "2 d 7:33:20 left",
        "step 1,000 of 3,000: loss 3.142 (), 12,346 tokens/s, 2 d 7:33:20 left",
    ]


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]):
    with Console("run", 10, 0, enabled=False) as console:
        console.advance()
        console.show(ENTRY)
        console.saved(1, 0.0)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_with_the_same_facts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Console("run", 10, 0, enabled=True) as console:
        console.show(ENTRY)
        console.show({"step": 2, "validation": {"text_denoising": 3.25}})
        console.advance()
        console._bar.refresh()
    text = capsys.readouterr().err
    assert "12,346 tokens/s; validation text_denoising 3.250" in text
    assert "\n20" not in text


def test_a_run_says_what_it_does(make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]):
    make_trainer().train()
    lines = capsys.readouterr().err.splitlines()
    for expected in ("step 1 of 4: loss ", "step 4: validation ", "step 2: saves a checkpoint"):
        assert sum(expected in line for line in lines) == 1, expected
