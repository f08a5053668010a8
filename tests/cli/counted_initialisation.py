"""Run a fairseq command (``train``, ``generate``, ...) and print, last of all, how often each initialisation ran."""

import collections
import functools
import importlib
import sys

from coldstart import mimetic, tfixup

counts: collections.Counter[str] = collections.Counter()


def counted(initialise):
    @functools.wraps(initialise)
    def count(*args, **kwargs):
        counts[initialise.__name__] += 1
        return initialise(*args, **kwargs)

    return count


mimetic.mimetic_ = counted(mimetic.mimetic_)
tfixup.tfixup_ = counted(tfixup.tfixup_)
sys.argv = sys.argv[1:]
importlib.import_module(f"fairseq_cli.{sys.argv[0]}").cli_main()
print(f"initialised: mimetic {counts['mimetic_']}, T-Fixup {counts['tfixup_']}")
