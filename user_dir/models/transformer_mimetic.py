"""``--arch transformer_mimetic``: fairseq's Transformer with mimetic self-attention."""

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import TransformerModel

from .mimetic import MimeticConfig, MimeticLanguageConfig, check_mimetic_options, make_mimetic
from .sizes import register_sizes


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


@register_model("transformer_mimetic")
class MimeticTransformerModel(MimeticOptionsModel):
    """fairseq's ``transformer`` (all of its options apply) started by :func:`coldstart.mimetic.mimetic_`."""

    @classmethod
    def build_model(cls, args, task):
        """Build the model, Post-LN or Pre-LN, and make its self-attention mimetic."""
        return make_mimetic(super().build_model(args, task), args)


register_sizes("transformer_mimetic", MimeticLanguageConfig())
