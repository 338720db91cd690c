"""Shard the matrices of the layers over the ranks: FSDP2, for models that do not fit on one card.

Each rank stores and updates its rows of every matrix in the blocks. A block's matrices are gathered while it computes.
Embeddings, norms, biases and scalars are replicated; the loss needs the embedding outside of the model's forward.
Checkpoints have whole tensors, so they load with any number of ranks, sharded or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from gpt2.model.transformer import GPT2
from gpt2.system import ranks
from gpt2.train import gradients
from gpt2.train.optimizer import parameter_groups

MOMENTS = ("exp_avg", "exp_avg_sq")


class Sharding:
    """A sharded model, and what the optimizer updates of it.

    groups: optimizer groups of this rank's rows and of the replicated parameters. parameters: the model's, in the
    order of the groups.
    """

    def __init__(self, model: GPT2, device: str, weight_decay: float, world: int) -> None:
        """Shard the model in place over `world` ranks. Every rank has the same whole weights before."""
        mesh = init_device_mesh(torch.device(device).type, (world,))
        matrices = {parameter for parameter in model.blocks.parameters() if parameter.dim() >= 2}
        replicated = {parameter for parameter in model.parameters() if parameter not in matrices}
        modules: list[nn.Module] = [*model.blocks, model]
        for module in modules:
            fully_shard(module, mesh=mesh, ignored_params=replicated)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the number of all micro-batches
            module.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(model, "hidden")
        model.sharded = True
        self.model = model
        groups = parameter_groups(model, weight_decay)
        self.parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        self.groups = [group | {"params": [_updated(p) for p in group["params"]]} for group in groups]
        self._updated: list[Tensor] = [part for group in self.groups for part in group["params"]]

    def collect_gradients(self, total: Tensor) -> Tensor:
        """Sum what backward has not summed over the ranks, `total` too, and give the optimizer its gradients.

        Returns the norm of the gradients of all ranks.
        """
        gradients.sum_over_ranks(
            [p for p in self.parameters if not isinstance(p, DTensor)], total, tree=False
        )
        for parameter, part in zip(self.parameters, self._updated, strict=True):
            if isinstance(parameter, DTensor):
                part.grad = None if parameter.grad is None else _rows(parameter.grad)
                parameter.grad = None
        sharded, whole = (
            torch.nn.utils.get_total_norm([part.grad for part in self._parts(kind) if part.grad is not None])
            for kind in (True, False)
        )
        squares = sharded.square()
        with ranks.exchange():
            torch.distributed.all_reduce(squares)
        return (squares + whole.square()).sqrt()

    def _parts(self, sharded: bool) -> list[Tensor]:
        pairs = zip(self.parameters, self._updated, strict=True)
        return [part for parameter, part in pairs if isinstance(parameter, DTensor) == sharded]

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state for a checkpoint, with whole tensors on the CPU of the first rank. Every rank calls it."""
        model = {name: _whole(value) for name, value in self.model.state_dict().items()}
        state = optimizer.state_dict()  # its entries are the optimizer's own
        entries = {
            number: entry
            | {name: _whole(_sharded_as(self.parameters[number], entry[name])) for name in MOMENTS}
            for number, entry in state["state"].items()
        }
        return {"model": model, "optimizer": state | {"state": entries}}

    def load_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Restore a state with whole tensors: this rank's rows of it."""
        for name, value in self.model.state_dict().items():
            _rows(value).copy_(_rows_of(state["model"][name], value))
        saved = state["optimizer"]
        entries = {
            number: entry | {name: _rows_of(entry[name], self.parameters[number]).clone() for name in MOMENTS}
            for number, entry in saved["state"].items()
        }
        optimizer.load_state_dict(saved | {"state": entries})


def _rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, in its memory; a replicated tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _updated(parameter: Tensor) -> Tensor:
    return _rows(parameter.detach()).requires_grad_() if isinstance(parameter, DTensor) else parameter


def _whole(tensor: Tensor) -> Tensor | None:
    """Gather a tensor on the CPU of the first rank; None on the others."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu() if ranks.first() else None


def _rows_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor that is sharded as the parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    each = -(-whole.shape[0] // mesh.size())
    return whole[mesh.get_local_rank() * each : (mesh.get_local_rank() + 1) * each]


def _sharded_as(parameter: Tensor, rows: Tensor) -> Tensor:
    """Return this rank's rows as a tensor that is sharded as the parameter."""
    if not isinstance(parameter, DTensor):
        return rows
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)
