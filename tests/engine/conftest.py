"""Tiny models are fastest on one thread, above all on a busy machine."""

import torch

torch.set_num_threads(1)
