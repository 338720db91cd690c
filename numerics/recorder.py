"""Record what the steps of a training script compute, section 4.3.

    recorder = Recorder(RecorderConfig(dump_path="dump", step=(0, 1)))
    for ...:
        recorder.start(model)
        loss = ...; loss.backward()
        recorder.stop()
        recorder.step()

Level L0 records the calls of modules, L1 the calls of torch's functions and tensor methods, mix both. Recording never
changes a result of the step: statistics are computed beside it, gradients are observed on the graph as it is.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.hooks import RemovableHandle

from numerics.describe import SCALARS, describe, describe_tensor, resolve, tensors_in
from numerics.dump_files import CONSTRUCT, DUMP, STACK, TENSORS, rank_folder, write_json, write_tensor
from numerics.errors import NumericsError
from numerics.gradients import GradientWatch, sequence_number
from numerics.record_config import RecorderConfig

PREFIXES = {"torch.nn.functional.": "Functional.", "torch.Tensor.": "Tensor.", "torch.": "Torch."}
SILENT = {"backward", "requires_grad_", "register_hook", "retain_grad", "detach", "detach_", "zero_", "set_"}
OVERWRITING = {
    "copy_",
    "fill_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "trunc_normal_",
}
UNSET = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}  # their content is arbitrary
# torch gives x + y and x.add(y) one name; msProbe's is that of the operator.
OPERATORS = {"div": "__truediv__", "remainder": "__mod__"}
OPERATORS |= {name: f"__{name}__" for name in ("add", "sub", "mul", "matmul", "gt", "ge", "lt", "le", "ne")}
OPERATORS |= {f"{name}_": f"__i{name}__" for name in ("add", "sub", "mul")}
DEEPEST_STACK = 12  # frames
HERE = str(Path(__file__).parent)


def this_rank() -> int:
    """Return the rank of this process: of torch.distributed, else of torchrun's environment, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


@dataclass
class _Step:
    """The rows of the step that is being recorded."""

    data: dict[str, Any] = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # file name -> value
    calls: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    models: list[tuple[str, nn.Module]] = field(default_factory=list)
    roots: set[str] = field(default_factory=set)  # calls of the models that start() received


