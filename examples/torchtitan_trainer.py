"""torchtitan's trainer, with compressed gradients and weights: takes the arguments of torchtitan.

    torchrun --nproc-per-node 8 examples/torchtitan_trainer.py --module llama3 \\
        --config llama3_debugmodel

Those of torchtitan 0.2 are `--job.config_file FILE.toml`.
"""

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

try:
    from torchtitan.trainer import Trainer  # 0.3
except ModuleNotFoundError:
    from torchtitan.train import Trainer  # 0.2

import gradwire as gw


class CompressedTrainer(Trainer):
    def __init__(self, config):
        if hasattr(config.training, "disable_cuda_graphs"):  # 0.3
            config.training.disable_cuda_graphs = True  # which replay no code of the host
        super().__init__(config)
        (model,) = self.model_parts  # after fully_shard, with its weights in place
        self.handle = gw.attach(
            model, "qsgd:bits=4", weights="randomshift:bits=8", error_feedback=True
        )
        if self.checkpointer.enable:
            self.checkpointer.states["gradwire"] = Saved(self.handle)
            self.load_others, self.checkpointer.dcp_load = self.checkpointer.dcp_load, self.load

    def load(self, states, checkpoint_id, *args, **kwargs):
        resumes = states.pop("gradwire", None) is not None  # or it loads a model alone
        self.load_others(states, checkpoint_id, *args, **kwargs)
        if resumes:
            self.handle.load(checkpoint_id)


class Saved(Stateful):
    """A handle, where torch.distributed.checkpoint saves it."""

    def __init__(self, handle):
        self.handle = handle

    def state_dict(self):
        return self.handle.checkpoint()

    def load_state_dict(self, state):
        raise NotImplementedError("CompressedTrainer.load does it, at any number of ranks")


if __name__ == "__main__":
    init_logger()
    trainer = CompressedTrainer(ConfigManager().parse_args())
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()
