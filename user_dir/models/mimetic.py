"""What every architecture of the plugin can do: mimetic self-attention, and a scale for its positions."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass

from coldstart.blocks import Stack
from coldstart.mimetic import LANGUAGE, mimetic_

from .. import compat

logger = logging.getLogger(__name__)

NONE = "none"


def shares_as_text(shares: tuple[float, float]) -> str:
    """As the options have them: `0,0.5`."""
    return ",".join(f"{share:g}" for share in shares)


@dataclass
class MimeticConfig(FairseqDataclass):
    mimetic_qk: str = field(
        default=NONE,
        metadata={
            "help": "A,B: each head of self-attention starts with W_Q W_K^T near A Z + B I, Z being noise; 'none' "
            "leaves queries and keys as they are. The paper has 0,0.5 for language, 0.7,0.7 for vision"
        },
    )
    mimetic_vo: str = field(
        default=NONE,
        metadata={
            "help": "A,B: self-attention starts with W_V W_proj^T near A Z - B I; 'none' leaves values and output as "
            "they are. The paper has 0.2,0.2 for language, 0.4,0.4 for vision. T-Fixup and DeepNorm multiply both "
            "by their gain"
        },
    )
    mimetic_vo_sign: int = field(default=-1, metadata={"help": "sign of the identity of --mimetic-vo: -1, or 1"})
    position_scale: float = field(default=1.0, metadata={"help": "what positional embeddings are multiplied by"})


def with_defaults(config: type[FairseqDataclass], name: str, **defaults: Any) -> type[FairseqDataclass]:
    """A dataclass like ``config``, of its module, with other defaults."""
    changed = [
        (option.name, option.type, field(default=defaults[option.name], metadata=option.metadata))
        for option in fields(config)
        if option.name in defaults
    ]
    return make_dataclass(name, changed, bases=(config,), namespace={"__module__": config.__module__})


MimeticLanguageConfig = with_defaults(
    MimeticConfig,
    "MimeticLanguageConfig",
    mimetic_qk=shares_as_text(LANGUAGE["qk"]),
    mimetic_vo=shares_as_text(LANGUAGE["vo"]),
)


def set_defaults(args: Any, config: FairseqDataclass) -> None:
    """Fill in what the command line does not give, for architectures without a dataclass."""
    for name, default in vars(config).items():
        if name != "_name":
            setattr(args, name, getattr(args, name, default))


def shares(args: Any, option: str) -> tuple[float, float] | None:
    """The two numbers of ``--mimetic-qk`` or ``--mimetic-vo``; None where it is 'none'.

    Raises:
        ValueError: it is neither.
    """
    text = getattr(args, option)
    if text == NONE:
        return None
    try:
        alpha, beta = (float(number) for number in text.split(","))
    except (AttributeError, ValueError):  # Hydra gives no text for [0, 0.5] or null
        alpha = beta = -1.0
    if not (0 <= alpha <= 1 and 0 <= beta <= 1):
        raise ValueError(
            f"--{option.replace('_', '-')} is '{NONE}' or two numbers between 0 and 1, as in 0,0.5, not '{text}'"
        )
    return alpha, beta


def check_mimetic_options(args: Any) -> None:
    """Refuse what cannot be, before a model is built.

    Raises:
        ValueError: one sentence that names the option and says what is allowed.
    """
    sides = [side for side in ("encoder", "decoder") if hasattr(args, f"{side}_attention_heads")]
    if shares(args, "mimetic_qk") or shares(args, "mimetic_vo"):
        for side in sides:
            width, heads = getattr(args, f"{side}_embed_dim"), getattr(args, f"{side}_attention_heads")
            if width % heads:
                raise ValueError(
                    f"--{side}-attention-heads must divide --{side}-embed-dim, but {heads} does not {width}"
                )
            if getattr(args, f"{side}_learned_pos"):
                logger.warning(
                    f"--{side}-learned-pos with mimetic attention: the paper's vision models lost 2.7 points of "
                    "accuracy with learned positions; sinusoidal ones are what its theory is about"
                )
    if args.mimetic_vo_sign not in (-1, 1):
        raise ValueError(f"--mimetic-vo-sign is -1 or 1, not {args.mimetic_vo_sign}")
    if not 0 <= args.position_scale < float("inf"):
        raise ValueError(f"--position-scale must be a number of at least 0, not {args.position_scale}")


def refuse_sharded(model: torch.nn.Module, law: str) -> None:
    """Raise ValueError for a model whose layers are flattened already."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            f"--ddp-backend fully_sharded shards the layers before {law} can initialise them: "
            "use --ddp-backend pytorch_ddp or legacy_ddp"
        )


def make_mimetic(
    model: torch.nn.Module, args: Any, vo_gain: Callable[[Stack], float] = lambda stack: 1.0
) -> torch.nn.Module:
    """Do to a model that was built what the options of `MimeticConfig` ask for; its weights only if it needs any."""
    qk, vo = shares(args, "mimetic_qk"), shares(args, "mimetic_vo")
    if (qk or vo) and not compat.weights_will_be_read():
        refuse_sharded(model, "mimetic initialisation")
        mimetic_(model, qk=qk, vo=vo, sign=args.mimetic_vo_sign, vo_gain=vo_gain)
    if args.position_scale != 1:
        for module in model.modules():
            positions = getattr(module, "embed_positions", None)
            if positions is not None:
                positions.register_forward_hook(lambda module, inputs, output: args.position_scale * output)
    return model
