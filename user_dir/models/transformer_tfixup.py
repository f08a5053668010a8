"""``--arch transformer_tfixup``: fairseq's Transformer with T-Fixup's initial weights and without LayerNorm."""

from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    DEFAULT_MAX_SOURCE_POSITIONS,
    DEFAULT_MAX_TARGET_POSITIONS,
    DEFAULT_MIN_PARAMS_TO_WRAP,
    TransformerModel,
    base_architecture,
    transformer_iwslt_de_en,
    transformer_wmt_en_de_big,
)

from coldstart.blocks import remove_layer_norms_
from coldstart.tfixup import embedding_gain, encoder_gain, tfixup_

from .. import compat

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
class TFixupTransformerModel(TransformerModel):
    """fairseq's ``transformer`` (all of its options apply) started by :func:`coldstart.tfixup.tfixup_`."""

    @classmethod
    def add_args(cls, parser):
        super().add_args(parser)
        gen_parser_from_dataclass(parser, TFixupConfig(), delete_default=True)

    @classmethod
    def build_model(cls, args, task):
        """Build the model, without LayerNorm unless ``--tfixup-layer-norm``, and initialise it by depth.

        A model that is only built to be loaded into keeps whatever weights fairseq gave it.

        Raises:
            ValueError: options that cannot hold together.
        """
        check_options(args)
        for option in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
            kept = getattr(args, option)
            if kept and not isinstance(kept, str):  # the parser makes a list, and fairseq's build_model splits a string
                setattr(args, option, ",".join(map(str, kept)))
        model = super().build_model(args, task)
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise ValueError(
                "--ddp-backend fully_sharded shards the layers before T-Fixup can initialise them: "
                "use --ddp-backend pytorch_ddp or legacy_ddp"
            )
        if not args.tfixup_layer_norm:
            remove_layer_norms_(model)
        if not compat.built_to_be_loaded():
            loaded = {model.encoder: args.encoder_embed_path, model.decoder: args.decoder_embed_path}
            tfixup_(
                model,
                encoder_embedding_gain=ENCODER_EMBEDDING_GAINS[args.tfixup_encoder_embedding_gain],
                pretrained_embeddings=[side.embed_tokens for side, path in loaded.items() if path],
            )
        return model


def check_options(args) -> None:
    """Refuse options that T-Fixup cannot follow.

    Raises:
        ValueError: one sentence that names the option and says what to do instead.
    """
    for option in ("encoder_layers", "decoder_layers"):
        layers = getattr(args, option)
        if layers < 1:
            raise ValueError(
                f"--{option.replace('_', '-')} must be at least 1, as T-Fixup scales by depth, not {layers}"
            )
    if args.tfixup_encoder_embedding_gain not in ENCODER_EMBEDDING_GAINS:
        raise ValueError(
            f"--tfixup-encoder-embedding-gain is 'embedding' or 'encoder', not '{args.tfixup_encoder_embedding_gain}'"
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


@register_model_architecture("transformer_tfixup", "transformer_tfixup")
def transformer_tfixup(args):
    """fairseq's base Transformer: 6+6 layers, 512-2048-8."""
    args.tfixup_layer_norm = getattr(args, "tfixup_layer_norm", False)
    args.tfixup_encoder_embedding_gain = getattr(args, "tfixup_encoder_embedding_gain", "embedding")
    # fairseq's build_model adds these three itself, which fails on the closed configuration that Hydra gives it.
    args.max_source_positions = getattr(args, "max_source_positions", DEFAULT_MAX_SOURCE_POSITIONS)
    args.max_target_positions = getattr(args, "max_target_positions", DEFAULT_MAX_TARGET_POSITIONS)
    args.min_params_to_wrap = getattr(args, "min_params_to_wrap", DEFAULT_MIN_PARAMS_TO_WRAP)
    base_architecture(args)


@register_model_architecture("transformer_tfixup", "transformer_tfixup_iwslt_de_en")
def transformer_tfixup_iwslt_de_en(args):
    """The paper's small model for IWSLT'14: 6+6 layers, 512-1024-4."""
    transformer_iwslt_de_en(args)
    transformer_tfixup(args)


@register_model_architecture("transformer_tfixup", "transformer_tfixup_wmt_en_de")
def transformer_tfixup_wmt_en_de(args):
    """fairseq's base model for WMT: 6+6 layers, 512-2048-8."""
    transformer_tfixup(args)


@register_model_architecture("transformer_tfixup", "transformer_tfixup_wmt_en_de_big")
def transformer_tfixup_wmt_en_de_big(args):
    """fairseq's big model for WMT: 6+6 layers, 1024-4096-16."""
    transformer_wmt_en_de_big(args)
    transformer_tfixup(args)


@register_model_architecture("transformer_tfixup", "transformer_tfixup_200l")
def transformer_tfixup_200l(args):
    """200+200 layers, more than a thousand residual branches: 64-128-2, narrow enough for one device."""
    args.encoder_layers = getattr(args, "encoder_layers", 200)
    args.decoder_layers = getattr(args, "decoder_layers", 200)
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 64)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 128)
    args.encoder_attention_heads = getattr(args, "encoder_attention_heads", 2)
    args.decoder_attention_heads = getattr(args, "decoder_attention_heads", 2)
    transformer_tfixup(args)
