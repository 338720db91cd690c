"""Watch the modules of a model during forward and backward: activations, their gradients, and attention calls.

Hooks are installed for a monitored step only and change no result. Calls that backward recomputes (activation
checkpointing) are not counted twice. The inputs of a module within one that referee.numerics.fix replaced may be
converted copies, whose gradients are those of this module alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from referee.numerics.describe import tensors_in
from referee.numerics.monitor.statistics import Pending
from referee.numerics.monitor.targets import model_names
from referee.numerics.record.function_calls import in_reentrant_checkpoint, recomputes

BLOCK = {"cpu": 2**18}  # scores at once: 1 MB, which fits in the cache
DEVICE_BLOCK = 2**24  # on another device: 64 MB
CAUSAL_BLOCKS = 8  # of queries: a block reads the keys up to its last query, 9/16 of all in the mean
HIDDEN = -1e30  # the score of what the mask hides: finite, so that 0 x HIDDEN is 0
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
ATTENTION = "scaled_dot_product_attention"
Report = Callable[[Tensor], None]


class AttentionCalls(TorchFunctionMode):
    """Report (entropy, largest logit, queries) of each call, a tensor (3,), before the call runs.

    Calls within another function of torch, as nn.MultiheadAttention's, are not observed.
    """

    def __init__(
        self, report: Report, watching: Callable[[], bool], failed: Callable[[Exception], None]
    ) -> None:
        """watching: whether calls count now. failed: called with an error of the statistics."""
        super().__init__()
        self.report, self.watching, self.failed = report, watching, failed

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") == ATTENTION and self.watching():  # which seed_all may have wrapped
            call = dict(zip(ARGUMENTS, args, strict=False)) | given
            mask, causal, scale = call.get("attn_mask"), bool(call.get("is_causal", False)), call.get("scale")
            try:
                with torch.no_grad(), torch.autocast(call["query"].device.type, enabled=False):
                    self.report(attention_statistics(call["query"], call["key"], mask, causal, scale))
            except Exception as error:
                self.failed(error)
        return func(*args, **given)


def attention_statistics(
    query: Tensor, key: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return (mean entropy in nats, largest admitted logit, queries), (3,) float32, of one call.

    query (..., H, T, D), key (..., G, S, D) where G divides H, mask broadcastable to (..., H, T, S): bool or added.
    A query that may see nothing has entropy 0 and counts.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    T, S = query.shape[-2], key.shape[-2]
    repeats = query.shape[-3] // key.shape[-3] if query.dim() > 2 and key.dim() > 2 else 1
    if repeats > 1:
        key = key.repeat_interleave(repeats, -3)
    query_NTD, key_NSD = query.reshape(-1, T, query.shape[-1]), key.reshape(-1, S, key.shape[-1])
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], S).reshape(-1, T, S)
    block_size = BLOCK.get(query.device.type, DEVICE_BLOCK)
    heads, rows = max(1, block_size // (T * S)), max(1, min(T, block_size // S))
    rows = max(1, min(rows, T // CAUSAL_BLOCKS)) if causal else rows
    total = torch.zeros((), device=query.device, dtype=torch.float32)
    high = torch.full((), HIDDEN, device=query.device, dtype=torch.float32)
    for n in range(0, len(query_NTD), heads):
        key_nDS = key_NSD[n : n + heads].float().transpose(1, 2)
        for t in range(0, T, rows):
            block = slice(t, t + rows)
            seen = min(t + rows, S) if causal else S  # the keys that any query of the block may see
            scores = torch.matmul(query_NTD[n : n + heads, block].float() * scale, key_nDS[..., :seen])
            if causal:
                last = torch.arange(t, min(t + rows, T), device=query.device)[:, None]
                hidden = torch.arange(min(t, seen), seen, device=query.device) > last
                scores[..., min(t, seen) :].masked_fill_(hidden, HIDDEN)
            elif mask is not None:
                part = mask[n : n + heads, block]
                if part.dtype == torch.bool:
                    scores.masked_fill_(~part, HIDDEN)
                else:
                    scores = (scores + part.float()).masked_fill_(part == -math.inf, HIDDEN)
            top = scores.amax(-1, keepdim=True)
            terms = (scores - top).exp_()
            sums = terms.sum(-1)
            entropy = top.squeeze(-1) + sums.log() - torch.linalg.vecdot(terms, scores) / sums
            total += entropy.masked_fill_(
                top.squeeze(-1) <= HIDDEN, 0.0
            ).sum()  # but of a query that sees nothing
            high = torch.maximum(high, top.amax())
    queries = query_NTD.shape[0] * T
    high = torch.where(high <= HIDDEN, torch.full_like(high, -math.inf), high)
    return torch.stack([total / max(queries, 1), high, torch.full_like(high, queries)])


UNSEEN = "it is in torch.utils.checkpoint with use_reentrant=True; fix: use_reentrant=False"
Wanted = Callable[[str, str], bool]  # (kind, name)


class ActivationWatch:
    """Adds the statistics of a step to `pending`. Enter `watching` around forward and backward.

    One tensor is often the output of one module and the input of the next: it is read once, and both names have its
    statistics.
    """

    def __init__(self, pending: Pending, wanted: Wanted) -> None:
        self.pending, self.wanted = pending, wanted
        self.within: list[str] = []  # paths of the modules that run, innermost last
        self._ended = False
        self.calls: dict[str, int] = {}  # attention calls of a module, in this call of it
        self._read: Any = WeakIdKeyDictionary()  # tensor -> (version, key)
        self._hooked: Any = WeakIdKeyDictionary()  # tensor -> names of its gradient
        self._root: tuple[Any, nn.Module] | None = None  # the hook before the root's forward

    @contextlib.contextmanager
    def watching(self, root: nn.Module, attention: bool) -> Iterator[None]:
        """Install hooks on every module, and remove them at the end. attention: whether to watch its calls."""
        self._ended = False
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_ended", True)
            plain = model_names(root)
            # of a wrapper and the module in it, which have one name, the module
            for path, module in {plain(path): one for path, one in root.named_modules()}.items():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                for handle in self._hooks(path, module, module is root):
                    stack.callback(handle.remove)
            if attention:
                stack.enter_context(AttentionCalls(self._attention, self._in_model, self._failed))
            self.within.clear()
            yield

    def root_runs(self, args: Any, kwargs: Any) -> None:
        """Observe the call of the root that runs already: torch does not call hooks that such a call installs."""
        if self._root:
            before, root = self._root
            before(root, args, kwargs)

    def _in_model(self) -> bool:
        """Return whether a module of the model runs, and counts."""
        return bool(self.within) and not recomputes()

    def _hooks(self, path: str, module: nn.Module, is_root: bool) -> Iterator[Any]:
        def before(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            if self._ended:  # removed within the call of the module that has it, without kwargs
                return
            if not recomputes():
                self.within.append(path)
                self.calls[path] = 0
                self._observe(path, "input", tensors_in([list(args), kwargs]))
            elif in_reentrant_checkpoint() and self.wanted("actv_grad", f"{path}.input_grad.0"):
                self.pending.fail(("actv_grad", path), RuntimeError(UNSEEN))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not recomputes():
                self.within[-1:] = []
                self._observe(path, "output", tensors_in(output))

        self._root = (before, module) if is_root else self._root
        # compiled code would trace a hook: it runs beside it
        yield module.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True)
        yield module.register_forward_hook(torch.compiler.disable(after), with_kwargs=True)

    def _observe(self, path: str, side: str, tensors: Sequence[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            key = ("actv", f"{path}.{side}.{index}" if path else f"{side}.{index}")
            try:
                if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
                    continue
                if self.wanted(*key):
                    self._once(key, tensor)
                key = ("actv_grad", f"{path}.{side}_grad.{index}" if path else f"{side}_grad.{index}")
                if tensor.requires_grad and not tensor.is_leaf and self.wanted(*key):
                    self._gradient(key, tensor)
            except Exception as error:  # the observed run goes on
                self.pending.fail(key, error)

    def _once(self, key: tuple[str, str], tensor: Tensor) -> None:
        version, first = self._read.get(tensor, (None, None))
        if first is not None and version == tensor._version and first[0] == key[0]:
            self.pending.alias(key, first)
            return
        self._read[tensor] = (tensor._version, key)
        self.pending.add(key, tensor)

    def _gradient(self, key: tuple[str, str], tensor: Tensor) -> None:
        names = self._hooked.get(tensor)
        if names is not None:
            if key not in names:  # a module that reads the tensor twice has the sum over both uses
                names.append(key)
            return
        mine = self._hooked[tensor] = [key]
        pending = self.pending  # without this object, which holds the tensor

        def hook(gradient: Tensor) -> None:
            pending.add(mine[0], gradient)
            for other in mine[1:]:
                pending.alias(other, mine[0])

        tensor.register_hook(hook)

    def _attention(self, values: Tensor) -> None:
        name = self._call()
        if self.wanted("attention", name):
            self.pending.add_values(("attention", name), values)

    def _failed(self, error: Exception) -> None:
        self.pending.fail(("attention", self._call()), error)

    def _call(self) -> str:
        """Count an attention call of the innermost module, and return its name."""
        path = self.within[-1]
        number = self.calls.get(path, 0)
        self.calls[path] = number + 1
        return f"{path}.sdpa.{number}" if path else f"sdpa.{number}"
