"""Learners that divide a policy among themselves with torch's FSDP2 (`learner_strategy=fsdp2`).

Each rank holds some rows of every parameter and of the parameter's moments. For the forward pass
and for the backward pass of a layer, the complete parameters of the layer are gathered on every
rank. As soon as the backward pass has computed the layer's gradients, they are summed over the
ranks, and each rank gets the sums for its own rows. So every pass is collective, and every rank
must run the same number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from grpo_trainable.learner.process_group import ProcessGroup
from grpo_trainable.learner.ranks import ConnectedRanks
from grpo_trainable.models.policy import NamedWeights


class Shards(ConnectedRanks):
    """Ranks that divide a policy among themselves. `ranks.Ranks` describes the methods."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self._device = group.device
        self._mesh = init_device_mesh(group.device.type, (group.size,))
        self._divided: WeakSet[NamedWeights] = WeakSet()
        # Strides of each parameter before it was divided. `divide` changes the strides, because
        # FSDP2 does not accept matrices stored by column.
        self._strides = WeakTensorKeyDictionary()

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Do nothing: each rank already has the sums for the rows that it holds."""

    # ---- Policies ----------------------------------------------------------------------------

    def divide(self, policy: NamedWeights) -> NamedWeights:
        """Divide the rows of the policy's parameters among the ranks, in place."""
        strides = {name: p.stride() for name, p in policy.named_parameters()}
        for parameter in policy.parameters():
            parameter.data = parameter.data.contiguous()
        for layer in policy.layers():
            fully_shard(layer, mesh=self._mesh)
        fully_shard(policy, mesh=self._mesh)
        register_fsdp_forward_method(policy, "states_at")  # scoring calls this, not `forward`
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # Sum, do not average: losses are already divided by the denominators of the whole
                # step. Gloo can only sum.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        for name, parameter in policy.named_parameters():
            self._strides[parameter] = strides[name]
        self._divided.add(policy)
        return policy

    def settle(self) -> None:
        """Release the parameters outside the layers.

        These parameters stay gathered after a pass without gradient.
        """
        for policy in self._divided:
            for module in policy.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    # ---- Tensors -----------------------------------------------------------------------------

    def weights(self, policy: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's whole weights on the first rank, in their original memory layout."""
        parameters = policy.weights()
        for name, whole in self.gathered(parameters):
            stride = self._strides[parameters[name]]
            if whole.stride() == stride:
                yield name, whole
            else:
                yield name, torch.empty_strided(whole.shape, stride, dtype=whole.dtype).copy_(whole)

    @torch.no_grad()
    def gathered(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors on the first rank."""
        for name, tensor in tensors.items():
            whole = self.whole(tensor.detach())
            if self.rank == 0:
                yield name, whole

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor on every rank."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return this rank's rows of `tensor`.

        Every rank has the whole tensor, so nothing is sent.
        """
        if not isinstance(like, DTensor) or tensor.shape != like.shape:
            return tensor
        return distribute_tensor(
            tensor.to(self._device), like.device_mesh, like.placements, src_data_rank=None
        )

    def held(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows of divided tensors; on the first rank, also undivided tensors."""
        mine = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                mine[name] = tensor.to_local()
            elif self.rank == 0:
                mine[name] = tensor
        return mine