class Recorder:
    """Record the calls between start() and stop(), and write them at step()."""

    def __init__(self, config: RecorderConfig | None = None) -> None:
        self.config = config or RecorderConfig()
        self.iteration = 0
        self.busy = False  # while the recorder itself computes
        self.within: list[str] = []  # the modules that are running
        self._record = _Step()
        self._running = contextlib.ExitStack()
        self._active = self._has_rows = False
        self._scope_open = self._scope_ended = False

    # -- what a training script calls

    def start(self, model: nn.Module | Sequence[nn.Module] | None = None) -> None:
        """Begin to record. model: one or several modules; levels L0 and mix need it."""
        config = self.config
        if self._active or (config.step and self.iteration not in config.step):
            return
        if config.rank and this_rank() not in config.rank:
            return
        if model is None and config.level != "L1":
            raise NumericsError(f'level "{config.level}" needs the model; fix: start(model), or level "L1"')
        self._active = self._has_rows = True
        self._scope_open, self._scope_ended = not config.scope, False
        roots = (
            list(model)
            if isinstance(model, list | tuple)
            else [model]
            if isinstance(model, nn.Module)
            else []
        )
        self._run_eagerly(roots)
        if config.level != "L1":
            for number, root in enumerate(roots):
                self._watch_modules(root, f"{number}." if isinstance(model, list | tuple) else "")
        if config.level != "L0":
            self._running.enter_context(_Functions(self))

    def stop(self) -> None:
        """Stop recording. The gradients that the parameters have now are recorded."""
        if not self._active:
            return
        self._running.close()
        self._active = False
        self.within.clear()
        if self.config.wants("backward", "output"):
            for name, module in self._record.models:
                self._parameter_gradients(name, module)

    def step(self) -> None:
        """End the iteration, and write its record."""
        self.stop()
        if self._has_rows:
            self._write()
        self._record, self._has_rows = _Step(), False
        self.iteration += 1

    def note(self, text: str) -> None:
        """Add a line to the notes of the record."""
        self._record.notes.append(text)

    def abort(self) -> None:
        """Stop after an error in the step: remove every hook, and write what was recorded so far."""
        if self._has_rows:
            self.note("this record is not complete: the step ended with an error")
        self.step()

    # -- set-up

    def _run_eagerly(self, roots: Sequence[nn.Module]) -> None:
        """Run compiled code as written while the recorder is active: inside a compiled region nothing can be seen."""
        if "torch._dynamo" not in sys.modules:
            return
        self._running.enter_context(torch.compiler.set_stance("force_eager"))
        compiled = any(
            type(module).__name__ == "OptimizedModule" for root in roots for module in root.modules()
        )
        if compiled:
            self._record.notes.append(
                "this step ran without torch.compile; its rounding may differ from compiled steps"
            )

    def _watch_modules(self, root: nn.Module, index: str) -> None:
        for path, module in root.named_modules():
            parts = [part for part in path.split(".") if part != "_orig_mod"]
            label = ".".join(filter(None, ("Module", index.rstrip("."), *parts, type(module).__name__)))
            self._record.models.append((label, module))
            for handle in self._hooks(label, module, not path):
                self._running.callback(handle.remove)

    def _hooks(self, label: str, module: nn.Module, is_root: bool) -> Iterator[RemovableHandle]:
        calls: list[_Call] = []  # of this module, innermost last

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = self.open_call(label, "forward.{}", (args, kwargs), lambda: self._settings(module))
            calls.append(call)
            if call.name:
                self.within.append(call.name)
                if is_root:
                    self._record.roots |= {call.name, _backward(call.name)}

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if calls:
                call = calls.pop()
                if self.within and self.within[-1] == call.name:
                    self.within.pop()
                self.close_call(call, output)

        yield module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        yield module.register_forward_hook(after, with_kwargs=True, always_call=False)

    def _settings(self, module: nn.Module) -> dict[str, Any]:
        """Describe what a module computes with besides its inputs: its own parameters, buffers and settings."""
        state = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        return {
            "parameters": {name: value for name, value in state if value is not None},
            "settings": module_settings(module),
        }

    # -- the calls

    def recording(self) -> bool:
        """Return whether a call is recorded now: not the recorder's, and no recomputation during backward."""
        return self._active and not self.busy and torch._C._current_graph_task_id() == -1

    def open_call(
        self,
        label: str,
        ending: str,
        inputs: tuple[Any, Any],
        state: Callable[[], dict[str, Any]] | None = None,
    ) -> _Call:
        """Record the inputs of a call. ending: of its name, with a place for the number of the call."""
        if not self.recording():
            return _Call("", label, inputs, 0, False)
        number = self._record.calls.get(label, 0)
        self._record.calls[label] = number + 1
        name = f"{label}.{ending.format(number)}"
        back = _backward(name)
        parent = self.within[-1] if self.within else None
        if self.config.level != "L1":
            self._record.parents[name] = parent
            self._record.parents[back] = _backward(parent) if parent else None
        wanted = self._selected(name, label)
        if wanted:
            self._record.stacks[name] = _stack()
            row: dict[str, Any] = {}
            args, kwargs = inputs
            if self.config.wants("forward", "input"):
                row["input_args"] = self._described(name, "input", self._inputs(label, args))
                given = {key: value for key, value in kwargs.items() if key != "out"}  # may be uninitialised
                row["input_kwargs"] = self._described(name, "kwargs", given)
                for key, value in (state() if state else {}).items():
                    row[key] = self._described(name, key, value) if key == "parameters" else value
            self._record.data[name] = row
        return _Call(name, label, inputs, sequence_number(), wanted)

    def close_call(self, call: _Call, output: Any) -> None:
        """Record the output of a call, and observe the gradients that will pass it."""
        if not call.recorded or not self._active or call.name not in self._record.data:
            return
        self._record.data[call.name] = self._record.data.pop(
            call.name
        )  # in msProbe's order, by the end of calls
        if self.config.wants("forward", "output"):
            outputs = (
                list(output) if isinstance(output, tuple) and not hasattr(output, "_fields") else [output]
            )
            self._record.data[call.name]["output"] = self._described(call.name, "output", outputs)
        if torch.is_grad_enabled() and (
            self.config.wants("backward", "input") or self.config.wants("backward", "output")
        ):
            self._watch_gradients(call, output)

    def _inputs(self, label: str, args: Sequence[Any]) -> list[Any]:
        """Return the arguments, without the content of one that the function only overwrites."""
        given = list(args)
        if label.rpartition(".")[2] in OVERWRITING and given and isinstance(given[0], Tensor):
            with self._quietly():
                given[0] = torch.empty_like(given[0], device="meta")
        return given

    def forget(self, call: _Call) -> None:
        """Drop a call that computed nothing: a view, or no tensor."""
        for name in (call.name, _backward(call.name)):
            self._record.parents.pop(name, None)
        self._record.data.pop(call.name, None)
        self._record.stacks.pop(call.name, None)
        for file in [file for file in self._record.tensors if file.startswith(f"{call.name}.")]:
            del self._record.tensors[file]
        self._record.calls[call.label] -= 1

    def _watch_gradients(self, call: _Call, output: Any) -> None:
        inputs, outputs = tensors_in([list(call.inputs[0]), call.inputs[1]]), tensors_in(output)
        if not any(tensor.requires_grad for tensor in outputs):
            return
        counts = {"input": len(outputs), "output": len(inputs)}

        def report(side: str, index: int, gradient: Tensor) -> None:
            if not self.config.wants("backward", side) or not self._has_rows:
                return
            row = self._record.data.setdefault(_backward(call.name), {})
            entries = row.setdefault(side, [None] * counts[side])
            entries[index] = self._described(_backward(call.name), side, gradient, str(index))

        with self._quietly():
            GradientWatch(inputs, outputs, call.begin, report)

    def _parameter_gradients(self, label: str, module: nn.Module) -> None:
        name = f"{label}.parameters_grad.0"
        found = {
            part: [self._described(name, part, value.grad)]
            for part, value in module.named_parameters(recurse=False)
            if value.grad is not None
        }
        if found and self._listed(name):
            self._record.data[name] = found

    def _selected(self, name: str, label: str) -> bool:
        """Return whether `list` and `scope` include a call. A listed module includes the calls within it."""
        scope = self.config.scope
        if scope and not self._scope_ended:
            self._scope_open = self._scope_open or scope[0] in name
            if not self._scope_open:
                return False
            self._scope_ended = scope[1] in name
        elif scope:
            return any(scope[1] in outer for outer in self.within)
        return self._listed(name) or any(self._listed(outer) for outer in self.within)

    def _listed(self, name: str) -> bool:
        return not self.config.list or any(text in name for text in self.config.list)

    # -- values

    def _described(self, name: str, side: str, value: Any, place: str = "") -> Any:
        checksums, keep = self.config.summary_mode == "md5", self.config.task == "tensor"

        def of_tensor(tensor: Tensor, place: str) -> dict[str, Any]:
            entry = describe_tensor(tensor, checksums)
            if keep and not tensor.is_meta:
                file = ".".join(filter(None, (name, side, place))) + ".pt"
                entry["data_name"] = file
                copy = tensor.detach().clone(memory_format=torch.contiguous_format)
                self._record.tensors[file] = copy if self.config.async_dump else copy.cpu()
            return entry

        with self._quietly():
            return describe(value, of_tensor, place)

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def _parents(self) -> dict[str, str | None]:
        """Return the parents as msProbe's construct.json: without the root, which dump.json holds in ours."""
        roots = self._record.roots
        for name, row in self._record.data.items():
            if self._record.parents.get(name) in roots:
                row["parent"] = self._record.parents[name]
        return {name: None if parent in roots else parent for name, parent in self._record.parents.items()}

    def _write(self) -> None:
        folder = rank_folder(self.config.dump_path, self.iteration, this_rank())
        record, tensors = self._record, folder / TENSORS
        for name, tensor in record.tensors.items():
            write_tensor(tensors, name, tensor)
        stacks: dict[tuple[str, ...], list[str]] = {}
        for name, lines in record.stacks.items():
            stacks.setdefault(tuple(lines), []).append(name)
        write_json(
            folder / STACK,
            {str(number): [names, list(lines)] for number, (lines, names) in enumerate(stacks.items())},
        )
        write_json(folder / CONSTRUCT, self._parents())
        head = {
            "task": self.config.task,
            "level": self.config.level,
            "framework": "pytorch",
            "torch": torch.__version__,
            "notes": record.notes,
            "dump_data_dir": str(tensors) if record.tensors else None,
        }
        write_json(folder / DUMP, {**head, "data": resolve(record.data)})


