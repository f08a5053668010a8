"""coldstart: initialisations that let a deep Transformer train without warmup, and without LayerNorm if you like.

A pure-PyTorch library. The fairseq plugin that stands on it is found by ``python -m coldstart``.
"""

from coldstart.tfixup import decoder_gain, embedding_gain, encoder_gain, tfixup_, tfixup_embedding_

__all__ = ["decoder_gain", "embedding_gain", "encoder_gain", "tfixup_", "tfixup_embedding_"]
__version__ = "0.1.0"
