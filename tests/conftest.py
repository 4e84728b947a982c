"""One thread a test process: the suite runs in parallel, and two OpenMP pools on two cores wait for each other."""

import torch

torch.set_num_threads(1)