@dataclass(frozen=True)
class _Call:
    """A call that runs. name: empty during a recomputation. begin: autograd's number before it."""

    name: str
    label: str
    inputs: tuple[Any, Any]
    begin: int
    recorded: bool


class _Functions(TorchFunctionMode):
    """Record the calls of torch's functions and of tensor methods."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        label = _label(func)
        if not label or not self.recorder.recording():
            return func(*args, **kwargs)
        before = tensors_in([list(args), kwargs])
        call = self.recorder.open_call(label, "{}.forward", (tuple(args), kwargs))
        output = func(*args, **kwargs)
        made = tensors_in(output)
        name = label.rpartition(".")[2]
        in_place = (name[-1:] == "_" != name[-2:-1]) or name.startswith("__i") or "out" in kwargs
        if call.recorded and (
            not made or (not in_place and all(_is_view(tensor, before) for tensor in made))
        ):
            self.recorder.forget(call)
        else:
            self.recorder.close_call(call, output)
        return output


def _is_view(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Return whether the tensor has the memory of one of the others: a view has their content."""
    if tensor.is_meta:
        return False
    place = tensor.untyped_storage().data_ptr()
    return any(
        not other.is_meta and other.untyped_storage().data_ptr() == place and tensor.numel()
        for other in others
    )


