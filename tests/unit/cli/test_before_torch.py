"""A person who asks for help, or whose JSON has a wrong value, does not wait for torch: nothing heavy is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from m6.config.sections import M6Settings
from m6.data.workers import usable_cores
from m6.shipped import shipped_file
from tests.fixtures.tiny_run import write_tiny_config

ROOT = Path(__file__).resolve().parents[3]
SMOKE = Path("m6_smoke")
# Not an ImportError, which a package may catch.
REFUSE_HEAVY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "deepspeed"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
"""
MAIN = "from m6.cli.main import main\nmain()"
# One process imports the command line once, and each case continues in a copy of it, as if it had begun there.
SERVER = f"""{REFUSE_HEAVY}
import json, os
import m6.cli.main, m6.config.checks, m6.config.run

for line in sys.stdin:
    folder, code, arguments = json.loads(line)
    if (process := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in (1, "stdout"), (2, "stderr"):
    os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
os.chdir(folder)
sys.argv[1:] = arguments
exec(code, {{"sys": sys}})
"""
WithoutTorch = Callable[..., tuple[int, str, str]]
LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"}


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        yield process
        process.communicate()


@pytest.fixture
def without_torch(server: subprocess.Popen[str], tmp_path: Path) -> WithoutTorch:
    """Gives the exit code, stdout and stderr of Python code in a process that cannot import torch."""

    def run(code: str, *arguments: object) -> tuple[int, str, str]:
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps([str(tmp_path), code, [*map(str, arguments)]]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return status, *((tmp_path / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))

    return run


@pytest.mark.parametrize("code", ["import torch", "import m6.model", "from moe import MoELayer"])
def test_this_process_would_notice(without_torch: WithoutTorch, code: str):
    status, _, stderr = without_torch(code)
    assert status == 1
    assert "is imported" in stderr


@pytest.mark.parametrize(
    "module",
    [
        "m6.config.run",
        "m6.config.checks",
        "m6.config.image_tokenizer",
        "m6.checkpoints.finetuning",
        "m6.runs.directory",
        "m6.runs.environment",
        "m6.slurm.submission",
        "moe",
        "moe.config",
        "moe.exchange_steps",
    ],
)
def test_checks_are_imported_without_it(without_torch: WithoutTorch, module: str):
    """In a process that has none of our modules yet."""
    code = "for name in [*sys.modules]:\n    if name.split('.')[0] in ('m6', 'moe'):\n        del sys.modules[name]\n"
    assert without_torch(f"{code}import {module}") == (0, "", "")


def test_a_right_configuration_is_read_without_it(without_torch: WithoutTorch, tmp_path: Path):
    """With ``moe`` and DeepSpeed's sections, whose own classes need torch."""
    config = write_tiny_config(tmp_path, zero_optimization={"stage": 1}, bf16={"enabled": True})
    assert "moe" in json.loads(config.read_text())["m6"]
    code = (
        "from m6.config.checks import check_world_size\nfrom m6.config.run import load_config\nfrom pathlib import Path"
        "\nconfig = load_config(Path(sys.argv[1]))\ncheck_world_size(config, 1)\n"
        "print(config.deepspeed.precision, config.model.moe_config().num_experts > 1)"
    )
    assert without_torch(code, config) == (0, "bf16 True\n", "")


@pytest.mark.parametrize("command", [[], ["pretrain"], ["finetune"], ["submit"], ["plan"], ["data", "build"]])
def test_help(without_torch: WithoutTorch, command: list[str]):
    code, stdout, stderr = without_torch(MAIN, *command, "--help")
    assert (code, stderr) == (0, "")
    assert "Usage" in stdout


# At least one for every section of the JSON.
WRONG = [
    ("optimizer.type=Adam", "optimizer.type: unknown optimizer 'Adam'; did you mean \"AdamW\"?"),
    (
        "zero_optimization.reduce_bucket_sise=1",
        'zero_optimization.reduce_bucket_sise: unknown key; did you mean "reduce_bucket_size"?',
    ),
    (
        'zero_optimization={"stage": 1, "offload_optimizer": {"device": "gpu"}}',
        "zero_optimization.offload_optimizer.device: input should be 'none', 'cpu' or 'nvme', found 'gpu'",
    ),
    ("bf16.enable=true", 'bf16.enable: unknown key; did you mean "enabled"?'),
    ("comms_logger.verbos=true", 'comms_logger.verbos: unknown key; did you mean "verbose"?'),
    ("m6.model.hidden_size=95", "m6.model: hidden_size 95 is not divisible by num_attention_heads 3"),
    ("m6.model.num_heads=4", 'm6.model.num_heads: unknown key; did you mean "num_attention_heads"?'),
    ("m6.moe.num_prototypes=3", "m6.moe.num_experts 8 is not a multiple of num_prototypes 3"),
    (
        "m6.data.sequence_length=1000",
        "m6.data.sequence_length 1000 exceeds m6.model.max_position_embeddings 256",
    ),
    (
        "m6.objectives.text_to_image.weight=1",
        "m6.objectives.text_to_image needs m6.data.image_tokenizer, whose codes it learns to generate",
    ),
    (
        "m6.training.overlap_micro_batches=2",
        "m6.training.ep_size 1 keeps all experts on a rank, so that there is no exchange to overlap, but "
        "m6.training.overlap_micro_batches 2 interleaves several micro-batches; use "
        "m6.training.overlap_micro_batches 1, or use a larger m6.training.ep_size",
    ),
    (
        "m6.schedule.warmup_steps=900",
        "m6.schedule: warmup_steps 900 and a decay of 300 steps, decay_share 0.3, exceed m6.training.total_steps 1000; "
        "set m6.schedule.warmup_steps=0 to 700, or more m6.training.total_steps",
    ),
    (
        "m6.communication.gradients=topk",
        "m6.communication.gradients: input should be 'all_reduce', 'top_k', 'chunks' or 'powersgd', found 'topk'",
    ),
    (
        "m6.parallel.pipeline.num_ranks=5",
        'm6.parallel.pipeline: num_ranks 5 with "schedule": "1f1b" makes 5 stages, but m6.model.num_layers is 3: a '
        "stage would have no layer; use num_ranks 3",
    ),
    ("m6.gradient_delay.steps=3", "m6.gradient_delay.steps: unknown key; valid: accept_loss"),
    (
        "m6.pseudo_to_real.switch_step=999999",
        "m6.pseudo_to_real.switch_step 999999 is not before the end of the run, m6.training.total_steps 1000: no step "
        "would be left for the Real model; set m6.pseudo_to_real.switch_step=1 to 999, or m6.pseudo_to_real=null",
    ),
    (
        'm6.offload={"device_budget_mib": 10, "rules": [{"kind": "ffn", "place": "host"}]}',
        "m6.offload.rules.0: matches nothing: the model has no ffn; it has attention, embedding, expert, norm, router",
    ),
    (
        "m6.lora.rank=4",
        "m6.lora: adapters belong to weights that are trained already; use m6 finetune with --init",
    ),
    ("m6.init=5", "m6.init: input should be a valid string, found 5"),
    ('m6.elastic={"min_nodes": 4, "max_nodes": 2}', "m6.elastic: min_nodes 4 is above max_nodes 2"),
    ("m6.evaluation.num_rows=0", "m6.evaluation.num_rows: input should be greater than 0, found 0"),
    (
        'm6.samples.captions=["x"]',
        "m6.samples: only a model with m6.objectives.text_to_image or image_code_denoising draws pictures; their "
        "weights are 0",
    ),
    ("m6.checkpoint.keep_last=-1", "m6.checkpoint.keep_last: input should be greater than 0, found -1"),
    ("m6.logging.wandb=maybe", "m6.logging.wandb: input should be 'off', 'offline' or 'online', found 'maybe'"),
]


def test_every_section_has_a_case():
    named = {override.partition("=")[0].split(".")[1] for override, _ in WRONG if override.startswith("m6.")}
    assert named == M6Settings.model_fields.keys()


@pytest.mark.parametrize(("override", "message"), WRONG, ids=[override for override, _ in WRONG])
def test_a_wrong_value(without_torch: WithoutTorch, override: str, message: str):
    file = shipped_file(SMOKE, "configuration")
    found = without_torch(MAIN, "pretrain", SMOKE, "--set", override)
    assert found == (2, "", f"error: {file}: {message}\n")


CORES = usable_cores()
MOST_WORKERS = f"{max(16, 4 * CORES)} on {CORES} core{'' if CORES == 1 else 's'}"
NO_MODEL = "no: neither a run nor an exported model (no readable config.json)"
NOT_HERE = {
    "the JSON": (["pretrain", "no.json"], "no.json: no such file"),
    "the data folder": (
        ["pretrain", SMOKE, "--set", "m6.data.path=no"],
        'no/manifest.json does not exist; build a data set with "m6 data build ... --out no"',
    ),
    "the initial model": (["finetune", "text_to_image", "--init", "no"], NO_MODEL),
    "ranks": (
        ["pretrain", SMOKE, "--set", "m6.training.ep_size=2"],
        "m6.training.ep_size 2 does not divide the world size 1; use a divisor of it",
    ),
    "cores": (
        ["pretrain", SMOKE, "--set", "m6.data.num_workers=100000"],
        f"m6.data.num_workers is 100,000; expected at most {MOST_WORKERS}",
    ),
    "cores of an image tokenizer": (
        ["train-image-tokenizer", "pictures_64", "--out", "out", "--set", "data.num_workers=100000"],
        f"data.num_workers is 100,000; expected at most {MOST_WORKERS}",
    ),
    "cores of a corpus": (
        ["data", "corpus", "chinese_text", "--tasks", "100000"],
        f"--tasks is 100,000; expected at most {MOST_WORKERS}",
    ),
    "a layout of an image tokenizer": (
        ["train-image-tokenizer", "no.json", "--out", "out"],
        "no.json: no such file",
    ),
    "the run to evaluate": (["evaluate", "no"], "no/config.json: no such file; is no the folder of a run?"),
    "the run to plot": (["plot", "no"], "no/config.json: no such file; is no the folder of a run?"),
    "the run to export": (["export", "no", "--hf", "hf"], "no/config.json: no such file; is no the folder of a run?"),
    "the run to delink": (
        ["delink", "no", "--out", "real"],
        "no/config.json: no such file; is no the folder of a run?",
    ),
    "a run to compare": (["verify", "no", "not"], "no/config.json: no such file; is no the folder of a run?"),
    "the run of a job": (["status", "no"], "no/config.json: no such file; is no the folder of a run?"),
    "the model that writes": (["generate", "--checkpoint", "no", "x"], NO_MODEL),
    "the model that draws": (["generate", "--checkpoint", "no", "--out", "a.png", "x"], NO_MODEL),
    "the model of labels": (["classify", "--checkpoint", "no", "--label", "a", "--label", "b", "x"], NO_MODEL),
    "a share of codes": (
        ["generate", "--checkpoint", ".", "--out", "a.png", "--top-p", "2", "x"],
        "top_p must be in (0, 1], found 2.0",
    ),
    "guidance of a service": (
        ["serve", "--checkpoint", ".", "--guidance", "inf"],
        "guidance_scale must be from 0 to 1000, found inf",
    ),
    "devices of a plan": (["plan", "m6t_100b", "--cluster", "no.json"], "no.json: no such file"),
}


@pytest.mark.parametrize(("command", "message"), NOT_HERE.values(), ids=NOT_HERE)
def test_what_is_not_here(without_torch: WithoutTorch, command: list[str], message: str):
    assert without_torch(MAIN, *command) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize(
    "command",
    [
        ["submit", SMOKE, "--job", "gpu_1x8"],
        ["plan", "best", SMOKE, "--cluster", "h100_x128"],
        ["plan", "explain", SMOKE, "--cluster", "h100_x128"],
        ["plan", "frontier", SMOKE, "--cluster", "h100_x128"],
        ["plan", "curve", SMOKE, "--cluster", "h100_x128"],
        ["plan", "dry-run", SMOKE, "--world", "1"],
        ["plan", "replan", SMOKE, "--run-dir", "run", "--nodes", "1", "--ranks-per-node", "1"],
    ],
    ids=lambda command: " ".join(map(str, command[:2])),
)
def test_other_commands_that_read_a_run(without_torch: WithoutTorch, command: list[object]):
    code, stdout, stderr = without_torch(MAIN, *command, "--set", "m6.schedule.warmup_steps=900")
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"error: {shipped_file(SMOKE, 'configuration')}: m6.schedule: warmup_steps 900 and")
