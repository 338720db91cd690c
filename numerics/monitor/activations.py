"""Watch the modules of a model during forward and backward: activations, their gradients, and attention calls.

Hooks are installed for a monitored step only and change no result. Calls that backward recomputes (activation
checkpointing) are not counted twice. The inputs of a module within one that numerics.fix replaced may be converted
copies, whose gradients are those of this module alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from numerics.describe import tensors_in
from numerics.monitor.attention import AttentionCalls
from numerics.monitor.statistics import Pending
from numerics.monitor.targets import model_names
from numerics.record.backward_calls import in_reentrant_checkpoint, recomputes

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
