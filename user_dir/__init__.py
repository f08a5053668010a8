"""The fairseq plugin of coldstart: ``fairseq-train --user-dir user_dir ...``.

Importing it mends fairseq for today's PyTorch and registers the learning-rate schedules; fairseq itself then imports
every module of ``tasks/`` and ``models/``.
"""

from . import compat

compat.apply()

from .optim import inverse_sqrt_nowarmup  # noqa: E402, F401  registers itself; needs the mended fairseq