def _label(func: Any) -> str:
    """Return the name of a torch function, as in "Functional.linear"; empty for one that is not recorded."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__") or name in SILENT | UNSET:
        return ""
    full = resolve_name(func)
    if not full:
        return f"Torch.{name}" if name else ""
    prefix = next((prefix for prefix in PREFIXES if full.startswith(prefix)), "")
    name = str(full).removeprefix(prefix)
    if prefix == "torch.Tensor.":
        name = OPERATORS.get(name, name)
    return PREFIXES.get(prefix, "Torch.") + name


def _backward(name: str) -> str:
    """Return the name of the backward of a call."""
    head, _, tail = name.rpartition("forward")
    return f"{head}backward{tail}"


def module_settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module, functions among them by name: epsilon, dropout, activation.

    Only public ones, and no hooks or flags of torch's.
    """
    found: dict[str, Any] = {"class": f"{type(module).__module__}.{type(module).__qualname__}"}
    for name, value in vars(module).items():
        if name.startswith("_") or name in ("training", "call_super_init", "dump_patches"):
            continue
        if isinstance(value, SCALARS):
            found[name] = value
        elif isinstance(value, list | tuple) and all(isinstance(part, SCALARS) for part in value):
            found[name] = list(value)
        elif isinstance(value, torch.dtype | torch.device):
            found[name] = str(value)
        elif callable(value) and hasattr(value, "__qualname__"):
            found[name] = f"{value.__module__}.{value.__qualname__}"
    found["training"] = module.training
    return found


def _stack() -> list[str]:
    """Return the callers, innermost first, without those in torch and in this package."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < DEEPEST_STACK:
        path = frame.f_code.co_filename
        if not path.startswith(HERE) and f"{os.sep}torch{os.sep}" not in path:
            lines.append(f"File {path}, line {frame.f_lineno}, in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines
