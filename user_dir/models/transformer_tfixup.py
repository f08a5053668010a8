"""``--arch transformer_tfixup``: fairseq's Transformer with T-Fixup's initial weights and without LayerNorm."""

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model

from coldstart.blocks import remove_layer_norms_
from coldstart.tfixup import depth_gain, embedding_gain, encoder_gain, tfixup_

from .. import compat
from .mimetic import MimeticConfig, make_mimetic, refuse_sharded
from .sizes import register_sizes
from .transformer_mimetic import MimeticOptionsModel

ENCODER_EMBEDDING_GAINS = {"embedding": embedding_gain, "encoder": encoder_gain}


@dataclass
class TFixupConfig(FairseqDataclass):
    tfixup_layer_norm: bool = field(
        default=False,
        metadata={"help": "keep LayerNorm where fairseq has it (T-Fixup removes it), with T-Fixup's initial weights"},
    )
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
        gain = args.tfixup_encoder_embedding_gain
        if gain not in ENCODER_EMBEDDING_GAINS:
            raise ValueError(f"--tfixup-encoder-embedding-gain is 'embedding' or 'encoder', not '{gain}'")
        model = super().build_model(args, task)
        loaded = {model.encoder: args.encoder_embed_path, model.decoder: args.decoder_embed_path}
        fix_up(
            model,
            keep_layer_norm=args.tfixup_layer_norm,
            encoder_embedding_gain=ENCODER_EMBEDDING_GAINS[gain],
            pretrained_embeddings=[side.embed_tokens for side, path in loaded.items() if path],
        )
        return make_mimetic(model, args, vo_gain=depth_gain)


def fix_up(model: torch.nn.Module, *, keep_layer_norm: bool, **settings: Any) -> torch.nn.Module:
    """Take LayerNorm out and initialise by depth; a model that will be loaded into keeps fairseq's weights.

    Args:
        settings: as :func:`coldstart.tfixup.tfixup_` has them.
    """
    refuse_sharded(model, "T-Fixup")
    if not keep_layer_norm:
        remove_layer_norms_(model)
    if not compat.weights_will_be_read():
        tfixup_(model, **settings)
    return model


def check_tfixup_options(args) -> None:
    """Refuse options that T-Fixup cannot follow.

    Raises:
        ValueError: one sentence that names the option and says what to do instead.
    """
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
