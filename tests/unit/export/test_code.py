"""The modelling code of an export: which modules it has, and that transformers loads it where this project is not."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from m6.export import code as modelling_code
from m6.export import export_hf
from m6.export.code import AUTO_MAP, CLASSES, ENTRY, PACKAGES, joined_code
from m6.model import M6ForConditionalGeneration
from m6.tokenizers import M6Processor
from tests.fixtures.fabricated_run import run_document, write_run
from tests.fixtures.tiny_data import build_tiny_tokenizer

TEXT = "今天早上，小明在公园里"
# What a user needs; torch and the standard library are there.
REQUIRED = {"numpy", "PIL", "sentencepiece", "torch", "transformers"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    document = run_document(folder / "data", build_tiny_tokenizer(folder / "tokenizer"))
    write_run(folder / "run", document)
    export_hf(folder / "run", folder / "hf")
    return folder / "hf"


def elsewhere(code: str, exported: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in another folder, in a process that cannot import this project or DeepSpeed."""
    blocked = (*PACKAGES, "offload", "deepspeed")
    program = f"import sys\nfor name in {blocked}: sys.modules[name] = None\nfolder = {str(exported)!r}\n{code}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-I", "-c", program],
        cwd=folder,
        env={**environment, "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_what_the_own_classes_save_names_no_code(exported, tmp_path):
    """They save no code: a name of it would make a folder that nobody can load."""
    M6ForConditionalGeneration.from_pretrained(exported).save_pretrained(tmp_path)
    M6Processor.from_pretrained(exported).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    for file in tmp_path.glob("*.json"):
        assert "auto_map" not in file.read_text(), file
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(model) is M6ForConditionalGeneration


@pytest.mark.slow
def test_the_auto_classes_load_it_where_this_project_is_not(exported, tmp_path):
    code = f"""
import torch
from PIL import Image
from safetensors.torch import save_file
import transformers
from transformers import AutoModelForImageTextToText
loaded = {{
    name: getattr(transformers, name).from_pretrained(folder, trust_remote_code=True) for name in {sorted(AUTO_MAP)}
}}
print(sorted((name, type(each).__name__) for name, each in loaded.items()))
model = loaded["AutoModelForImageTextToText"].eval()
processor = loaded["AutoProcessor"]
assert type(model.config) is type(loaded["AutoConfig"])
assert type(processor.tokenizer) is type(loaded["AutoTokenizer"])
prompt = processor(text=[{TEXT!r}], images=[Image.new("RGB", (50, 40), "red")])
with torch.no_grad():
    save_file({{"logits": model(**prompt).logits}}, "logits.safetensors")
model.save_pretrained("again"); processor.save_pretrained("again")
again = AutoModelForImageTextToText.from_pretrained("again", trust_remote_code=True)
assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
"""
    ended = elsewhere(code, exported, tmp_path)
    assert ended.returncode == 0, ended.stderr
    loaded = {name: reference[0] if isinstance(reference, list) else reference for name, reference in AUTO_MAP.items()}
    assert ast.literal_eval(ended.stdout) == [(name, each.partition(".")[2]) for name, each in sorted(loaded.items())]

    from PIL import Image

    here = AutoModelForImageTextToText.from_pretrained(exported).eval()
    assert isinstance(here, M6ForConditionalGeneration)
    prompt = AutoProcessor.from_pretrained(exported)(text=[TEXT], images=[Image.new("RGB", (50, 40), "red")])
    with torch.no_grad():
        expected = here(**prompt).logits
    found = load_file(tmp_path / "logits.safetensors")["logits"]
    # Here a compiled kernel may compute the experts' products, in another order of summation.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_copies_of_the_code_work_in_one_process(exported, tmp_path):
    """Each registers operators of PyTorch; two of one name would break the first."""
    code = """
import shutil, torch
from transformers import AutoModelForImageTextToText
shutil.copytree(folder, "other")
load = lambda folder: AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
models = [load(folder), load("other")]
assert type(models[0]) is not type(models[1])
ids = torch.tensor([[1, 2, models[0].config.bos_token_id, 3]])
losses = [model.train()(ids, labels=ids).loss for model in models]
for loss in losses: loss.backward()
assert torch.equal(losses[0], losses[1])
first, second = ([each.grad for each in model.parameters() if each.grad is not None] for model in models)
assert first and all(torch.equal(*pair) for pair in zip(first, second, strict=True))
"""
    ended = elsewhere(code, exported, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_without_trust_the_code_is_not_run(exported, tmp_path):
    code = "from transformers import AutoConfig\nAutoConfig.from_pretrained(folder, trust_remote_code=False)"
    ended = elsewhere(code, exported, tmp_path)
    assert ended.returncode != 0
    assert "trust_remote_code" in ended.stderr


def test_the_file_needs_only_what_is_said(exported):
    (file,) = exported.glob("*.py")
    assert file.stem == ENTRY
    assert not get_relative_imports(file)
    assert set(get_imports(file)) - set(sys.stdlib_module_names) <= REQUIRED
    defined = {node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)}
    assert CLASSES.keys() <= defined


@pytest.mark.slow
def test_what_a_loaded_model_saves_loads_as_the_export_does(exported, tmp_path):
    """Each Auto class in a process of its own, from a folder that another Auto class saved."""
    load = "transformers.{}.from_pretrained({!r}, trust_remote_code=True)"
    again = str(tmp_path / "again")
    others = "; ".join(load.format(name, str(exported)) for name in ("AutoModel", "AutoModelForCausalLM"))
    saving = "; ".join(
        f"{load.format(name, str(exported))}.save_pretrained({again!r})"
        for name in ("AutoModelForImageTextToText", "AutoProcessor")
    )
    ended = elsewhere(f"import transformers; {others}; {saving}; {others}", exported, tmp_path)
    assert ended.returncode == 0, ended.stderr
    written = sorted(path.name for path in Path(again).glob("*.py"))
    assert written == [f"{ENTRY}.py"]
    loading = "\n".join(f"print(type({load.format(name, again)}).__name__)" for name in sorted(AUTO_MAP))
    ended = elsewhere(f"import transformers\n{loading}", exported, tmp_path)
    assert ended.returncode == 0, ended.stderr
    classes = [each[0] if isinstance(each, list) else each for _, each in sorted(AUTO_MAP.items())]
    assert ended.stdout.split() == [each.partition(".")[2] for each in classes]
    for task in ("image-text-to-text", "text-generation", "any-to-any"):
        code = f"import transformers; transformers.pipeline({task!r}, {again!r}, trust_remote_code=True)"
        assert (ended := elsewhere(code, exported, tmp_path)).returncode == 0, ended.stderr


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> str:
    """The joined code of modules with these sources."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(modelling_code, "PACKAGES", tuple(sources))
    monkeypatch.setattr(modelling_code, "CLASSES", {"A": next(iter(sources))})
    monkeypatch.setattr(modelling_code, "AUTO_MAP", {})
    return joined_code()


def test_modules_are_joined(monkeypatch, tmp_path):
    code = written(
        tmp_path,
        monkeypatch,
        a='''"""Says from b import f."""
from __future__ import annotations
from math import (
    pi,  # a comment
    sin as sine,
)
from b import (
    B,
)
class A(B):
    def late(self) -> C:
        from c import C
        return C(pi)
''',
        b="from math import sin as sine, tau\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from c import C\nclass B: pass\n",
        c="class C(float): pass\n",
    )
    assert [line for line in code.splitlines() if "from" in line and "#" not in line] == [
        "from __future__ import annotations",
        "from math import pi",
        "from math import sin as sine",
        "from math import tau",
        "from typing import TYPE_CHECKING",
    ]
    assert "# Says from b import f." in code
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["A"]().late() == names["pi"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("import b\n", "line 1: import b; expected from MODULE import NAME"),
        ("from b import X as Y\n", "expected from MODULE import NAME"),
        ("from . import b\n", "expected from MODULE import NAME"),
        ("from b import X\n_HELP = 1\n", "_HELP is b._HELP and a._HELP: one file can have only one of them"),
        ("from b import X\nfrom cmath import pi\n", "pi is from math import pi and from cmath import pi"),
    ],
)
def test_what_cannot_be_joined_is_refused(other, message, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        written(tmp_path, monkeypatch, a=other, b="from math import pi\nX = _HELP = 2\n")


def test_without_the_source_there_is_no_kernel(monkeypatch, tmp_path):
    from moe.kernels import compiled

    monkeypatch.setattr(compiled, "EXPERT_PRODUCTS", tmp_path / "missing.cpp")
    monkeypatch.setattr(compiled, "load_library", lambda *_: pytest.fail("nothing is built"))
    assert compiled.load_kernel.__wrapped__() is None
