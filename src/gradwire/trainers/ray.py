"""`gw.ray`: compress what Ray Train's workers send.

model = ray.train.torch.prepare_model(model)
handle = gw.ray.attach(model, "qsgd:bits=4")
...
with tempfile.TemporaryDirectory() as folder:
    gw.ray.save(handle, folder)  # on every worker
    ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
"""

from __future__ import annotations

import os
from typing import Any

import torch

from gradwire.aggregators.registry import Method
from gradwire.handles.handle import Handle
from gradwire.trainers.state import FILE, Compression, read, write

try:
    import ray.train
except ModuleNotFoundError as error:
    raise ImportError(f'gw.ray needs Ray Train ({error}): pip install "gradwire[ray]"') from error


def attach(
    model: torch.nn.Module,
    codec: Method = "qsgd",
    *,
    checkpoint: ray.train.Checkpoint | None = None,
    **options: Any,
) -> Handle:
    """`gw.attach`, with the state that `save` put into the checkpoint from which this run goes on,
    if there is one; any number of workers may have saved it.

    Args:
        model: what `ray.train.torch.prepare_model` returned.
        codec, options: as in `gw.attach`.
        checkpoint: of another run, to begin with; `ray.train.get_checkpoint()`, this run's own,
            comes before it.

    Raises:
        ConfigError: as `gw.attach` and `Handle.load_state_dict`.
    """
    compression = Compression(codec, options)
    found = ray.train.get_checkpoint() or checkpoint
    if found is None:
        return compression.attach(model)
    with found.as_directory() as folder:
        compression.load_state_dict(read(os.path.join(folder, FILE)))
        return compression.attach(model)  # reads the file, which was only mapped


def save(handle: Handle, folder: str | os.PathLike[str]) -> None:
    """Write the state of all workers into rank 0's folder, that of a checkpoint. Collective: every
    worker calls it, and rank 0 reports a checkpoint of the folder."""
    state = Compression(handle=handle).state_dict()
    if state:
        write(state, os.path.join(folder, FILE))
