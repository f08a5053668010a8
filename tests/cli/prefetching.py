"""Ends while fairseq still prepares batches: ``python prefetching.py``, with the plugin as the first argument."""

import importlib
import sys
from pathlib import Path

import torch
from fairseq.data.iterators import BufferedIterator

plugin = Path(sys.argv[1])
sys.path.insert(0, str(plugin.parent))
importlib.import_module(plugin.name)


class Batches:
    def __len__(self):
        return 1_000_000

    def __iter__(self):
        while True:
            yield torch.rand(300_000).sort()[0]


next(BufferedIterator(10, Batches()))
