"""The table of operations: how rounding enters the result of a correct kernel, with its derivation or source.

`errors` applies the rows to the float64 reference. Sizes are in units of roundoff u of the dtype that a kernel
computes with: 2^-24 (float32), also for bfloat16 and float16, except in rows with `in_dtype`.

    inputs    each element of an input has an independent relative error of this size
    outputs   each element of the result has one
    absolute  each element of the result has an absolute error of u times this tensor

A sum of n terms is exact for terms with relative errors of at most gamma_(n-1), Higham, "Accuracy and Stability of
Numerical Algorithms" (2002), equation 4.4. For independent roundings sqrt(n) u takes the place of n u: Higham and Mary,
"A New Approach to Probabilistic Rounding Error Analysis" (2019), theorem 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numerics.describe import tensors_in

Arguments = Sequence[Any]
Terms = Callable[[Arguments, Sequence[Tensor]], int]


def no_change(terms: int) -> float:
    return 0.0


def root(terms: int) -> float:
    return math.sqrt(terms)


def ratio(args: Arguments, results: Sequence[Tensor]) -> int:
    """Return how many elements of the largest input enter one element of the smallest result."""
    sizes = [
        tensor.numel()
        for tensor in tensors_in(list(args))
        if tensor.is_floating_point() or tensor.is_complex()
    ]
    smallest = min((result.numel() for result in results if result.numel()), default=1)
    return max(1, -(-max(sizes, default=1) // smallest))


def inner(place: int) -> Terms:
    """Return the inner size of a matrix product, whose first factor is at `place`."""
    return lambda args, results: int(args[place].shape[-1])


def length(place: int) -> Terms:
    """Return the size of the dimension that the argument at `place` names."""
    return lambda args, results: int(args[0].shape[args[place]]) if args[0].dim() else 1


def columns(args: Arguments, results: Sequence[Tensor]) -> int:
    """Return the elements of a row of a layer norm: the product of the normalized shape."""
    sizes = next((part for part in args if isinstance(part, list | tuple) and part), [args[0].shape[-1]])
    return math.prod(sizes)


def rows_or_columns(args: Arguments, results: Sequence[Tensor]) -> int:
    """Return the longer sum of a layer norm's backward: over a row, or over the rows."""
    count = columns([part for part in args if not _are_flags(part)], results)
    return max(count, int(args[0].numel()) // max(count, 1))


def _are_flags(part: Any) -> bool:
    return isinstance(part, list | tuple) and all(isinstance(flag, bool) for flag in part)


def channel(args: Arguments, results: Sequence[Tensor]) -> int:
    """Return the elements of a channel or of a sequence, whichever are more."""
    x = args[0]
    return int(x.numel() // max(min(x.shape[:2]), 1) if x.dim() > 1 else x.numel())


def repeats(args: Arguments, results: Sequence[Tensor]) -> int:
    """Return how often the most frequent index occurs."""
    indices = [tensor for tensor in tensors_in(list(args)) if tensor.dtype in (torch.int32, torch.int64)]
    counts = [int(index.flatten().unique(return_counts=True)[1].max()) for index in indices if index.numel()]
    return max(counts, default=1)


def pixels(args: Arguments, results: Sequence[Tensor]) -> int:
    """Return the longest sum of a convolution: over a kernel, and in backward over the batch and its positions."""
    received, x, weight = [*args][:3] if len(args) > 9 else (args[0], args[0], args[1])
    sums = weight.numel() // weight.shape[0], received.numel() // received.shape[1], x.numel() // x.shape[1]
    return max(map(int, sums))


def gelu_terms(args: Arguments, terms: int) -> Tensor:
    """Return the terms that cancel in x Phi(x)."""
    return torch.as_tensor(2 * args[0].abs())


def gelu_backward_terms(args: Arguments, terms: int) -> Tensor:
    """Return the terms that cancel in g (Phi(x) + x phi(x)), with g at place 0 and x at 1."""
    return torch.as_tensor(4 * args[0].abs() * (1 + args[1].abs()))


def logarithm(args: Arguments, terms: int) -> Tensor:
    return torch.tensor(4 + math.sqrt(terms), dtype=torch.float64)


@dataclass(frozen=True)
class BoundRule:
    """A row of the table. names: of torch.ops.aten, without overloads. why: its derivation or source.

    exact: every result is representable. products: of matrices. stored: intermediate results may be rounded to the
    dtype of the tensors. in_dtype: sums are in the dtype of the tensors, also in one of 16 bits. normwise: the
    errors of an input are relative to the root mean square of its matrix, not to each element.
    """

    kind: str
    names: str
    why: str
    terms: Terms = lambda args, results: 1
    inputs: Callable[[int], float] = no_change
    outputs: Callable[[int], float] = no_change
    absolute: Callable[[Arguments, int], Tensor] | None = None
    products: bool = False
    exact: bool = False
    stored: bool = False
    in_dtype: bool = False
    normwise: bool = False


EXACT = BoundRule(
    "copy, choice, comparison",
    "view _unsafe_view reshape _reshape_alias transpose t permute expand slice select as_strided split "
    "split_with_sizes unbind unsqueeze squeeze cat stack clone copy copy_ _to_copy detach alias "
    "contiguous neg abs relu relu_ threshold threshold_backward where masked_fill masked_fill_ index "
    "gather index_select embedding maximum minimum clamp clamp_min clamp_max max min amax amin argmax "
    "argmin sort topk eq ne lt le gt ge ones_like zeros_like empty_like full_like new_zeros new_empty "
    "new_ones zeros ones empty full fill fill_ zero_ scalar_tensor arange tril triu repeat flip roll "
    "constant_pad_nd sign sgn round floor ceil trunc bitwise_and bitwise_or bitwise_not logical_and "
    "logical_or logical_not isnan isinf isfinite any all nonzero lift_fresh slice_backward "
    "select_backward diagonal unfold max_pool2d_with_indices max_pool2d_with_indices_backward "
    "slice_scatter select_scatter value_selecting_reduction_backward hardtanh native_dropout_backward "
    "_local_scalar_dense item masked_select movedim narrow view_as expand_as broadcast_to flatten "
    "unflatten resize_ empty_strided new_empty_strided new_full set_ scatter index_fill masked_scatter "
    "linspace",
    "Every result is representable, so that any error is wrong.",
    exact=True,
)
OTHER = BoundRule(
    "other",
    "",
    "No row for this operation: as a function of sums over n = inputs / results terms, of inputs that may be rounded.",
    terms=ratio,
    inputs=root,
    outputs=lambda n: 4 + math.sqrt(n),
    stored=True,
)
RULES = (
    EXACT,
    BoundRule(
        "arithmetic",
        "add add_ sub sub_ rsub mul mul_ square",
        "Correctly rounded: half a unit in the last place (IEEE 754-2019, section 4.3). A number that the dtype cannot "
        "hold, such as 0.1, is rounded to it.",
    ),
    BoundRule(
        "division",
        "div div_ reciprocal sqrt sqrt_ addcmul addcmul_ addcdiv addcdiv_ lerp lerp_ nll_loss_backward",
        "Two roundings: x / s may be computed as x (1 / s), x + s y z rounds the product, fast roots are off by "
        "more than half a unit (Higham 2002, section 3.1).",
        inputs=lambda n: 1,
        outputs=lambda n: 1,
    ),
    BoundRule(
        "function",
        "exp exp_ exp2 expm1 log log_ log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh tanh_ "
        "sigmoid sigmoid_ erf erfc silu silu_ softplus mish elu leaky_relu hardswish "
        "log_sigmoid log_sigmoid_forward atan2 logaddexp",
        "At most 4 units in the last place: the largest error that the CUDA C++ Programming Guide (mathematical "
        "functions) and SLEEF (u10, u35) state for these.",
        outputs=lambda n: 4,
    ),
    BoundRule(
        "power",
        "pow pow_ rsqrt rsqrt_",
        "As a function; x^3 may be x x x, and x^(-1/2) may be 1 / sqrt(x), with each part rounded to the dtype.",
        outputs=lambda n: 4,
        stored=True,
    ),
    BoundRule(
        "derivative of a function",
        "tanh_backward sigmoid_backward silu_backward softplus_backward mish_backward elu_backward "
        "leaky_relu_backward hardswish_backward log_sigmoid_backward",
        "A function, 4 u, of inputs and of a difference such as 1 - y^2, each with a relative error of 2 u.",
        inputs=lambda n: 2,
        outputs=lambda n: 4,
    ),
    BoundRule(
        "GELU",
        "gelu",
        "x Phi(x) by 1 + erf or 1 + tanh: a function, 4 u, and an absolute error of 2 u |x| where the sum cancels.",
        outputs=lambda n: 4,
        absolute=gelu_terms,
    ),
    BoundRule(
        "derivative of GELU",
        "gelu_backward",
        "Phi(x) + x phi(x) times the gradient g: each term a function, 4 u, with errors of 4 u |g| (1 + |x|) where "
        "they cancel.",
        outputs=lambda n: 4,
        absolute=gelu_backward_terms,
    ),
    BoundRule(
        "sum",
        "sum mean nansum trace",
        "Each term has a relative error of sqrt(n) u (Higham 2002, 4.4; Higham and Mary 2019).",
        terms=ratio,
        inputs=lambda n: math.sqrt(n - 1) + (n > 1),
    ),
    BoundRule(
        "running sum",
        "cumsum",
        "As a sum; the last element has n terms.",
        terms=length(1),
        inputs=root,
    ),
    BoundRule(
        "loss",
        "nll_loss_forward nll_loss2d_forward nll_loss",
        "A sum over the targets, on some devices in the dtype of the tensors, and a division: sqrt(n) u.",
        terms=lambda args, results: int(args[1].numel()),
        inputs=root,
        outputs=lambda n: 1,
        in_dtype=True,
    ),
    BoundRule(
        "matrix product",
        "mm bmm mv dot vdot",
        "Sums of n products: |error| <= sqrt(n) u |A| |B| (Higham 2002, 3.13; Higham and Mary 2019, theorem 3.4).",
        terms=inner(0),
        inputs=root,
        products=True,
    ),
    BoundRule(
        "matrix product and sum",
        "addmm addmm_ baddbmm baddbmm_ addmv addbmm",
        "As a matrix product. The product may be rounded to the dtype before the sum.",
        terms=inner(1),
        inputs=root,
        products=True,
        stored=True,
    ),
    BoundRule(
        "linear layer",
        "linear",
        "As a matrix product and sum.",
        terms=inner(0),
        inputs=root,
        products=True,
        stored=True,
    ),
    BoundRule(
        "convolution",
        "convolution _convolution convolution_backward",
        "Sums of n products, as a matrix product; fast algorithms such as Winograd's have a larger constant.",
        terms=pixels,
        inputs=lambda n: 4 * math.sqrt(n),
        products=True,
        stored=True,
    ),
    BoundRule(
        "softmax",
        "_softmax _safe_softmax",
        "exp(x - max) / sum: the difference has 2 u of |x|, the function 4 u, the sum of n positive terms sqrt(n) u "
        "(Blanchard, Higham and Higham, 'Accurately computing the log-sum-exp and softmax functions', 2021).",
        terms=length(1),
        inputs=lambda n: 2,
        outputs=lambda n: 4 + math.sqrt(n),
    ),
    BoundRule(
        "log-softmax",
        "_log_softmax",
        "x - max - log(sum): the differences have 2 u of |x|, the logarithm an absolute error of (4 + sqrt(n)) u "
        "(Blanchard, Higham and Higham 2021).",
        terms=length(1),
        inputs=lambda n: 2,
        outputs=lambda n: 4,
        absolute=logarithm,
        stored=True,
    ),
    BoundRule(
        "log of a sum",
        "logsumexp",
        "As log-softmax.",
        terms=ratio,
        inputs=lambda n: 2,
        outputs=lambda n: 4,
        absolute=logarithm,
        stored=True,
    ),
    BoundRule(
        "derivative of softmax",
        "_softmax_backward_data _log_softmax_backward_data",
        "y (g - sum g y), or g - exp(y) sum g: sums over the row of n terms, sqrt(n) u, and a function, 4 u.",
        terms=length(2),
        inputs=root,
        outputs=lambda n: 4,
    ),
    BoundRule(
        "norm of rows",
        "native_layer_norm _fused_rms_norm rms_norm",
        "(x - mean) / sqrt(var + eps): mean and variance are sums of n terms, sqrt(n) u in each; the inverse root is a "
        "function, 4 u (Higham 2002, section 1.9).",
        terms=columns,
        inputs=root,
        outputs=lambda n: 4 + math.sqrt(n),
    ),
    BoundRule(
        "derivative of a norm of rows",
        "native_layer_norm_backward _fused_rms_norm_backward",
        "Sums of n terms over a row, and over the rows for weight and bias: sqrt(n) u in each, and a function, 4 u. "
        "Some devices add the rows in the dtype of the tensors.",
        terms=rows_or_columns,
        inputs=root,
        outputs=lambda n: 4 + math.sqrt(n),
        in_dtype=True,
    ),
    BoundRule(
        "norm of channels",
        "native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward "
        "_native_batch_norm_legit _batch_norm_with_update batch_norm_backward",
        "As a norm of rows, over the elements of a channel or a sequence.",
        terms=channel,
        inputs=root,
        outputs=lambda n: 4 + math.sqrt(n),
        stored=True,
    ),
    BoundRule(
        "variance or norm of a vector",
        "var std var_mean std_mean norm linalg_vector_norm",
        "A sum of n squares, sqrt(n) u, and a function, 4 u.",
        terms=ratio,
        inputs=root,
        outputs=lambda n: 4 + math.sqrt(n),
    ),
    BoundRule(
        "product",
        "prod",
        "A product of n factors, on some devices in the dtype of the tensors: sqrt(n) u (Higham 2002, lemma 3.1).",
        terms=ratio,
        inputs=root,
        in_dtype=True,
    ),
    BoundRule(
        "scatter-add",
        "embedding_dense_backward index_add index_add_ scatter_add scatter_add_ index_put index_put_ "
        "_index_put_impl_ scatter_reduce _unsafe_index_put",
        "An index that occurs n times is a sum of n terms, in the dtype of the tensors on some devices: sqrt(n) u.",
        terms=repeats,
        inputs=root,
        in_dtype=True,
    ),
    BoundRule(
        "linear algebra",
        "_linalg_solve_ex linalg_inv_ex linalg_lu_factor_ex linalg_lu linalg_lu_solve _linalg_det _linalg_slogdet "
        "linalg_cholesky_ex cholesky_solve cholesky_inverse linalg_solve_triangular triangular_solve linalg_lstsq "
        "linalg_qr _linalg_eigh _linalg_svd linalg_ldl_factor_ex linalg_ldl_solve linalg_matrix_exp "
        "linalg_householder_product",
        "Backward stable: the exact result for a matrix A + E, with a norm of E of at most n u times that of A (Higham "
        "2002, theorems 9.5, 10.3 and 19.4; Golub and Van Loan, 'Matrix Computations', 2013, sections 5.4 and 8.6). So "
        "the bound has the condition number.",
        terms=lambda args, results: int(args[0].shape[-1]) if args[0].dim() > 1 else 1,
        inputs=lambda n: n,
        outputs=lambda n: 4 + math.sqrt(n),
        normwise=True,
    ),
)
BY_NAME: Mapping[str, BoundRule] = {name: rule for rule in RULES for name in rule.names.split()}


def rule_of(name: str, args: Arguments = ()) -> BoundRule:
    """Return the row of an operation of torch.ops.aten, such as "mm". Size and sign of complex numbers are rounded."""
    if name in ("abs", "sgn") and any(tensor.is_complex() for tensor in tensors_in(list(args))):
        return OTHER
    return BY_NAME.get(name) or BY_NAME.get(name.removesuffix("_"), OTHER)  # round_ overwrites as round
