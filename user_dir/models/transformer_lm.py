"""Language models: ``--arch transformer_lm_tfixup``, ``--arch transformer_lm_mimetic`` and the sizes of the papers."""

from dataclasses import dataclass, field
from typing import Optional

import torch
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor, nn

from .mimetic import MimeticConfig, MimeticLanguageConfig, check_mimetic_options, make_mimetic, with_defaults
from .transformer_tfixup import LAWS, TFixupWeightsConfig, check_tfixup_options, fix_up


@dataclass
class LanguageModelConfig(TransformerLanguageModelConfig):
    word_dropout: float = field(
        default=0.0,
        metadata={"help": "probability with which a word of the vocabulary is left out of all inputs of a batch"},
    )
    decoder_input_dim: Optional[int] = field(
        default=None, metadata={"help": "width of the input embeddings; default: --decoder-embed-dim"}
    )
    decoder_output_dim: Optional[int] = field(
        default=None, metadata={"help": "width of the output embeddings; default: --decoder-embed-dim"}
    )


@dataclass
class MimeticLanguageModelConfig(MimeticLanguageConfig, LanguageModelConfig):
    pass


@dataclass
class TFixupLanguageModelConfig(TFixupWeightsConfig, MimeticConfig, LanguageModelConfig):
    pass


class PluginLanguageModel(TransformerLanguageModel):
    """fairseq's ``transformer_lm`` with the options of `LanguageModelConfig` and `MimeticConfig`."""

    @classmethod
    def build_model(cls, args, task):
        """Build fairseq's model, and have it drop words.

        Raises:
            ValueError: options that cannot hold together.
        """
        check_mimetic_options(args)
        if not 0 <= args.word_dropout < 1:
            raise ValueError(f"--word-dropout must be at least 0 and below 1, not {args.word_dropout}")
        for option in ("decoder_input_dim", "decoder_output_dim"):
            if getattr(args, option) is None:
                setattr(args, option, args.decoder_embed_dim)
        if args.adaptive_input:  # has no one matrix; --tie-adaptive-weights ties its bands
            args.share_decoder_input_output_embed = False
        model = super().build_model(args, task)
        if args.word_dropout:
            model.decoder.embed_tokens.register_forward_hook(
                WordDropout(args.word_dropout, len(task.source_dictionary))
            )
        return model


class WordDropout:
    """A hook of an embedding: in training, each word of the vocabulary is zero in the whole batch with probability
    ``rate``, and the others are larger by ``1 / (1 - rate)`` (Gal, Ghahramani: A Theoretically Grounded Application of
    Dropout in Recurrent Neural Networks, NeurIPS 2016, section 4.2)."""

    def __init__(self, rate: float, vocabulary: int):
        self.rate, self.vocabulary = rate, vocabulary

    def __call__(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        if not module.training:
            return output
        kept = torch.rand(self.vocabulary, device=output.device) >= self.rate
        mask = kept[inputs[0]].unsqueeze(-1) / (1 - self.rate)
        return output * mask.to(output.dtype)


@register_model("transformer_lm_mimetic", dataclass=MimeticLanguageModelConfig)
class MimeticLanguageModel(PluginLanguageModel):
    """fairseq's ``transformer_lm`` (all of its options apply) started by :func:`coldstart.mimetic.mimetic_`."""

    @classmethod
    def build_model(cls, args, task):
        """Build the model, Post-LN or Pre-LN, and make its self-attention mimetic."""
        return make_mimetic(super().build_model(args, task), args)


@register_model("transformer_lm_tfixup", dataclass=TFixupLanguageModelConfig)
class TFixupLanguageModel(PluginLanguageModel):
    """fairseq's ``transformer_lm`` (all of its options apply) started by :func:`coldstart.tfixup.tfixup_`.

    A layer has two branches, as in an encoder, so it follows the encoder's law: our reading, the paper is silent.
    """

    @classmethod
    def build_model(cls, args, task):
        """Build the model, without LayerNorm unless ``--tfixup-layer-norm``, and initialise it by depth."""
        check_tfixup_options(args)
        return fix_up(super().build_model(args, task), args, LAWS[args.tfixup_law])


# Not by fairseq's functions for named sizes: Hydra fills in the defaults of the dataclass before they are called.
TiedPreLNConfig = with_defaults(
    MimeticLanguageModelConfig,
    "TiedPreLNConfig",
    share_decoder_input_output_embed=True,
    decoder_normalize_before=True,
)
WikiText103Config = with_defaults(
    TiedPreLNConfig,
    "WikiText103Config",
    decoder_layers=16,
    decoder_embed_dim=410,
    decoder_ffn_embed_dim=2100,
    decoder_attention_heads=10,
)
PTBConfig = with_defaults(
    TiedPreLNConfig,
    "PTBConfig",
    decoder_layers=12,
    decoder_embed_dim=384,
    decoder_ffn_embed_dim=1536,
    decoder_attention_heads=8,
)


@register_model("transformer_lm_mimetic_wikitext103", dataclass=WikiText103Config)
class MimeticWikiText103LanguageModel(MimeticLanguageModel):
    """The paper's model for WikiText-103: 16 layers, width 410, 10 heads, tied, sinusoidal positions.

    The feed-forward width 2100 is that of Transformer-XL's model of this size; Pre-LN is fairseq's choice for language
    models. The paper gives neither.
    """


@register_model("transformer_lm_mimetic_ptb", dataclass=PTBConfig)
class MimeticPTBLanguageModel(MimeticLanguageModel):
    """The paper's model for the Penn Treebank: 12 layers, width 384, 8 heads, tied, sinusoidal positions.

    The feed-forward width of four times 384 and Pre-LN are ours; the paper gives neither.
    """
