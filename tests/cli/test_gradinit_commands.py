"""The GradInit tasks by the real commands: scaled once, before the first update, and never a weight that was loaded."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coldstart.scales import Scales

SCRIPT = Path(__file__).parent / "double_gradinit.py"
GRADINIT = ("--task", "gradinit_translation", "--gradinit-iterations", 6)
SKIPPED = "GradInit is skipped: the weights come from a checkpoint, which it never touches"
TENSORBOARD = importlib.util.find_spec("tensorboard") or importlib.util.find_spec("tensorboardX")


def model_of(path):
    return torch.load(path, weights_only=False)["model"]


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="module")
def started(shared_directory, once, train):
    """A directory with 6 updates after GradInit, saved every 3; the output is in ``log``."""

    def make(directory):
        more = ("--max-update", 6, "--save-interval-updates", 3, "--dropout", 0.1)
        log = train(directory, *GRADINIT, *more, architecture="transformer")
        (directory / "log").write_text(log)

    return once(shared_directory / "gradinit", make)


def test_training_starts_from_the_initial_weights_times_the_scales(train, tmp_path, log_of):
    """Updates with a learning rate of 1e-12 leave the weights as they are."""
    still = ("--lr", 1e-12, "--max-update", 1)
    file, log = tmp_path / "scales.json", tmp_path / "log"
    output = train(
        tmp_path / "scaled",
        *(*GRADINIT, *still, "--gradinit-eta", 1e-3, "--gradinit-scales", file, "--log-file", log, "--store-ema"),
        architecture="transformer",
    )
    train(tmp_path / "initial", *still, architecture="transformer")
    scales = Scales.load(file)
    initial, scaled = (model_of(tmp_path / name / "checkpoint_last.pt") for name in ("initial", "scaled"))
    average = torch.load(tmp_path / "scaled/checkpoint_last.pt", weights_only=False)["extra_state"]["ema"]
    assert max(abs(scale - 1) for scale in scales.scales.values()) > 0.01
    for name, scale in scales.scales.items():
        torch.testing.assert_close(scaled[name], initial[name] * scale, rtol=1e-6, atol=1e-10, msg=name)
        torch.testing.assert_close(average[name], scaled[name], rtol=1e-6, atol=1e-10, msg=name)
    for lines in (log_of(output, "gradinit"), log_of(log.read_text(), "gradinit") or log_of(output, "gradinit")):
        assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
        for line, record in zip(lines, scales.history, strict=True):
            assert line["gradient_norm"] == pytest.approx(record.gradient_norm, rel=1e-4)
            assert (line["gamma"], line["constrained"]) == (scales.settings["gamma"], record.constrained)
            assert line["loss"] > 0
    assert '"gradient_norm": ' in log.read_text()
    assert output.index("GradInit: done") < output.index("train_inner")


def test_a_killed_gradinit_starts_again_and_a_resumed_training_has_none(
    started, options, tmp_path, command, environment, train
):
    line = [*options(tmp_path, "transformer"), *GRADINIT, "--dropout", 0.1, "--max-update", 3]
    killed = command("fairseq-train", *line)
    with subprocess.Popen(killed, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        seen = next((text for text in run.stdout if '"iteration": "3"' in text), None)
        run.kill()
    assert seen
    assert list(tmp_path.iterdir()) == []
    more = ("--save-interval-updates", 3, "--dropout", 0.1)
    first = train(tmp_path, *GRADINIT, *more, "--max-update", 3, architecture="transformer")
    assert '"iteration": "1"' in first
    assert SKIPPED not in first
    resumed = train(tmp_path, *GRADINIT, *more, "--max-update", 6, architecture="transformer")
    assert SKIPPED in resumed
    assert '"iteration"' not in resumed
    assert_same_weights(model_of(tmp_path / "checkpoint_last.pt"), model_of(started / "checkpoint_last.pt"))


@pytest.mark.parametrize("option", ["--restore-file", "--finetune-from-model"])
def test_weights_of_another_checkpoint_are_not_scaled(option, started, tmp_path, train):
    reset = ("--reset-optimizer", "--reset-dataloader", "--reset-meters") if option == "--restore-file" else ()
    line = (*GRADINIT, option, started / "checkpoint_last.pt", *reset, "--lr", 1e-12, "--max-update", 7)
    output = train(tmp_path, *line, architecture="transformer")
    assert SKIPPED in output
    loaded, kept = model_of(started / "checkpoint_last.pt"), model_of(tmp_path / "checkpoint_last.pt")
    for name, weight in loaded.items():
        torch.testing.assert_close(kept[name], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["generate", "validate", "interactive"])
def test_commands_that_load_run_no_gradinit(name, started, plugin_options, run):
    more = {"interactive": (), "generate": (), "validate": ("--max-tokens", 500)}[name]
    line = plugin_options(started)
    line[line.index("translation")] = "gradinit_translation"
    output = run(f"fairseq-{name}", *line, *more, stdin="a b c\n")
    assert "GradInit:" not in output
    assert {"interactive": "H-0", "generate": "BLEU4 = ", "validate": "| loss "}[name] in output


def test_two_processes_learn_the_scales_of_one(options, tmp_path, torchrun, run):
    common = [*options(tmp_path / "checkpoints", "transformer"), *GRADINIT, "--gradinit-iterations", 8]
    common += ["--max-update", 1, "--no-save", "--disable-validation", "--gradinit-gamma", 400]
    for name in ("one", "two", "low"):
        (tmp_path / name).mkdir()
    run(sys.executable, SCRIPT, tmp_path / "one", "float64", *common, "--gradinit-max-tokens", 500)
    gloo = ("--gradinit-max-tokens", 250, "--distributed-backend", "gloo")
    torchrun(str(SCRIPT), tmp_path / "two", "float64", *common, *gloo)
    torchrun(str(SCRIPT), tmp_path / "low", "float32", *common, *gloo, "--bf16")
    scales, weights, branches = torch.load(tmp_path / "one/0.pt")
    assert set(branches) == {True, False}
    for directory in ("two", "low"):
        ranks = [torch.load(tmp_path / directory / f"{rank}.pt") for rank in range(2)]
        assert ranks[0][0] == ranks[1][0]
        assert_same_weights(ranks[0][1], ranks[1][1])
    shared = torch.load(tmp_path / "two/0.pt")
    assert shared[0] == pytest.approx(scales, rel=1e-9)
    assert shared[2] == branches
    for name, weight in weights.items():
        torch.testing.assert_close(shared[1][name], weight, rtol=1e-9, atol=1e-12)


def test_hydra_configures_it(hydra, tmp_path, run, log_of):
    keys = ["task._name=gradinit_translation", "+task.gradinit_iterations=3", "lr_scheduler._name=fixed"]
    keys += ["~lr_scheduler.decay_period", "optimization.max_update=2", "optimization.lr=[0.002]"]
    if TENSORBOARD:
        keys.append(f"+common.tensorboard_logdir={tmp_path / 'board'}")
    output = run("fairseq-hydra-train", *hydra, *keys, cwd=tmp_path)
    assert "GradInit: 3 iterations for adam, eta 0.002, gamma 50" in output
    assert [line["iteration"] for line in log_of(output, "gradinit")] == [1, 2, 3]
    assert [line["num_updates"] for line in log_of(output, "train_inner")] == [1, 2]
    assert not TENSORBOARD or list((tmp_path / "board/gradinit").iterdir())


@pytest.fixture
def text(reversal_data, tmp_path):
    """The source side of the reversals as a data set for language models."""
    shutil.copy(reversal_data / "dict.src.txt", tmp_path / "dict.txt")
    for split in ("train", "valid"):
        for end in ("bin", "idx"):
            shutil.copy(reversal_data / f"{split}.src-tgt.src.{end}", tmp_path / f"{split}.{end}")
    return tmp_path


@pytest.mark.parametrize(
    "criterion",
    [["cross_entropy"], ["adaptive_loss", "--ddp-backend", "legacy_ddp", "--adaptive-softmax-cutoff", "5,9"]],
    ids=lambda criterion: criterion[0],
)
def test_language_models(criterion, text, plugin, run, log_of):
    output = run(
        *("fairseq-train", text, "--user-dir", plugin, "--task", "gradinit_language_modeling", "--cpu"),
        *("--arch", "transformer_lm", "--decoder-layers", 2, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64),
        *("--decoder-attention-heads", 2, "--tokens-per-sample", 16, "--max-tokens", 200, "--criterion", *criterion),
        *("--optimizer", "nag", "--lr", 0.1, "--max-update", 2, "--gradinit-iterations", 4, "--no-save"),
        *("--log-format", "json", "--log-interval", 1, "--num-workers", 0),
    )
    assert "GradInit: 4 iterations for sgd, eta 0.1, gamma 1" in output
    assert [line["iteration"] for line in log_of(output, "gradinit")] == [1, 2, 3, 4]
    assert [line["num_updates"] for line in log_of(output, "train_inner")] == [1, 2]
