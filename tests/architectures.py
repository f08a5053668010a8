"""Models of the plugin, built in-process through fairseq's own parser and registry."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

from fairseq import models, options, utils
from fairseq.data import Dictionary
from fairseq.dataclass.initialize import add_defaults
from fairseq.tasks.language_modeling import LanguageModelingConfig
from omegaconf import OmegaConf
from torch import nn

USER_DIR = str(Path(__file__).resolve().parents[1] / "user_dir")


def dictionary(size: int) -> Dictionary:
    entries = Dictionary()
    for i in range(size - len(entries)):
        entries.add_symbol(f"word{i}")
    return entries


SOURCE, TARGET = dictionary(300), dictionary(250)


def parse(arch: str, *arguments: str) -> Namespace:
    """What fairseq-train makes of the options; models of language have the task of that name."""
    task = "language_modeling" if arch.startswith("transformer_lm") else "translation"
    given = ["data", "--user-dir", USER_DIR, "--task", task, "--arch", arch, *arguments]
    return options.parse_args_and_arch(options.get_training_parser(), given)


def task_with(target: Dictionary) -> SimpleNamespace:
    """As much of a task as models ask for."""
    return SimpleNamespace(source_dictionary=SOURCE, target_dictionary=target)


def build_from_options(arch: str, *arguments: str, target: Dictionary = TARGET) -> nn.Module:
    return models.build_model(parse(arch, *arguments), task_with(target))


def build_from_hydra(arch: str, *, target: Dictionary = TARGET, **configuration: object) -> nn.Module:
    """From what is written for Hydra, as fairseq-hydra-train completes it."""
    utils.import_user_module(Namespace(user_dir=USER_DIR))
    config = OmegaConf.create({"common": {}, "task": {}, "model": {"_name": arch, **configuration}})
    if arch.startswith("transformer_lm"):
        config.task = LanguageModelingConfig(tokens_per_sample=64)
    add_defaults(config)
    OmegaConf.set_struct(config, True)
    return models.build_model(config.model, task_with(target))
