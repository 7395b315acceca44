"""The modelling code of an export: which modules it has, and that transformers loads it where this project is not."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from m6.export import export_hf
from m6.export.folder import AUTO_MAP, ENTRY, PACKAGES, flat_modules, rewrite_imports, write_code
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


def test_every_file_is_there_and_needs_only_what_is_said(tmp_path):
    write_code(tmp_path)
    files = {file.stem: file for file in tmp_path.glob("*.py")}
    assert files.keys() == flat_modules().keys() >= {ENTRY, "m6_model_modeling", "moe_layer"}
    for file in files.values():
        compile(file.read_text(encoding="utf-8"), str(file), "exec")
        assert set(get_relative_imports(file)) <= files.keys(), file
        assert set(get_imports(file)) - set(sys.stdlib_module_names) <= REQUIRED, file
    reached, waiting = set(), {ENTRY}
    while waiting:
        reached |= waiting
        waiting = {name for each in waiting for name in get_relative_imports(files[each])} - reached
    assert reached == files.keys()


def test_the_maps_name_classes_of_the_entry(exported):
    names = {node.name for node in ast.walk(ast.parse(flat_modules()[ENTRY])) if isinstance(node, ast.alias)}
    for file, section in (("config.json", None), ("processor_config.json", "image_processor")):
        document = json.loads((exported / file).read_text(encoding="utf-8"))
        auto_map = (document if section is None else document[section])["auto_map"]
        references = [each[0] if isinstance(each, list) else each for each in auto_map.values()]
        assert {reference.split(".")[1] for reference in references} <= names


def test_imports_are_rewritten():
    source = '''"""from m6.files import sync"""
from m6.files import (
    sync,  # a comment
    write_json as write,
)
import torch
from moe import MoEConfig, MoELayer

def f():
    from native import load_library
    return 1
'''
    text, needed = rewrite_imports(source)
    assert (
        text
        == '''"""from m6.files import sync"""
from .m6_files import sync, write_json as write
import torch
from .moe_config import MoEConfig
from .moe_layer import MoELayer

def f():
    from .native_build import load_library
    return 1
'''
    )
    assert needed == {"m6.files", "moe.config", "moe.layer", "native.build"}


@pytest.mark.parametrize("line", ["import m6.files", "from . import files", "from m6 import files", "import moe as m"])
def test_other_forms_of_imports_are_refused(line):
    with pytest.raises(ValueError, match="import"):
        rewrite_imports(line + "\n")


def test_without_the_source_there_is_no_kernel(monkeypatch, tmp_path):
    from moe.kernels import compiled

    monkeypatch.setattr(compiled, "SOURCE", tmp_path / "missing.cpp")
    monkeypatch.setattr(compiled, "load_library", lambda *_: pytest.fail("nothing is built"))
    assert compiled.load_kernel.__wrapped__() is None
