"""``--arch transformer_deepnorm``, ``--arch transformer_lm_deepnorm``: fairseq's Transformer with DeepNorm."""

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.models import register_model

from coldstart.deepnorm import deepnorm_residuals_, deepnorm_weights_, law_for

from .. import compat
from .mimetic import MimeticConfig, make_mimetic, refuse_sharded
from .sizes import register_sizes
from .transformer_lm import LanguageModelConfig, PluginLanguageModel
from .transformer_mimetic import MimeticOptionsModel


@dataclass
class DeepNormLanguageModelConfig(MimeticConfig, LanguageModelConfig):
    pass


@register_model("transformer_deepnorm")
class DeepNormTransformerModel(MimeticOptionsModel):
    """fairseq's ``transformer`` (its options apply, Post-LN) started by :func:`coldstart.deepnorm.deepnorm_`."""

    @classmethod
    def build_model(cls, args, task):
        """Build the model, weigh its skip connections and initialise it by depth.

        Raises:
            ValueError: options that cannot hold together.
        """
        check_post_ln_options(args, "DeepNorm")
        return deepen(super().build_model(args, task), args)


@register_model("transformer_lm_deepnorm", dataclass=DeepNormLanguageModelConfig)
class DeepNormLanguageModel(PluginLanguageModel):
    """fairseq's ``transformer_lm`` (its options apply, Post-LN) started by :func:`coldstart.deepnorm.deepnorm_`."""

    @classmethod
    def build_model(cls, args, task):
        """Build the model, weigh its skip connections and initialise it by depth.

        Raises:
            ValueError: options that cannot hold together.
        """
        check_post_ln_options(args, "DeepNorm")
        return deepen(super().build_model(args, task), args)


def deepen(model: torch.nn.Module, args: Any) -> torch.nn.Module:
    """Weigh the skip connections, and initialise a model that will not be loaded into; mimetic values and outputs, if
    any, are multiplied by beta."""
    refuse_sharded(model, "DeepNorm")
    if not compat.weights_will_be_read():
        deepnorm_weights_(model)
    deepnorm_residuals_(model)
    law = law_for(model)
    return make_mimetic(model, args, vo_gain=lambda stack: law(stack).beta)


def check_post_ln_options(args: Any, law: str) -> None:
    """Refuse options that are not for the residual weights of Post-LN.

    Raises:
        ValueError: one sentence that names the option and says what to do instead.
    """
    for option in ("encoder_normalize_before", "decoder_normalize_before"):
        if getattr(args, option, False):
            raise ValueError(f"--{option.replace('_', '-')} is Pre-LN, but {law} is a law of Post-LN: leave it out")
    for option in ("encoder_layers", "decoder_layers"):
        layers = getattr(args, option, 1)
        if layers < 1:
            raise ValueError(f"--{option.replace('_', '-')} must be at least 1 for {law}, not {layers}")


register_sizes("transformer_deepnorm", MimeticConfig())
