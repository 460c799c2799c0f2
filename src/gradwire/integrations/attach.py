"""`gw.attach(ddp_model)`: one line that compresses what DDP sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import Options, check_defined, check_feedback
from gradwire.collectives.calling import check_seed
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.integrations.handle import Handle
from gradwire.integrations.hook import hook_state
from gradwire.integrations.synchronised import synchronised
from gradwire.lang import Codec
from gradwire.planner import make_plan


def attach(
    model: DistributedDataParallel,
    codec: str | Codec | None = "qsgd",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    codecs: Mapping[str, str | Codec | None] | None = None,
    error_feedback: bool = False,
    seed: int = 0,
    algorithm: str | None = None,
    options: Options | None = None,
    coalesce_bytes: int = 1 << 18,
    **codec_options: object,
) -> Handle:
    """Compress the gradients that `model` synchronises; nothing else of the process is touched.

    Call it on every rank, with the same arguments, after wrapping the module:

        model = DistributedDataParallel(model)
        gw.attach(model, bits=4)

    Args:
        model: its parameters are on the CPU or on one GPU. Those in fp32, fp16 or bf16 are
            gradwire's; torch's own all-reduce averages the others (float64, complex). Over NCCL,
            what a GPU has goes from GPU to GPU; over gloo alone by way of the host's memory.
        codec: for parameters of two dimensions and more: a name with its options as further
            keywords (see `gradwire codec list`), a Codec, or None for none.
        include: name patterns ("*.bias") to compress although they have fewer dimensions.
        exclude: name patterns to leave dense.
        codecs: name pattern -> codec (a name, a Codec, or None for dense); the first match wins
            over everything else.
        error_feedback: keep what was not sent, one fp32 residual a compressed parameter, and add
            it to the next step's gradient.
        seed: of the codecs' random numbers; not negative.
        algorithm: of every all-reduce, a name (docs/algorithms.md); None leaves it to `options`.
        options: algorithm, segments, checksum, kernels.
        coalesce_bytes: DDP's buckets smaller than this wait for the next ones, until they have as
            many bytes together, or there are no more; 0 sends each alone, as do modules whose DDP
            leaves out unused parameters (skip_all_reduce_unused_params).

    Returns:
        A handle with statistics and state.

    Raises:
        ConfigError: not a DDP module, attached already, an argument of a wrong type or value (it is
            named), nothing to synchronise, sparse gradients, unknown codec, algorithm, option or
            pattern, a codec that is not defined in the algorithm, one for a parameter of a dtype
            that codecs do not take, or ranks that disagree (the first parameter that differs is
            named).
    """
    if not (options is None or isinstance(options, Options)):
        raise ConfigError(f"options={options!r}: give a gradwire.Options(...), or None")
    options = options or Options()
    if algorithm is not None:
        options = replace(options, algorithm=algorithm)
    check_seed(seed)
    if type(coalesce_bytes) is not int or coalesce_bytes < 0:
        raise ConfigError(f"coalesce_bytes={coalesce_bytes!r}: give a number of bytes, 0 or more")
    state = hook_state(model)
    if state.reducer is not None:
        raise ConfigError(
            "this module has a handle attached: call its detach() before attaching anew"
        )
    comm = communicator(model.process_group)
    named = synchronised(model)
    device = named[0][1].device
    away = next(((n, p.device) for n, p in named if p.device != device), None)
    if away is not None or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"parameter {named[0][0]} is on {device}" + (", {} on {}".format(*away) if away else "")
            + ": gradwire needs all of them on the CPU, or on one GPU"
        )  # fmt: skip
    plan = make_plan(
        named, codec, codec_options, comm.world_size, include, exclude, codecs, error_feedback
    )
    for parameter in plan.parameters:
        if parameter.codec is not None:
            check_defined(options.algorithm, parameter.codec)
            if error_feedback:
                check_feedback(parameter.codec)
    if getattr(model, "skip_all_reduce_unused_params", False):
        coalesce_bytes = 0  # a bucket that others would wait for may never come
    agreed = [f"seed {seed}, buckets of {coalesce_bytes} bytes", str(options)]
    agreed.append(f"after {state.attached} handles of this module")
    comm.agree("what is attached", [*agreed, *plan.describe()])
    owner = comm.owner(f"the module of {named[0][0]}")
    return Handle(model, state, dict(named), plan, owner, seed, options, coalesce_bytes)
