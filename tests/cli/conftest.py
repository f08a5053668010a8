"""Small trainings for the tests of the commands. The functions of ``tests/conftest.py`` come as fixtures."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "user_dir"
ARCHITECTURES = ("transformer_tfixup", "transformer")
LONG_TRAINING = ("--max-update", 20, "--save-interval-updates", 3, "--keep-interval-updates", 1, "--dropout", 0.1)


def train_options(data: Path, save_dir: Path, architecture: str) -> list[object]:
    """Options of a training that takes a fraction of a second and logs every update."""
    sizes = {"embed-dim": 32, "ffn-embed-dim": 64, "attention-heads": 2, "layers": 2}
    schedule = ("inverse_sqrt_nowarmup", "--decay-period", 4000) if architecture != "transformer" else ("fixed",)
    return [
        *(data, "--user-dir", PLUGIN, "--save-dir", save_dir, "--arch", architecture, "--cpu", "--num-workers", 0),
        *(
            word
            for name, size in sizes.items()
            for side in ("encoder", "decoder")
            for word in (f"--{side}-{name}", size)
        ),
        *("--criterion", "label_smoothed_cross_entropy", "--optimizer", "adam", "--lr", 1e-3, "--dropout", 0),
        *("--lr-scheduler", *schedule, "--max-tokens", 500, "--no-epoch-checkpoints"),
        *("--log-format", "json", "--log-interval", 1),
    ]


@pytest.fixture(scope="session")
def options(reversal_data: Path) -> Callable[..., list[object]]:
    """``options(save_dir, architecture="transformer_tfixup")``: what to give to fairseq-train."""
    return lambda save_dir, architecture=ARCHITECTURES[0]: train_options(reversal_data, save_dir, architecture)


@pytest.fixture(scope="session")
def train(run: Callable[..., str], options: Callable) -> Callable[..., str]:
    """``train(save_dir, *more options, architecture=...)``: run fairseq-train, return its output."""

    def train_once(save_dir: Path, *more: object, architecture: str = ARCHITECTURES[0], fails: bool = False) -> str:
        return run("fairseq-train", *options(save_dir, architecture), *more, fails=fails)

    return train_once


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens."""
    return _free_port()


@pytest.fixture(scope="session")
def torchrun(run: Callable[..., str], command: Callable) -> Callable[..., str]:
    """``torchrun("fairseq-...", *options)``: run the command in two processes, return their output."""

    def run_twice(name: str, *more: object, fails: bool = False, cwd: Path | None = None) -> str:
        launch = ("torchrun", "--nproc_per_node", 2, "--master_port", _free_port(), command(name)[0])
        return run(*launch, *more, fails=fails, cwd=cwd)

    return run_twice


@pytest.fixture(scope="session", params=ARCHITECTURES)
def trained(request: pytest.FixtureRequest, shared_directory: Path, once: Callable, train: Callable) -> Path:
    """A directory with 10 updates (two epochs) of training: ``checkpoint_last.pt``, and the output in ``log``."""

    def make(directory: Path) -> None:
        output = train(directory, "--max-update", 10, "--eval-bleu", architecture=request.param)
        (directory / "log").write_text(output)

    return once(shared_directory / request.param, make)


@pytest.fixture
def resumable(trained: Path, tmp_path: Path) -> Path:
    """A copy of ``trained`` that a test may go on with."""
    return shutil.copytree(trained, tmp_path / trained.name)


@pytest.fixture(scope="session")
def uninterrupted(shared_directory: Path, once: Callable, train: Callable) -> Path:
    """A training of 20 updates with dropout that saves every 3 updates, run in one go; its output is in ``log``."""

    def make(directory: Path) -> None:
        (directory / "log").write_text(train(directory, *LONG_TRAINING))

    return once(shared_directory / "uninterrupted", make)


@pytest.fixture
def long_training(options: Callable) -> Callable[[Path], list[object]]:
    """``long_training(save_dir)``: the options of ``uninterrupted``."""
    return lambda save_dir: [*options(save_dir), *LONG_TRAINING]


@pytest.fixture(scope="session")
def plugin_options(reversal_data: Path) -> Callable[[Path], list[object]]:
    """``plugin_options(directory)``: what to give to the commands that read ``checkpoint_last.pt`` there."""
    common = [reversal_data, "--user-dir", PLUGIN, "--task", "translation", "--cpu"]
    return lambda directory: [*common, "--path", directory / "checkpoint_last.pt"]


HYDRA = """
# @package _group_
common: {{user_dir: {plugin}, cpu: true, log_format: json, log_interval: 1}}
task: {{_name: translation, data: {data}, source_lang: src, target_lang: tgt}}
dataset: {{max_tokens: 500, num_workers: 0}}
criterion: {{_name: label_smoothed_cross_entropy, label_smoothing: 0.1}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: inverse_sqrt_nowarmup, decay_period: 4000}}
optimization: {{max_update: 4, lr: [0.001]}}
checkpoint: {{save_dir: {save_dir}, no_epoch_checkpoints: true}}
model:
  _name: transformer_tfixup
  encoder_embed_dim: 32
  encoder_layers: 2
  decoder_layers: 2
  encoder_attention_heads: 2
  decoder_attention_heads: 2
"""


@pytest.fixture
def hydra(tmp_path, plugin, reversal_data):
    """Options of fairseq-hydra-train for a configuration of ours; checkpoints go to ``checkpoints``."""
    text = HYDRA.format(plugin=plugin, data=reversal_data, save_dir=tmp_path / "checkpoints")
    (tmp_path / "ours.yaml").write_text(text)
    return "--config-dir", tmp_path, "--config-name", "ours"
