"""``--arch transformer_tfixup``: fairseq's Transformer with T-Fixup's initial weights and without LayerNorm."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model

from coldstart.blocks import Stack, remove_layer_norms_
from coldstart.tfixup import Gain, adam_gain, depth_gain, encoder_gain, input_gain, no_gain, tfixup_

from .. import compat
from .mimetic import MimeticConfig, make_mimetic, refuse_sharded
from .sizes import register_sizes
from .transformer_mimetic import MimeticOptionsModel


class Law(NamedTuple):
    """What T-Fixup multiplies by, as functions of a stack."""

    gain: Gain
    embeddings_gain: Gain = input_gain


LAWS = {"paper": Law(depth_gain), "adam": Law(adam_gain), "none": Law(no_gain, no_gain)}
ENCODER_EMBEDDING_GAINS = ("embedding", "encoder")


@dataclass
class TFixupWeightsConfig(FairseqDataclass):
    tfixup_layer_norm: bool = field(
        default=False,
        metadata={"help": "keep LayerNorm where fairseq has it (T-Fixup removes it), with T-Fixup's initial weights"},
    )
    tfixup_law: ChoiceEnum(LAWS) = field(
        default="paper",
        metadata={
            "help": "how weights depend on the number of layers N: 'paper'; 'adam', whose matrices beyond 6 layers are "
            "smaller by (6/N)^(3/4), so that Adam's first update does not grow with N; 'none' is Xavier at any depth"
        },
    )


@dataclass
class TFixupConfig(TFixupWeightsConfig):
    tfixup_encoder_embedding_gain: ChoiceEnum(ENCODER_EMBEDDING_GAINS) = field(
        default="embedding",
        metadata={
            "help": "gain of the encoder's input embeddings: 'embedding' is (9N)^(-1/4), as in the paper and its code; "
            "'encoder' is 0.67 N^(-1/4), as for the encoder's matrices"
        },
    )


@register_model("transformer_tfixup")
class TFixupTransformerModel(MimeticOptionsModel):
    """fairseq's ``transformer`` (all of its options apply) started by :func:`coldstart.tfixup.tfixup_`."""

    @classmethod
    def add_args(cls, parser):
        super().add_args(parser)
        gen_parser_from_dataclass(parser, TFixupConfig(), delete_default=True)

    @classmethod
    def build_model(cls, args, task):
        """Build the model, without LayerNorm unless ``--tfixup-layer-norm``, and initialise it by depth.

        Raises:
            ValueError: options that cannot hold together.
        """
        check_tfixup_options(args)
        law = LAWS[args.tfixup_law]
        if args.tfixup_encoder_embedding_gain == "encoder":
            law = law._replace(embeddings_gain=as_the_encoder_s_matrices)
        model = super().build_model(args, task)
        loaded = {model.encoder: args.encoder_embed_path, model.decoder: args.decoder_embed_path}
        pretrained = [side.embed_tokens for side, path in loaded.items() if path]
        return fix_up(model, args, law, pretrained_embeddings=pretrained)


def as_the_encoder_s_matrices(stack: Stack) -> float:
    """The gain of embeddings in some accounts of the paper: the encoder's have that of its matrices."""
    return input_gain(stack) if stack.has_cross_attention else encoder_gain(len(stack.layers))


def fix_up(model: torch.nn.Module, args: Any, law: Law, **settings: Any) -> torch.nn.Module:
    """Take LayerNorm out unless ``--tfixup-layer-norm``, initialise by a law, and make self-attention mimetic where
    asked; a model that will be loaded into keeps fairseq's weights.

    Args:
        settings: as :func:`coldstart.tfixup.tfixup_` has them.
    """
    refuse_sharded(model, "T-Fixup")
    if not args.tfixup_layer_norm:
        remove_layer_norms_(model)
    if not compat.weights_will_be_read():
        tfixup_(model, gain=law.gain, embeddings_gain=law.embeddings_gain, **settings)
    return make_mimetic(model, args, vo_gain=law.gain)


def check_tfixup_options(args) -> None:
    """Refuse options that T-Fixup cannot follow.

    Raises:
        ValueError: one sentence that names the option and says what to do instead.
    """
    for option, choices in (("tfixup_law", LAWS), ("tfixup_encoder_embedding_gain", ENCODER_EMBEDDING_GAINS)):
        given = getattr(args, option, None)
        if given is not None and given not in choices:
            allowed = " or ".join(f"'{choice}'" for choice in choices)
            raise ValueError(f"--{option.replace('_', '-')} is {allowed}, not '{given}'")
    if args.tfixup_law == "none" and getattr(args, "tfixup_encoder_embedding_gain", None) == "encoder":
        raise ValueError(
            "--tfixup-law none scales nothing, --tfixup-encoder-embedding-gain encoder scales embeddings: leave one out"
        )
    for option in ("encoder_layers", "decoder_layers"):
        layers = getattr(args, option, 1)
        if layers < 1:
            raise ValueError(
                f"--{option.replace('_', '-')} must be at least 1, as T-Fixup scales by depth, not {layers}"
            )
    if getattr(args, "base_layers", 0):
        raise ValueError("--base-layers has feed-forward experts that T-Fixup says nothing of: leave it out")
    if args.tfixup_layer_norm:
        return
    for option in (
        "encoder_normalize_before",
        "decoder_normalize_before",
        "layernorm_embedding",
        "scale_attn",
        "scale_fc",
    ):
        if getattr(args, option, False):
            raise ValueError(
                f"--{option.replace('_', '-')} needs LayerNorm, which T-Fixup removes: "
                "leave it out, or keep LayerNorm with --tfixup-layer-norm"
            )


register_sizes("transformer_tfixup", MimeticConfig(), TFixupConfig())
