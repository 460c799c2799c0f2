"""DDP modules that cannot have a handle, and why: found before the first backward, by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError
from gradwire.groups import check_fixed
from gradwire.handles.wrapped import plain_name

_SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def check_module(model: DistributedDataParallel) -> None:
    """Raise ConfigError for a DDP module if not its buckets alone carry its gradients."""
    check_fixed(model.process_group)
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            "this DDP module was made under torch._dynamo.config.optimize_ddp='python_reducer', "
            "which has no buckets: set it to another value before wrapping the module"
        )
    reason = next(_reasons(model), None)
    if reason is not None:
        raise ConfigError(reason)


def _reasons(model: DistributedDataParallel) -> Iterator[str]:
    names = {p: plain_name(name) for name, p in model.module.named_parameters()}
    for p in model._delay_all_reduce_params:
        yield (
            f"parameter {names[p]} is in delay_all_reduce_named_params, so DDP averages it beside "
            "its buckets: wrap the module without that argument"
        )
    managed = {p for p in model._module_parameters if p.requires_grad}
    for p, name in names.items():
        if p in managed and hasattr(p, "_in_backward_optimizers"):
            yield (
                f"parameter {name} has an optimizer that runs in backward "
                "(_apply_optimizer_in_backward), for which DDP needs its only communication hook: "
                "step an optimizer after backward"
            )
    for module in model.module.modules():
        if isinstance(module, _SPARSE) and module.sparse and module.weight in managed:
            yield (
                f"parameter {names[module.weight]} has sparse gradients, which lie in no flat "
                f"bucket: use nn.{type(module).__name__}(sparse=False)"
            )
