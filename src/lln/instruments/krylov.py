"""The largest eigenvalue of an operator that is known by its products alone: block Arnoldi with restarts.

Several vectors at a time, because forming the rows of P costs more than multiplying a few vectors with them. Not many,
because convergence comes with the degree of the polynomial in P, which is the number of products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BASIS = 480, 1024  # vectors before a restart from the leading ones: at least, at most, between them a quarter of N
GROWTH = 1.25  # the small eigenvalue problem is solved whenever the basis has grown so much
RESTARTS = 50
NOISE = 1e-12  # directions below this share of an image are rounding


def largest_eigenvalue(
    apply: Callable[[Tensor], Tensor], start: Tensor, tolerance: float, *, symmetric: bool = False
) -> float:
    """max |lambda| of a linear operator apply: [N, V] -> [N, V].

    Args:
        start: [N, V], the first block.
        tolerance: of the residuals of the leading Ritz pairs, relative to the largest value where that exceeds 1.
        symmetric: whether the operator is.

    Raises:
        RuntimeError where the residuals stay larger.
    """
    wanted = 1 if symmetric else 3  # a larger value of an unsymmetric operator may be late to show
    block, most, residual = start.shape[1], min(max(BASIS[0], start.shape[0] // 4), BASIS[1]), float("inf")
    for _ in range(RESTARTS):
        fresh = basis = span(start)
        projected = start.new_zeros(0, 0)  # basis^T apply(basis)
        passed = start.new_zeros(basis.shape[1], 0)  # fresh^T apply(the block before)
        solved = 0.0
        while fresh.shape[1]:
            known, now = projected.shape[0], basis.shape[1]
            image = apply(fresh)
            inside = basis.T @ image
            rest = image - basis @ inside
            again = basis.T @ rest  # once more, for what rounding left
            rest -= basis @ again
            grown = start.new_zeros(now, now)
            grown[:known, :known] = projected
            grown[known:, known - passed.shape[1] : known] = passed
            grown[:, known:] = inside + again
            projected = grown
            fresh = span(rest, basis, image.norm().item())
            full = now + fresh.shape[1] > most
            if full or now >= GROWTH * solved or not fresh.shape[1]:
                solved = now
                values, vectors = find_leading(projected, symmetric)
                largest = float(values[0].abs())
                # apply(basis y) - theta basis y = rest (last rows of y): it takes no further product.
                tail = vectors[known:, :wanted]
                residual = (rest.to(tail.dtype) @ tail).norm(dim=0).max().item()
                if residual <= tolerance * max(largest, 1.0) or not fresh.shape[1]:
                    return largest
            if full:
                break
            passed = fresh.T @ rest
            basis = torch.cat([basis, fresh], 1)
        else:
            return 0.0  # nothing to start from
        kept = vectors[:, :block]
        start = basis @ (torch.cat([kept.real, kept.imag], 1) if kept.is_complex() else kept)
    raise RuntimeError(
        f"the leading eigenvalues did not settle: residual {residual:.1e}, wanted {tolerance:.1e}; "
        "give spectral_gap or principal_std a larger tolerance."
    )


def find_leading(matrix: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, the largest first. Solved on the CPU, where such small problems are fastest."""
    small = matrix.cpu()
    values, vectors = torch.linalg.eigh((small + small.T) / 2) if symmetric else torch.linalg.eig(small)
    order = values.abs().argsort(descending=True)
    return values[order].to(matrix.device), vectors[:, order].to(matrix.device)


def span(t: Tensor, against: Tensor | None = None, size: float | None = None) -> Tensor:
    """An orthonormal basis [N, R] of the columns of t [N, V], orthogonal to `against`, without directions that are only
    noise beside `size` (default: the norm of t)."""
    size = t.norm().item() if size is None else size
    q, r = torch.linalg.qr(t)
    u, s, _ = torch.linalg.svd(r)
    q = q @ u[:, : int((s > NOISE * size).sum())]
    if against is not None:
        q = q - against @ (against.T @ q)
    basis: Tensor = torch.linalg.qr(q)[0]
    return basis
