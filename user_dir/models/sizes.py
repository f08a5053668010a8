"""The usual sizes of the plugin's architectures for translation."""

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model_architecture
from fairseq.models.transformer import (
    DEFAULT_MAX_SOURCE_POSITIONS,
    DEFAULT_MAX_TARGET_POSITIONS,
    DEFAULT_MIN_PARAMS_TO_WRAP,
    base_architecture,
    transformer_iwslt_de_en,
    transformer_wmt_en_de_big,
)

from .mimetic import set_defaults


def base(args) -> None:
    """fairseq's base Transformer: 6+6 layers, 512-2048-8."""


def deep_and_narrow(args) -> None:
    """200+200 layers, more than a thousand residual branches: 64-128-2, narrow enough for one device."""
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


def register_sizes(model: str, *configs: FairseqDataclass) -> None:
    """Register every size of a registered model, as ``model``, ``model_iwslt_de_en`` and so on.

    Args:
        model: its name.
        configs: the defaults of the options that it has beside those of fairseq's ``transformer``.
    """
    for suffix, set_size in SIZES.items():

        def set_all(args, set_size=set_size) -> None:
            set_size(args)
            for config in configs:
                set_defaults(args, config)
            # fairseq's build_model adds these three itself, which fails on the closed configuration of Hydra.
            args.max_source_positions = getattr(args, "max_source_positions", DEFAULT_MAX_SOURCE_POSITIONS)
            args.max_target_positions = getattr(args, "max_target_positions", DEFAULT_MAX_TARGET_POSITIONS)
            args.min_params_to_wrap = getattr(args, "min_params_to_wrap", DEFAULT_MIN_PARAMS_TO_WRAP)
            base_architecture(args)

        register_model_architecture(model, f"{model}{suffix}")(set_all)
