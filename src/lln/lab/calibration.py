"""Measures the curves of `lln.matching.curves` on Gaussian queries and keys: what `lln calibrate` runs.

Every point is the mean over seeds, with its standard error. One seed's draws serve all points of a curve, so that the
noise they share cancels in its slope.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from lln.lab.core.progress import Progress
from lln.lab.core.seeds import normal
from lln.matching.curves import interpolate, pchip

BATCH_ELEMENTS = 2**24


@dataclasses.dataclass(frozen=True)
class CurvePlan:
    """What is measured. The shipped curves come from the defaults."""

    head_dims: tuple[int, ...] = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    lengths: tuple[int, ...] = (8, 16, 32, 64, 256, 1024, 4096, 16384)
    s2: tuple[float, ...] = tuple(0.01 * 1e5 ** (i / 40) for i in range(41))  # to 1000
    t: tuple[float, ...] = tuple(0.0025 * 4e4 ** (i / 30) for i in range(31))  # to 100: sigma_q = sigma_k to 3.2
    variance_seeds: int = 20
    variance_rows: int = 512
    variance_keys: int = 8192
    entropy_seeds: int = 512
    entropy_rows: int = 64

    def steps(self) -> int:
        batches = sum(len(self.batches(length)) for length in self.lengths)
        return len(self.head_dims) * (self.variance_seeds + batches)

    def batches(self, length: int) -> list[range]:
        """The seeds of an entropy curve in groups that are computed at once, of about BATCH_ELEMENTS entries of P."""
        size = max(BATCH_ELEMENTS // (self.entropy_rows * length), 1)
        return [range(first, min(first + size, self.entropy_seeds)) for first in range(0, self.entropy_seeds, size)]


def within_row_variance(z_q: Tensor, z_k: Tensor, s2: float) -> Tensor:
    """E_i var_j log n_ij with n_ij = sum_c exp(alpha q_ic + beta k_jc), for unit-variance z and s2 split equally.

    log P and log n differ by a constant in each row, so this is the variance of log P within a row, free of N."""
    a = math.sqrt(s2 / 2)
    log_n: Tensor = ((a * z_q).exp() @ (a * z_k).exp().T).log()
    return log_n.var(-1).mean()


def lln_entropy(z_q: Tensor, z_k: Tensor, s2: float) -> Tensor:
    """Mean entropy in bits of the rows of P_LLN, for z_q [..., R, D] and z_k [..., N, D]."""
    x = math.sqrt(s2 / 2) * z_k
    a = (math.sqrt(s2 / 2) * z_q + x.logsumexp(-2, keepdim=True)).softmax(-1)
    return row_entropy(a @ x.softmax(-2).transpose(-1, -2))


def softmax_entropy(z_q: Tensor, z_k: Tensor, t: float) -> Tensor:
    """Mean entropy in bits of the rows of softmax attention whose scores have variance t."""
    return row_entropy((math.sqrt(t / z_q.shape[-1]) * z_q @ z_k.transpose(-1, -2)).softmax(-1))


def row_entropy(p: Tensor) -> Tensor:
    nats: Tensor = torch.special.entr(p).sum(-1)
    return nats.mean(-1) / math.log(2)


def average_runs(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(mean, standard error) of each element over the runs."""
    values = torch.stack(rows).cpu()
    return values.mean(0), values.std(0) / math.sqrt(len(rows))


def measure(plan: CurvePlan, seed: int, device: torch.device, progress: Progress) -> dict[str, Any]:
    """The curves, ready for JSON. `progress` hears of each of plan.steps() steps."""
    variance, entropy = {}, {}
    for dim in plan.head_dims:
        runs = []
        for run in range(plan.variance_seeds):
            z_q = normal((seed, dim, 0, run), plan.variance_rows, dim, device=device)
            z_k = normal((seed, dim, 0, run, 1), plan.variance_keys, dim, device=device)
            runs.append(torch.stack([within_row_variance(z_q, z_k, s2) for s2 in plan.s2]))
            progress(f"variance, head dim {dim}")
        value, error = average_runs(runs)
        variance[dim] = {"value": value.tolist(), "se": error.tolist()}
        entropy[dim] = {length: invert_entropy(plan, dim, length, seed, device, progress) for length in plan.lengths}
    fields = dataclasses.asdict(plan)
    names = ("head_dims", "lengths", "s2", "t")
    return {
        **{name: fields.pop(name) for name in names},
        "settings": fields,
        "variance": variance,
        "entropy": entropy,
    }


def invert_entropy(
    plan: CurvePlan, dim: int, length: int, seed: int, device: torch.device, progress: Progress
) -> dict[str, list[float]]:
    """s2 for every t, and its standard error, by inverting the entropy of LLN at the entropy of softmax."""
    lln_runs: list[Tensor] = []
    softmax_runs: list[Tensor] = []
    for runs in plan.batches(length):
        z_q = torch.stack([normal((seed, dim, length, run), plan.entropy_rows, dim, device=device) for run in runs])
        z_k = torch.stack([normal((seed, dim, length, run, 1), length, dim, device=device) for run in runs])
        lln_runs += torch.stack([lln_entropy(z_q, z_k, s2) for s2 in plan.s2], -1).unbind()
        softmax_runs += torch.stack([softmax_entropy(z_q, z_k, t) for t in plan.t], -1).unbind()
        progress(f"entropy, head dim {dim}, {length} keys")
    # The deficit log2 N - H is what is matched: in logarithms it is nearly straight from flat to concentrated.
    flat = math.log2(length)
    lln, lln_error = average_runs([flat - run for run in lln_runs])
    softmax, softmax_error = average_runs([flat - run for run in softmax_runs])
    log_s2 = torch.tensor(plan.s2, dtype=torch.float64).log()
    s2_of_deficit = pchip(lln.log(), log_s2)
    s2 = interpolate(softmax.log(), *s2_of_deficit)
    nudge = 1e-4
    slope = (interpolate(softmax.log() + nudge, *s2_of_deficit) - s2) / nudge
    # Both deficits are uncertain; the LLN one as much as at the nearest measured s2.
    relative = (lln_error / lln)[torch.bucketize(softmax, lln).clamp_max(len(lln) - 1)]
    error = s2.exp() * slope.abs() * (relative.square() + (softmax_error / softmax).square()).sqrt()
    return {"s2": s2.exp().tolist(), "se": error.tolist()}
