"""``--arch transformer_mimetic``: fairseq's Transformer with mimetic self-attention."""

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

from .mimetic import MimeticConfig, MimeticLanguageConfig, check_mimetic_options, make_mimetic, set_defaults


class MimeticOptionsModel(TransformerModel):
    """fairseq's ``transformer``, with the options of `MimeticConfig`."""

    @classmethod
    def add_args(cls, parser):
        super().add_args(parser)
        gen_parser_from_dataclass(parser, MimeticConfig(), delete_default=True)

    @classmethod
    def build_model(cls, args, task):
        """Build fairseq's model.

        Raises:
            ValueError: options that cannot hold together.
        """
        check_mimetic_options(args)
        for option in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
            kept = getattr(args, option)
            if kept and not isinstance(kept, str):  # the parser makes a list, and fairseq's build_model splits a string
                setattr(args, option, ",".join(map(str, kept)))
        return super().build_model(args, task)


def set_transformer_defaults(args) -> None:
    """fairseq's base Transformer: 6+6 layers, 512-2048-8."""
    # fairseq's build_model adds these three itself, which fails on the closed configuration that Hydra gives it.
    args.max_source_positions = getattr(args, "max_source_positions", DEFAULT_MAX_SOURCE_POSITIONS)
    args.max_target_positions = getattr(args, "max_target_positions", DEFAULT_MAX_TARGET_POSITIONS)
    args.min_params_to_wrap = getattr(args, "min_params_to_wrap", DEFAULT_MIN_PARAMS_TO_WRAP)
    base_architecture(args)


@register_model("transformer_mimetic")
class MimeticTransformerModel(MimeticOptionsModel):
    """fairseq's ``transformer`` (all of its options apply) started by :func:`coldstart.mimetic.mimetic_`."""

    @classmethod
    def build_model(cls, args, task):
        """Build the model, Post-LN or Pre-LN, and make its self-attention mimetic."""
        return make_mimetic(super().build_model(args, task), args)


@register_model_architecture("transformer_mimetic", "transformer_mimetic")
def transformer_mimetic(args):
    """fairseq's base Transformer, 6+6 layers, 512-2048-8, with the paper's shares for language."""
    set_defaults(args, MimeticLanguageConfig())
    set_transformer_defaults(args)


@register_model_architecture("transformer_mimetic", "transformer_mimetic_iwslt_de_en")
def transformer_mimetic_iwslt_de_en(args):
    """fairseq's small model for IWSLT'14: 6+6 layers, 512-1024-4."""
    transformer_iwslt_de_en(args)
    transformer_mimetic(args)


@register_model_architecture("transformer_mimetic", "transformer_mimetic_wmt_en_de")
def transformer_mimetic_wmt_en_de(args):
    """fairseq's base model for WMT: 6+6 layers, 512-2048-8."""
    transformer_mimetic(args)


@register_model_architecture("transformer_mimetic", "transformer_mimetic_wmt_en_de_big")
def transformer_mimetic_wmt_en_de_big(args):
    """fairseq's big model for WMT: 6+6 layers, 1024-4096-16."""
    transformer_wmt_en_de_big(args)
    transformer_mimetic(args)
