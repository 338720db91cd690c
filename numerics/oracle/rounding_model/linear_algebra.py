"""Functions of torch.linalg whose results are not unique, and matrices whose condition leaves no digit.

Vectors of a decomposition have no unique sign, and of equal eigenvalues no unique direction. So a decomposition is
checked by its values, by the product of its factors, and by their orthogonality, forward only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor, ...]


def _gram(vectors: Tensor) -> Tensor:
    return vectors.mH @ vectors


def qr(A: Tensor, mode: str = "reduced") -> Results:
    Q, R = torch.linalg.qr(A, mode)
    return (Q @ R, _gram(Q)) if mode != "r" else (R.abs(),)


def eigh(A: Tensor, UPLO: str = "L") -> Results:
    values, vectors = torch.linalg.eigh(A, UPLO)
    return values, vectors * values[..., None, :] @ vectors.mH, _gram(vectors)


def svd(A: Tensor, full_matrices: bool = True, **options: Any) -> Results:
    U, values, Vh = torch.linalg.svd(A, full_matrices, **options)
    count = values.shape[-1]
    product = U[..., :, :count] * values[..., None, :] @ Vh[..., :count, :]
    return values, product, _gram(U), _gram(Vh.mH)


DECOMPOSITIONS: dict[str, Callable[..., Results]] = {"qr": qr, "eigh": eigh, "svd": svd}
# The condition number of the first argument bounds the error of these.
CONDITIONED = {
    "solve", "solve_ex", "inv", "inv_ex", "inverse", "det", "logdet", "slogdet", "lstsq", "pinv", "cholesky",
    "cholesky_ex", "cholesky_solve", "cholesky_inverse", "lu", "lu_factor", "lu_solve", "ldl_factor", "ldl_solve",
    "solve_triangular", "triangular_solve", "tensorinv", "tensorsolve",
}  # fmt: skip
MOST = 0.1  # of n x condition x roundoff; above, the change of a result is not proportional to the error


def ill_conditioned(label: str, matrix: Tensor, dtype: torch.dtype) -> str:
    """Say that a matrix is too ill-conditioned for a dtype; "" where it is not, or where that does not matter.

    label: of the operation, as in "Torch.linalg.solve".
    """
    if label.rpartition(".")[2] not in CONDITIONED:
        return ""
    if matrix.dim() < 2 or not matrix.numel() or not bool(matrix.isfinite().all()):
        return ""
    values = torch.linalg.svdvals(matrix.to(torch.complex128 if matrix.is_complex() else torch.float64))
    condition = float((values[..., 0] / values[..., -1]).nan_to_num(nan=torch.inf).max())
    roundoff = torch.finfo(dtype).eps / 2
    limit = MOST / (roundoff * max(matrix.shape[-2:]))
    return f"ill-conditioned: a condition number of {condition:.2g}, at most {limit:.2g} can be checked" * (
        condition > limit
    )
