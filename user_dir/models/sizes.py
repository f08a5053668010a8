"""The usual sizes of an architecture for translation that has no options of its own but those of `MimeticConfig`."""

from fairseq.models import register_model_architecture
from fairseq.models.transformer import transformer_iwslt_de_en, transformer_wmt_en_de_big

from .mimetic import MimeticConfig, set_defaults
from .transformer_mimetic import set_transformer_defaults


def base(args) -> None:
    """fairseq's base Transformer: 6+6 layers, 512-2048-8."""


def deep_and_narrow(args) -> None:
    """200+200 layers, as ``transformer_tfixup_200l`` has them: 64-128-2."""
    defaults = {"layers": 200, "attention_heads": 2}
    for side in ("encoder", "decoder"):
        for name, default in defaults.items():
            setattr(args, f"{side}_{name}", getattr(args, f"{side}_{name}", default))
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 64)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 128)


SIZES = {
    "": base,
    "_iwslt_de_en": transformer_iwslt_de_en,  # 6+6 layers, 512-1024-4
    "_wmt_en_de": base,
    "_wmt_en_de_big": transformer_wmt_en_de_big,  # 6+6 layers, 1024-4096-16
    "_200l": deep_and_narrow,
}


def register_sizes(model: str) -> None:
    """Register every size of a registered model, as ``model``, ``model_iwslt_de_en`` and so on."""
    for suffix, set_size in SIZES.items():

        def set_all(args, set_size=set_size) -> None:
            set_size(args)
            set_defaults(args, MimeticConfig())
            set_transformer_defaults(args)

        register_model_architecture(model, f"{model}{suffix}")(set_all)
