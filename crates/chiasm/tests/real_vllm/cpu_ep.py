"""A plugin of vLLM that lets models with experts run with data parallelism on CPUs, for tests.

vLLM's CPU backend lacks two collectives that data parallelism of experts needs, and its kernel for
experts ignores the map from all experts to those of one engine.
"""

import inspect

import torch
import torch.distributed as dist


def register():
    """Adds what is missing. vLLM calls this in each of its processes."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    for experts in vars(cpu_moe).values():
        if (
            isinstance(experts, type)
            and issubclass(experts, cpu_moe.CPUUnquantizedExperts)
            and "apply" in vars(experts)
        ):
            experts.apply = with_expert_map(experts.apply)


def all_gatherv(self, input_, dim=0, sizes=None):
    """Gathers the rows of all ranks. `sizes` has each rank's number of rows."""
    assert dim == 0
    if isinstance(input_, (list, tuple)):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes)])


def reduce_scatterv(self, input_, dim=-1, sizes=None):
    """Adds the rows of all ranks, and returns this rank's part of the sum."""
    assert dim == 0
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    start = sum(sizes[: self.rank_in_group])
    return total[start : start + sizes[self.rank_in_group]].clone()


def with_expert_map(apply):
    """Lets a kernel for experts skip those of other ranks."""
    names = list(inspect.signature(apply).parameters)

    def mapped(*args, **kwargs):
        call = dict(zip(names, args)) | kwargs
        if call.get("expert_map") is None:
            return apply(**call)
        local = call["expert_map"][call["topk_ids"].long()]
        elsewhere = local < 0
        call["topk_ids"] = local.clamp(min=0).to(call["topk_ids"].dtype)
        call["topk_weights"] = call["topk_weights"].masked_fill(elsewhere, 0)
        apply(**call)
        if call["apply_router_weight_on_input"]:
            call["output"].masked_fill_(elsewhere.all(dim=1, keepdim=True), 0)

    return mapped
