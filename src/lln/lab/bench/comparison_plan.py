"""What `lln compare` measures, decided before anything is."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from lln.lab.core.seeds import normal
from lln.peers import mechanisms

CPU = torch.device("cpu")
DEFAULT = ("softmax", "lln", "lln_diag", "elu", "performer", "cosformer", "nystromformer", "linformer")
TEMPERATURES = (0.5, 1.0, 2.0)
MATRIX_LENGTH = 512  # longest sequence whose P is formed
SLOWEST_MS = 20_000.0  # of one call; longer lengths of that mechanism are left out


@dataclasses.dataclass(frozen=True)
class Plan:
    names: tuple[str, ...] = DEFAULT
    lengths: tuple[int, ...] = (512, 2048)
    temperatures: tuple[float, ...] = TEMPERATURES
    batch: int = 1
    heads: int = 4
    dim: int = 64
    causal: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in mechanisms()]
        if unknown:
            raise ValueError(f"there is no mechanism {unknown[0]!r}; there are: {', '.join(mechanisms())}.")
        if not self.names or not self.lengths:
            raise ValueError("at least one mechanism and one length are needed.")

    @property
    def matrix_length(self) -> int:
        return min(max(self.lengths), MATRIX_LENGTH)

    def steps(self) -> int:
        return len(self.names) * (len(self.lengths) + len(self.temperatures))

    def inputs(self, length: int, sigma: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and k of this spread, v and a gradient, [batch, heads, length, dim]: the same for every mechanism."""
        found = []
        for side, scale in enumerate((sigma, sigma, 1.0, 1.0)):
            shape = self.batch * self.heads * length, self.dim
            t = normal((self.seed, self.dim, length, 0, side), *shape, device=CPU)
            t = t.view(self.batch, self.heads, length, self.dim) * scale
            found.append(t.to(self.device, self.dtype))
        q, k, v, g = found
        return q, k, v, g


def sigma_of(temperature: float) -> float:
    """sigma_q = sigma_k of Gaussian queries and keys at this temperature, eq. (5): tau = 1 / (sigma_q sigma_k)."""
    return 1.0 / math.sqrt(temperature)
