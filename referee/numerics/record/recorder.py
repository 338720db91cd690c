"""Record what the steps of a training script compute, section 4.3.

    recorder = Recorder(RecorderConfig(dump_path="dump", step=(0, 1)))
    for ...:
        recorder.start(model)
        loss = ...; loss.backward()
        recorder.stop()
        recorder.step()

Level L0 records the calls of modules, L1 the calls of torch's functions and tensor methods, mix both. Recording never
changes a result of an eager step: statistics are computed alongside, gradients are observed on the graph as it is.
Compiled code runs as written, which the record says.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from referee.errors import NumericsError, described
from referee.numerics.describe import describe, is_wrapped, module_settings, plain_values, tensors_in
from referee.numerics.record.captured_steps import (
    CustomCalls,
    OpenCall,
    RecordedStep,
    StepCapture,
    backward_name,
)
from referee.numerics.record.function_calls import (
    WITHIN_CHECKPOINT,
    FunctionCalls,
    GradientWatch,
    call_stack,
    in_reentrant_checkpoint,
    recomputes,
    sequence_number,
    without_overwritten,
)
from referee.numerics.record.record_settings import RecorderConfig
from referee.numerics.record.tensor_statistics import describe_tensor, resolve
from referee.numerics.text_files import read_dump_json, this_rank, write_record


class Recorder:
    """Record the calls between start() and stop(), and write them at step()."""

    def __init__(self, config: RecorderConfig | None = None) -> None:
        self.config = config or RecorderConfig()
        self.iteration = 0
        self._within: dict[int, list[str]] = {}  # the modules that run, by thread
        self._record = RecordedStep()
        self._running = contextlib.ExitStack()
        self._updates, self._customs = StepCapture(), CustomCalls()
        self._active = self._has_rows = False
        self._thread = 0  # where start() was called

    @property
    def within(self) -> list[str]:
        """Return the modules that run in this thread, the innermost last."""
        return self._within.setdefault(threading.get_ident(), [])

    # -- what a training script calls

    def start(self, model: nn.Module | Sequence[nn.Module] | None = None) -> None:
        """Begin to record. model: one or several modules; levels L0 and mix need it."""
        config = self.config
        if self._active:
            self.note(
                "start() was called twice without stop() or step() between, so two iterations may be one record"
            )
            return
        if (config.step and self.iteration not in config.step) or (
            config.rank and this_rank() not in config.rank
        ):
            return
        if model is None and config.level != "L1":
            raise NumericsError(f'level "{config.level}" needs the model; fix: start(model), or level "L1"')
        several = isinstance(model, list | tuple)
        roots: list[nn.Module] = list(model) if several else [] if model is None else [model]  # type: ignore[arg-type, list-item]
        for root in roots:
            if not isinstance(root, nn.Module):
                raise NumericsError(
                    f"start() received {type(root).__name__}; fix: pass a torch module, or several"
                )
        with self._writing() as folder:
            folder.mkdir(parents=True, exist_ok=True)  # an unusable folder is known before the step
        self._active = self._has_rows = True
        self._thread = threading.get_ident()
        if config.task == "tensor":
            self._updates.start(roots)
            self._running.enter_context(self._customs.capture())
        self._run_eagerly()
        if config.level != "L1":
            for number, root in enumerate(roots):
                self._watch_modules(root, f"{number}." if several else "")
        if config.level != "L0":
            for root in roots:
                self._follow_threads(root)
            self._running.enter_context(FunctionCalls(self))

    def stop(self) -> None:
        """Stop recording. The gradients that the parameters have now are recorded."""
        if not self._active:
            return
        self._running.close()
        self._active = False
        for names in filter(None, self._within.values()):
            self.lacks(f"{names[-1]} did not return, so this record is not complete")
        self._within.clear()
        if self.config.wants("backward", "output"):
            for name, module in self._record.models:
                self._parameter_gradients(name, module)

    def step(self) -> None:
        """End the iteration, and write its record."""
        try:
            self.stop()
            self._updates.stop()
            if self._has_rows:
                self._write()
        finally:
            self._record, self._has_rows = RecordedStep(), False
            self.iteration += 1

    def note(self, text: str) -> None:
        """Add a line to the notes of the record, once."""
        if text not in self._record.notes:
            self._record.notes.append(text)

    def lacks(self, text: str) -> None:
        """Add a note that says what is not recorded: an equal record is then no proof."""
        self.note(text)
        if text not in self._record.incomplete:
            self._record.incomplete.append(text)

    def abort(self) -> None:
        """Stop after an error in the step: remove every hook, and write what was recorded so far."""
        if self._has_rows:
            self.lacks("this record is not complete: the step ended with an error")
        self.step()

    # -- set-up

    def _run_eagerly(self) -> None:
        """Run compiled code as written while the recorder is active: inside a compiled region nothing can be seen."""
        if "torch._dynamo" not in sys.modules:
            return
        self._running.enter_context(torch.compiler.set_stance("force_eager"))
        frames: Any = sys.modules["torch._dynamo.eval_frame"]
        choose = frames._callback_from_stance

        def chosen(callback: Any) -> Any:
            if callback not in (None, False):  # of compiled code that is called now
                self.lacks("compiled code ran as written: what the compiler does is not in this record")
            return choose(callback)

        frames._callback_from_stance = chosen
        self._running.callback(setattr, frames, "_callback_from_stance", choose)

    def _follow_threads(self, root: nn.Module) -> None:
        """Record the functions that a module calls in another thread: a mode of torch is of one thread."""
        modes: dict[int, list[FunctionCalls]] = {}

        def before(module: nn.Module, args: Any) -> None:
            if threading.get_ident() != self._thread:
                mode = FunctionCalls(self)
                mode.__enter__()
                modes.setdefault(threading.get_ident(), []).append(mode)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if found := modes.get(threading.get_ident()):
                found.pop().__exit__(None, None, None)

        self._running.callback(root.register_forward_pre_hook(before, prepend=True).remove)
        self._running.callback(root.register_forward_hook(after, always_call=True).remove)

    def _watch_modules(self, root: nn.Module, index: str) -> None:
        for path, module in root.named_modules():
            parts = [part for part in path.split(".") if part != "_orig_mod"]
            label = ".".join(filter(None, ("Module", index.rstrip("."), *parts, type(module).__name__)))
            self._record.models.append((label, module))
            self._record.labels[id(module)] = label
            if isinstance(module, torch.jit.ScriptModule):
                self.lacks(
                    f"{label} is a TorchScript module, which takes no hooks: its calls are not recorded"
                )
                continue
            for handle in self._hooks(label, module, not path):
                self._running.callback(handle.remove)

    def _hooks(self, label: str, module: nn.Module, is_root: bool) -> Iterator[RemovableHandle]:
        # the calls of this module that run, innermost last, with the error that was being handled before each and the
        # versions of its buffers
        calls: list[tuple[OpenCall, BaseException | None, dict[str, int]]] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = self.open_call(label, "forward.{}", (args, kwargs), module)
            versions = {name: value._version for name, value in module.named_buffers(recurse=False)}
            calls.append((call, sys.exception(), versions))
            if call.name:
                self.within.append(call.name)
                if is_root:
                    self._record.roots |= {call.name, backward_name(call.name)}

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not calls:
                return
            call, handled, versions = calls.pop()
            if self.within and self.within[-1] == call.name:
                self.within.pop()
            error = sys.exception()
            if error is handled:
                self._uncalled_parameters(call, module)
                self.close_call(call, output)
                self._written_buffers(call, module, versions)
            elif call.name and error:  # torch runs its hooks before the error continues
                reason = described(error)
                self._record.exception = self._record.exception or (call.name, reason)
                self.lacks(f"{call.name} raised {reason}; this record is not complete")

        yield module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        yield module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def _written_buffers(self, call: OpenCall, module: nn.Module, versions: dict[str, int]) -> None:
        """Record the buffers that a call has written: they are results, which the next step computes with."""
        row = self._record.data.get(call.name, {}) if call.recorded else {}
        if "output" in row:
            # a norm in training writes its buffers and leaves their versions
            norm = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
            buffers = module.named_buffers(recurse=False)
            written = {name: part for name, part in buffers if norm or part._version != versions.get(name)}
            if written:
                row["buffers"] = self._described(call.name, "buffers", written)

    def _uncalled_parameters(self, call: OpenCall, module: nn.Module) -> None:
        """Record the parameters of modules within that are not called: the outer module may compute with them."""
        row = self._record.data.get(call.name, {}) if call.recorded else {}
        if "parameters" not in row:
            return
        todo = list(module.named_children())
        while todo:
            path, child = todo.pop(0)
            label = self._record.labels.get(id(child), "")
            if label in self._record.uncalled or self._record.calls.get(label):
                continue
            self._record.uncalled.add(label)
            found = {f"{path}.{name}": value for name, value in _state(child).items()}
            row["parameters"] |= self._described(call.name, "parameters", found)
            todo += [(f"{path}.{name}", inner) for name, inner in child.named_children()]

    # -- the calls

    def recording(self) -> bool:
        """Return whether a call is recorded now: no recomputation during backward."""
        if self._active and in_reentrant_checkpoint():
            self.lacks(WITHIN_CHECKPOINT)
        return self._active and not recomputes()

    def open_call(
        self, label: str, ending: str, inputs: tuple[Any, Any], module: nn.Module | None = None
    ) -> OpenCall:
        """Record the inputs of a call. ending: of its name, with a place for the number of the call."""
        if not self.recording():
            return OpenCall("", label, inputs, 0, False)
        number = self._record.calls.get(label, 0)
        self._record.calls[label] = number + 1
        name = f"{label}.{ending.format(number)}"
        back = backward_name(name)
        parent = self.within[-1] if self.within else None
        if self.config.level != "L1":
            self._record.parents[name] = parent
            self._record.parents[back] = backward_name(parent) if parent else None
        wanted = self._selected(name)
        if wanted:
            self._record.stacks[name] = call_stack()
            row: dict[str, Any] = {}
            args, kwargs = inputs
            if self.config.wants("forward", "input"):
                row["input_args"] = self._described(name, "input", without_overwritten(label, args))
                given = {key: value for key, value in kwargs.items() if key != "out"}  # may be uninitialised
                row["input_kwargs"] = self._described(name, "kwargs", given)
                if module is not None:
                    row["parameters"] = self._described(name, "parameters", _state(module))
                    row["settings"] = module_settings(module)
            self._record.data[name] = row
        return OpenCall(name, label, inputs, sequence_number(), wanted)

    def close_call(self, call: OpenCall, output: Any) -> None:
        """Record the output of a call, and observe the gradients that will pass it."""
        if not call.name or not self._active:
            return
        for tensor in tensors_in(output):
            self._record.makers.add(tensor, call.name)
        if not call.recorded or call.name not in self._record.data:
            return
        row = self._record.data.pop(call.name)
        self._record.data[call.name] = row  # in msProbe's order, by the end of calls
        if self.config.wants("forward", "output"):
            several = isinstance(output, tuple) and not hasattr(output, "_fields")
            row["output"] = self._described(call.name, "output", list(output) if several else [output])
        wanted = any(self.config.wants("backward", side) for side in ("input", "output"))
        if wanted and torch.is_grad_enabled():
            self._watch_gradients(call, output)

    def forget(self, call: OpenCall) -> None:
        """Drop a call that computed nothing: a view, or no tensor."""
        for name in (call.name, backward_name(call.name)):
            self._record.parents.pop(name, None)
        self._record.data.pop(call.name, None)
        self._record.stacks.pop(call.name, None)
        for file in [file for file in self._record.tensors if file.startswith(f"{call.name}.")]:
            del self._record.tensors[file]
        self._record.calls[call.label] -= 1

    def _watch_gradients(self, call: OpenCall, output: Any) -> None:
        inputs, outputs = tensors_in([list(call.inputs[0]), call.inputs[1]]), tensors_in(output)
        if not any(tensor.requires_grad for tensor in outputs):
            return
        counts = {"input": len(outputs), "output": len(inputs)}
        record, name = self._record, call.name  # without the call: it holds the inputs

        def report(side: str, index: int, gradient: Tensor) -> None:
            if not self.config.wants("backward", side) or not self._active or self._record is not record:
                return
            row = record.data.setdefault(backward_name(name), {})
            entries = row.setdefault(side, [None] * counts[side])
            entries[index] = self._described(backward_name(name), side, gradient, str(index))

        with torch._C.DisableTorchFunction():
            try:
                GradientWatch(inputs, outputs, call.begin, report, self.note)
            except RuntimeError as error:
                self.lacks(f"{name}: its gradients are not recorded: {str(error).partition(chr(10))[0]}")

    def _parameter_gradients(self, label: str, module: nn.Module) -> None:
        name = f"{label}.parameters_grad.0"
        found = {
            part: [self._described(name, part, value.grad)]
            for part, value in module.named_parameters(recurse=False)
            if value.grad is not None
        }
        if found and self._listed(name):
            self._record.data[name] = found

    def _selected(self, name: str) -> bool:
        """Return whether `list` includes a call. A listed module includes the calls within it."""
        return any(map(self._listed, [name, *self.within]))

    def _listed(self, name: str) -> bool:
        return not self.config.list or any(text in name for text in self.config.list)

    # -- values

    def _described(self, name: str, side: str, value: Any, place: str = "") -> Any:
        checksums, keep = self.config.summary_mode == "md5", self.config.task == "tensor"

        def of_tensor(tensor: Tensor, place: str) -> dict[str, Any]:
            entry = describe_tensor(tensor, checksums)
            if side in ("input", "kwargs") and (maker := self._record.makers.of(tensor)):
                entry["maker"] = maker
            dense = not (tensor.is_meta or tensor.is_nested or is_wrapped(tensor))
            if keep and dense and "not_described" not in entry:
                file = ".".join(filter(None, (name, side, place))).replace("/", "_") + ".pt"
                entry["data_name"] = file
                self._record.tensors[file] = (
                    plain_values(tensor).clone(memory_format=torch.contiguous_format).cpu()
                )
            return entry

        with torch._C.DisableTorchFunction():  # its computations are no calls
            try:
                return describe(value, of_tensor, place)
            except Exception as error:  # an object of the user, whose attributes can fail in any way
                reason = described(error)
                self.lacks(f"{name}: its {side} is not recorded: {reason}")
                entry = {"type": type(value).__name__, "not_described": reason}
                return [entry] if isinstance(value, list) else {} if isinstance(value, dict) else entry

    def _parents(self) -> dict[str, str | None]:
        """Return the parents as msProbe's construct.json: without the root, which dump.json holds in ours."""
        roots = self._record.roots
        for name, row in self._record.data.items():
            if self._record.parents.get(name) in roots:
                row["parent"] = self._record.parents[name]
        return {name: None if parent in roots else parent for name, parent in self._record.parents.items()}

    def _write(self) -> None:
        record = self._record
        head = {
            "task": self.config.task,
            "level": self.config.level,
            "framework": "pytorch",
            "torch": torch.__version__,
            "notes": record.notes,
            "incomplete": record.incomplete,
            "exception": record.exception,
            **{name: list(getattr(self.config, name)) for name in ("list", "data_mode")},
            "rows": len(record.data),
        }
        parents = self._parents()
        with self._writing() as folder:
            write_record(folder, head, resolve(record.data), record.stacks, parents, record.tensors)
            self._updates.write(folder)
            self._customs.write(folder)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Path]:
        """Yield the folder of this step and rank. A failure to write is one line."""
        folder = Path(self.config.dump_path) / f"step{self.iteration}" / f"rank{this_rank()}"
        try:
            yield folder
        except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise NumericsError(
                f"the record of step {self.iteration} cannot be written to {folder}: {reason}; fix: set another "
                "dump_path"
            ) from error


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and buffers."""
    state = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name: value for name, value in state if value is not None}


# The recorder with the interface and the config.json of msProbe's PrecisionDebugger, section 4.3.


class PrecisionDebugger:
    """Record steps as config.json says. start, stop and step also work as class methods of the latest instance.

    NumericsError where config.json cannot be read or used.
    """

    _latest: PrecisionDebugger | None = None

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: Sequence[int] | None = None,
    ) -> None:
        content = read_dump_json(config_path, "correct it") if config_path is not None else {}
        folder = None if dump_path is None else os.fspath(dump_path)
        try:
            config = RecorderConfig.from_json(content, task=task, dump_path=folder, level=level, step=step)
        except NumericsError as error:
            where = f"{config_path}: " if config_path is not None else ""
            raise NumericsError(f"{where}{error}") from error
        self.recorder = Recorder(config)
        PrecisionDebugger._latest = self

    @classmethod
    def start(cls, model: nn.Module | Sequence[nn.Module] | None = None, **unused: Any) -> None:
        cls._recorder().start(model)

    @classmethod
    def stop(cls) -> None:
        cls._recorder().stop()

    @classmethod
    def step(cls) -> None:
        cls._recorder().step()

    @classmethod
    def _recorder(cls) -> Recorder:
        if cls._latest is None:
            raise NumericsError("there is no PrecisionDebugger; fix: create one before start()")
        return cls._latest.recorder
