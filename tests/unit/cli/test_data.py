import typer
from typer.testing import CliRunner

from m6.cli.data import tokenizer
from m6.tokenizers import load_text_tokenizer
from tests.fixtures.tiny_data import build_tiny_data


def test_the_command_trains_a_tokenizer(tmp_path):
    app = typer.Typer()
    app.command()(tokenizer)
    data, out = build_tiny_data(tmp_path / "data"), tmp_path / "tokenizer"
    arguments = [str(data), "--out", str(out), "--vocab-size", "380", "--image-vocab-size", "8"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "380 text pieces" in result.output
    assert load_text_tokenizer(out).vocab_size == 380 + 16 + 8
