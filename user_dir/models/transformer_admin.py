"""``--arch transformer_admin``, ``--arch transformer_lm_admin``: fairseq's Transformer with Admin, in one command."""

import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import register_model
from fairseq.tasks import FairseqTask
from torch import distributed as dist

from coldstart.admin import add_skip_weights_, admin_, set_skip_weights_

from ..tasks.gradinit import GradInitTask
from .mimetic import MimeticConfig, make_mimetic, refuse_sharded
from .sizes import register_sizes
from .transformer_deepnorm import check_post_ln_options
from .transformer_lm import LanguageModelConfig, PluginLanguageModel
from .transformer_mimetic import MimeticOptionsModel

logger = logging.getLogger(__name__)

BATCHES = 8  # that are profiled: fairseq's batches are of one length each, on which the variance of attention depends


@dataclass
class AdminLanguageModelConfig(MimeticConfig, LanguageModelConfig):
    pass


class ProfiledModel:
    """A model that profiles itself on the batches of `compat.show_fresh_models_training_data`."""

    @classmethod
    def build_model(cls, args, task):
        """Build the model, and give its skip connections weights of one.

        Raises:
            ValueError: options that cannot hold together.
        """
        check_post_ln_options(args, "Admin")
        refuse_gradinit(task)
        model = super().build_model(args, task)
        refuse_sharded(model, "Admin")
        make_mimetic(add_skip_weights_(model), args)
        model.wants_training_data = True
        model.register_load_state_dict_post_hook(note_loading)
        return model

    def see_training_data(self, batches: Iterable[dict]) -> None:
        """Set the weights of the skip connections, on all processes as on the first, by :func:`coldstart.admin.admin_`.

        Args:
            batches: what the task makes of the first batches of the run, the same on every process.
        """
        self.wants_training_data = False
        omegas = admin_(self, lambda batch: self(**batch["net_input"]), itertools.islice(batches, BATCHES))
        if dist.is_initialized():
            set_skip_weights_(self, of_the_first_process(omegas))
        logger.info(
            f"Admin: {len(omegas)} residual branches profiled; the weights of their skip connections are from "
            f"{min(omegas.values()):.3g} to {max(omegas.values()):.3g}"
        )


@register_model("transformer_admin")
class AdminTransformerModel(ProfiledModel, MimeticOptionsModel):
    """fairseq's ``transformer`` (its options apply, Post-LN) started by :func:`coldstart.admin.admin_`."""


@register_model("transformer_lm_admin", dataclass=AdminLanguageModelConfig)
class AdminLanguageModel(ProfiledModel, PluginLanguageModel):
    """fairseq's ``transformer_lm`` (its options apply, Post-LN) started by :func:`coldstart.admin.admin_`."""


def note_loading(model: torch.nn.Module, _: Any) -> None:
    """A hook of ``load_state_dict``: the weights are no longer those of a start."""
    model.wants_training_data = False


def of_the_first_process(value: Any) -> Any:
    """What the first of the processes that train one model has."""
    group, box = distributed_utils.get_data_parallel_group(), [value]
    dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group=group)
    return box[0]


def refuse_gradinit(task: FairseqTask) -> None:
    """Raise ValueError for a task whose own scales Admin would overwrite."""
    if isinstance(task, GradInitTask):
        raise ValueError(
            "Admin and GradInit both choose the weights of the skip connections: give --arch transformer_admin without "
            "a gradinit task, or GradInit another architecture"
        )


register_sizes("transformer_admin", MimeticConfig())
