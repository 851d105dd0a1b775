"""Fifty steps on 2 ranks with FSDP2. run_parity.py {trainer,fabric}: says how far the weights are from torch's Muon."""

from __future__ import annotations

import os
import sys

import torch

from tests.frameworks import parity
from tests.frameworks.common import say

LOOPS = {"trainer": lambda choice: parity.train_in_trainer(choice, os.environ["FOLDER"], shards=True),
         "fabric": lambda choice: parity.train_in_fabric(choice, shards=True)}

torch.manual_seed(0)
theirs, ours = map(LOOPS[sys.argv[1]], parity.theirs_and_ours(unscale_in_step=False))
say(deviation=parity.deviation(theirs, ours))
torch.distributed.barrier()
