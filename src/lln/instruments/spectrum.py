"""The spectral gap of a map, and the spread along its first principal component: Theorem 3.3 as it really holds.

The theorem says |lambda_2| = sigma_1, the largest singular value of the centred P. Only |lambda_2| <= sigma_1 is true,
so that these are two instruments. Both come from the centred matrix P - 1 mu^T, mu the mean of the rows, whose
eigenvalues are those of P without lambda_1 = 1:

    bidirectional LLN, kernels   P = A B^T: the eigenvalues of the small matrix B^T A, the singular values of R_A R_B^T
    causal maps                  the eigenvalues are the diagonal
    softmax, LLN+Diag, dense     short ones dense, longer ones by block Arnoldi with products over rows
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lln.instruments.heads import Heads
from lln.instruments.maps import AttentionMap, check_map
from lln.values import check_positive

DENSE = 256  # up to so many tokens all eigenvalues at once are cheaper than the products of an iteration
GRAM_ERROR = 1e-11  # relative, of sigma_1^2
BLOCK = 8  # vectors that an iteration starts from
BASIS = 480, 1024  # vectors before a restart from the leading ones: at least, at most, between them a quarter of N
GROWTH = 1.25  # the small eigenvalue problem is solved whenever the basis has grown so much
RESTARTS = 50
NOISE = 1e-12  # directions below this share of an image are rounding


@torch.no_grad()
def spectral_gap(p: AttentionMap, *, tolerance: float = 1e-7) -> Tensor:
    """Measure the spectral gap 1 - |lambda_2| of P, [batch, heads]: 1 if all rows are alike, 0 if a part of the
    sequence never mixes with the rest.

    lambda_2 is the second eigenvalue by absolute value. A single token has none, and its gap is 1. The gap is exact for
    LLN, kernel and causal maps.

    Args:
        tolerance: tolerance of the iteration for long softmax, LLN+Diag and dense maps.

    Raises:
        ValueError: for a map between two sequences, which has no eigenvalues.
        RuntimeError: if the iteration does not reach the tolerance.

    Example:
        >>> from lln.instruments import dense_map
        >>> gaps = (spectral_gap(dense_map(p)).item() for p in (torch.full((4, 4), 0.25), torch.eye(4)))
        >>> [round(gap, 6) for gap in gaps]  # all rows alike; nothing mixes
        [1.0, 0.0]
    """
    check_map(p)
    check_positive("tolerance", tolerance)
    if not p.one_sequence:
        raise ValueError(
            "spectral_gap: a map between two sequences has no eigenvalues, and rows and keys must be the same tokens; "
            f"got {p.rows} rows and {p.keys} keys"
            + (" with different masks" if p.rows == p.keys else "")
            + ". principal_std has no such need."
        )
    if p.factored:
        return 1.0 - factor_spectrum(p)[..., 0]
    return p.collect([1.0 - find_largest(p, group, False, tolerance) for group in p.groups()])


@torch.no_grad()
def principal_std(p: AttentionMap, *, tolerance: float = 1e-7) -> Tensor:
    """Measure the largest singular value of P - 1 mu^T, where mu is the mean of the rows of P: [batch, heads].

    Its square is the spread of the rows around their mean along their first principal component (not divided by their
    number). |lambda_2| is at most this; it can exceed 1. Exact for bidirectional LLN and kernel maps.

    Args:
        tolerance: tolerance of the iteration for other maps that are long.

    Raises:
        RuntimeError: if the iteration does not reach the tolerance.

    Example: it bounds the second eigenvalue.
        >>> from lln.instruments import lln_map
        >>> q, k = torch.randn(2, 1, 2, 32, 8, generator=torch.Generator().manual_seed(0))
        >>> p = lln_map(q, k, 2.0, 2.0)
        >>> bool((1 - spectral_gap(p) <= principal_std(p)).all())
        True
    """
    check_map(p)
    check_positive("tolerance", tolerance)
    if p.factored:
        return factor_spectrum(p)[..., 1]
    return p.collect([find_largest(p, group, True, tolerance) for group in p.groups()])


def factor_spectrum(p: AttentionMap) -> Tensor:
    """(|lambda_2|, sigma_1) of a map P = A B^T, [batch, heads, 2]: both from one pass over the tokens, and kept."""
    if p.spectrum is None:
        found = []
        for group in p.groups():
            a, b = group.factors() or (torch.empty(0), torch.empty(0))
            # Rows of P sum to 1, so that the centred P has a mean of 0 in rows, too, and B may be centred as well as A:
            # at high temperatures hardly anything else is left of them.
            a, b = centre(group, a), centre(group, b, group.seen)
            first = singular_of_factors(a, b)
            second = torch.full_like(first, torch.nan)
            if p.one_sequence and p.rows:  # the nonzero eigenvalues of A B^T and of B^T A are the same
                second = top_eigenvalue(b.transpose(1, 2) @ a if a.shape[2] < p.rows else a @ b.transpose(1, 2))
            found.append(torch.stack([second, first], 1))
        p.spectrum = p.collect(found)
    return p.spectrum


def singular_of_factors(a: Tensor, b: Tensor) -> Tensor:
    """The largest singular value of A B^T, [G]."""
    if 0 in a.shape or 0 in b.shape:
        return a.new_zeros(len(a))
    if a.shape[1] <= a.shape[2]:
        return top_singular(a @ b.transpose(1, 2))
    gram_a, gram_b = a.transpose(1, 2) @ a, b.transpose(1, 2) @ b
    values, vectors = torch.linalg.eigh(gram_b)
    root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(1)
    square: Tensor = torch.linalg.eigvalsh(root.transpose(1, 2) @ gram_a @ root)[:, -1].clamp_min(0.0)
    # Grams square the sizes, and with them the rounding beside a sigma_1 that is small because A and B hardly meet.
    # Then the triangles of A and B serve, at ten times the cost.
    trace_a, trace_b = (gram.diagonal(dim1=1, dim2=2).sum(1) for gram in (gram_a, gram_b))
    rounding = torch.finfo(a.dtype).eps * trace_a * trace_b
    if bool((rounding > GRAM_ERROR * square).any()):
        r_a, r_b = (torch.linalg.qr(side, mode="r")[1] for side in (a, b))
        return top_singular(r_a @ r_b.transpose(1, 2))
    return square.sqrt()


def find_largest(p: AttentionMap, heads: Heads, singular: bool, tolerance: float) -> Tensor:
    """max |lambda| of the centred P of these heads, or their largest singular value: [G]."""
    if not heads.rows or not heads.keys:
        return heads.make_full(0.0)
    if heads.is_causal and not singular:
        # The first row sees one key, so that the first eigenvalue is 1 and need not be looked for.
        top = torch.where(heads.live, heads.diagonal(), 0.0).topk(min(2, heads.rows), 1).values
        return top[:, 1] if heads.rows > 1 else torch.zeros_like(top[:, 0])
    if min(heads.rows, heads.keys) <= DENSE:
        centred = centre(heads, heads.make_dense())
        return top_singular(centred) if singular else top_eigenvalue(centred)
    return torch.stack([iterate(p.select_heads(one), singular, tolerance) for one in heads.index.split(1)])


def centre(heads: Heads, rows: Tensor, counts: Tensor | None = None) -> Tensor:
    """rows [G, N, F] minus their mean over those that count, by default live rows; the others stay zero."""
    counts = heads.live if counts is None else counts
    apart = rows - rows.sum(1, keepdim=True) / counts.sum(1).clamp_min(1)[:, None, None]
    return apart.mul_(counts.unsqueeze(-1)) if heads.padded else apart


def top_eigenvalue(matrices: Tensor) -> Tensor:
    """max |eigenvalue| of [G, n, n]. On the CPU, where such small unsymmetric problems are solved fastest."""
    largest: Tensor = torch.linalg.eigvals(matrices.cpu()).abs().amax(1)
    return largest.to(matrices)


def top_singular(matrices: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.matrix_norm(matrices, 2)
    return largest


def iterate(heads: Heads, singular: bool, tolerance: float) -> Tensor:
    """max |lambda| of the centred P of one head, or its largest singular value."""
    live = heads.live.to(heads.dtype).unsqueeze(-1)  # [1, N, 1]
    count = live.sum().clamp_min(1)

    def forward(x: Tensor) -> Tensor:
        y = heads.multiply(x.unsqueeze(0))
        return ((y - y.sum(1, keepdim=True) / count) * live)[0]

    def apply_gram(x: Tensor) -> Tensor:
        return heads.multiply_transposed(forward(x).unsqueeze(0))[0]  # forward(x) is centred already

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(live)

    generator = torch.Generator().manual_seed(0)
    start = draw(heads.rows, BLOCK) * live[0]
    known = heads.start()
    if known is not None:
        mixed = centre(heads, known)[0] @ draw(known.shape[-1], BLOCK // 2)
        mixed, start = mixed / mixed.norm().clamp_min(1e-30), start / start.norm().clamp_min(1e-30)
        start = torch.cat([mixed, start[:, BLOCK // 2 :]], 1)
    if not singular:
        return live.new_tensor(largest_eigenvalue(forward, start, tolerance))
    start = heads.multiply_transposed(centre(heads, start.unsqueeze(0)))[0]
    return live.new_tensor(largest_eigenvalue(apply_gram, start, tolerance, symmetric=True)).sqrt()


def largest_eigenvalue(
    apply: Callable[[Tensor], Tensor], start: Tensor, tolerance: float, *, symmetric: bool = False
) -> float:
    """max |lambda| of a linear operator apply: [N, V] -> [N, V], known by its products alone: block Arnoldi with
    restarts. Several vectors at a time, because forming the rows of P costs more than multiplying a few vectors with
    them. Not many, because convergence comes with the degree of the polynomial in P, which is the number of products.

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
                # On the CPU, where such small problems are solved fastest.
                small = projected.cpu()
                values, vectors = torch.linalg.eigh((small + small.T) / 2) if symmetric else torch.linalg.eig(small)
                order = values.abs().argsort(descending=True)
                largest = float(values[order[0]].abs())
                vectors = vectors[:, order].to(start.device)
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
