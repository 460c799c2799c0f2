"""The table of scripts/mutants.py: small wrong changes, and the tests that should notice them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change to one file, such as a careless edit could make.

    Attributes:
        name: for the command line.
        why: what would be wrong with the library.
        file: relative to src.
        before, after: the text to replace, which occurs once, and what replaces it.
        tests: files, or FILE::FUNCTION where a file takes long.
        hangs: whether a run that does not end counts as noticed.
        bound_s: seconds after which a run is stopped.
        workers: processes of pytest.
    """

    name: str
    why: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    hangs: bool = False
    bound_s: float = 240.0
    workers: int = 1


# fmt: off
MUTANTS = (
    # The C emitter, and the prelude of its kernels.
    Mutant(
        "c_decode_does_nothing", "a kernel leaves the values as they were",
        "gradwire/lang/emit/c_blocks.py",
        '        self.put(f"{to} {self.name(sink.node)};")',
        '        if self.program.form != "decode":\n'
        '            self.put(f"{to} {self.name(sink.node)};")',
        ("tests/lang/test_targets.py::test_forms_of_a_codec",),
    ),
    Mutant(
        "c_decode_sum_without_peers", "a sum has the own values alone",
        "gradwire/lang/emit/c_blocks.py",
        "        for inner in step.body:",
        '        for inner in step.body if self.program.form != "decode_sum" else ():',
        ("tests/collectives/test_typed.py",),
    ),
    Mutant(
        "c_sum_omits_a_rank", "the last rank is not summed",
        "gradwire/lang/emit/c_blocks.py",
        "k < call->ranks; k++)",
        "k < call->ranks - 1; k++)",
        ("tests/laws/test_collective_laws.py::test_every_law",),
    ),
    Mutant(
        "c_bf16_rounds_ties_up", "another rounding than torch's",
        "gradwire/lang/emit/prelude.h",
        "(magnitude + 0x7fff + ((magnitude >> 16) & 1)) >> 16",
        "(magnitude + 0x8000) >> 16",
        ("tests/lang/test_targets.py::test_forms_of_a_codec",),
    ),
    Mutant(
        "c_bf16_rounds_the_wrong_way", "a block's minimum may be below its grid",
        "gradwire/lang/emit/prelude.h",
        "to_bf16_down(float x) { return to_bf16_outward(x, 1); }",
        "to_bf16_down(float x) { return to_bf16_outward(x, 0); }",
        ("tests/lang/test_targets.py::test_forms_of_a_codec",),
    ),
    Mutant(
        "c_fp16_loses_its_sign", "negative numbers decode as positive ones",
        "gradwire/lang/emit/prelude.h",
        "return float_of(magnitude | (h & 0x8000) << 16);",
        "return float_of(magnitude);",
        ("tests/laws/test_codec_laws.py::test_casts_are_exact_and_overflow_in_fp16_as_torchs_do",),
    ),
    Mutant(
        "c_pack_in_another_order", "codes lie side by side, not in planes",
        "gradwire/lang/emit/prelude.h",
        "byte |= ((codes[j + k * length] >> at) & mask) << (k * width);",
        "byte |= ((codes[j * (8 / width) + k] >> at) & mask) << (k * width);",
        ("tests/lang/test_targets.py::test_forms_of_a_codec",),
    ),
    Mutant(
        "c_unpack_keeps_the_last_plane", "codes of 3, 5, 6 and 7 bits lose their low bits",
        "gradwire/lang/emit/prelude.h",
        "(uint8_t)(at ? codes[j + k * length] | cell : cell)",
        "(uint8_t)cell",
        ("tests/lang/test_targets.py::test_forms_of_a_codec",),
    ),
    Mutant(
        "planes_from_the_narrowest", "all targets agree, on another wire format",
        "gradwire/lang/layout.py",
        "for width in (8, 4, 2, 1):",
        "for width in (1, 2, 4, 8):",
        ("tests/lang/test_layout.py",),
    ),
    # The other targets.
    Mutant(
        "triton_takes_the_smaller", "a wrong comparison",
        "gradwire/lang/emit/__init__.py",
        "tl.where({0} > {1}, {0}, {1})",
        "tl.where({0} < {1}, {0}, {1})",
        ("tests/lang/test_triton.py::test_triton_equals_eager",),
    ),
    Mutant(
        "triton_selects_all_equal_keys", "more entries than the payload has room for",
        "gradwire/lang/emit/triton_codes.py",
        "hit = (mask & (key > cut)) | tied",
        "hit = (mask & (key >= cut)) | tied",
        ("tests/lang/test_triton.py::test_triton_equals_eager",),
    ),
    Mutant(
        "triton_sum_omits_rank_0", "a sum lacks a rank",
        "gradwire/lang/emit/triton_blocks.py",
        'self.put("for k in range(ranks):")',
        'self.put("for k in range(1, ranks):")',
        ("tests/lang/test_triton.py::test_triton_equals_eager",),
    ),
    Mutant(
        "eager_index_ignores_the_start", "a cut changes the random numbers",
        "gradwire/lang/eager.py",
        'first = int(self.row["start"]) + part.first * self.layout.block',
        "first = part.first * self.layout.block",
        ("tests/lang/test_targets.py::test_forms_of_a_codec",),
    ),
    Mutant(
        "eager_sums_peers_by_rank", "peers behind the own rank are taken for others",
        "gradwire/lang/eager.py",
        "theirs = _Frame(part, k - (0 <= self.call.rank < k))",
        "theirs = _Frame(part, max(k - 1, 0))",
        ("tests/collectives/test_kernel_calls.py",),
    ),
    # Random numbers.
    Mutant(
        "rng_ignores_the_step", "every step draws the same numbers",
        "gradwire/lang/rng.py",
        "np.asarray(keys, dtype=np.uint64) + np.asarray(step).astype(np.uint64) * _GOLDEN",
        "np.asarray(keys, dtype=np.uint64) + np.zeros_like(step, dtype=np.uint64) * _GOLDEN",
        ("tests/lang/test_rng.py",),
    ),
    Mutant(
        "rng_ignores_the_rank", "errors of ranks do not average out",
        "gradwire/lang/rng.py",
        'text = f"{seed}/{rank}/{name}".encode()',
        'text = f"{seed}/{name}".encode()',
        ("tests/lang/test_rng.py",),
    ),
    Mutant(
        "dither_not_subtracted", "twice the squared error, unnoticed by unbiasedness",
        "gradwire/codecs/qsgd.py",
        'if self.rounding == "dithered":',
        'if self.rounding == "dithered" and self.scale != "minmax":',
        ("tests/laws/test_algorithm_laws.py::test_dithered_rounding_halves_the_squared_error",),
    ),
    # Layout and partition.
    Mutant(
        "a_block_too_many", "payloads are a block longer than their data",
        "gradwire/lang/layout.py",
        "return -(-numel // self.block)",
        "return numel // self.block + 1",
        ("tests/lang/test_layout.py",),
    ),
    Mutant(
        "owners_do_not_rotate", "one rank sums the remainders of all small tensors",
        "gradwire/partition.py",
        "    return (number + number // ranks) % ranks",
        "    return 0",
        ("tests/planner/test_plan.py",),
    ),
    Mutant(
        "pieces_do_not_rotate", "a rotation has no effect",
        "gradwire/partition.py",
        "piece = (np.arange(chunks)[:, None] - rotation) % chunks",
        "piece = (np.arange(chunks)[:, None] - 0 * rotation) % chunks",
        ("tests/test_partition.py",),
    ),
    Mutant(
        "a_chunk_loses_a_value", "the last value of a tensor is never averaged",
        "gradwire/partition.py",
        "(np.minimum(k * blocks // chunks * block, numel) for k in (piece, piece + 1))",
        "(np.minimum(k * blocks // chunks * block, numel - 1) for k in (piece, piece + 1))",
        ("tests/test_partition.py",),
    ),
    # Residuals.
    Mutant(
        "residual_not_updated", "what is not sent is lost",
        "gradwire/lang/forms.py",
        'self.program("encode_ef", with_residual, self.error(own, with_residual))',
        'self.program("encode_ef", with_residual)',
        ("tests/laws/test_codec_laws.py::test_every_codec_obeys_every_law",),
    ),
    Mutant(
        "residual_of_the_wrong_sign", "error feedback doubles the error",
        "gradwire/lang/forms.py",
        'return {"residual": (kept(ir.alu("sub", x, decoded), self.residual), None)}',
        'return {"residual": (kept(ir.alu("sub", decoded, x), self.residual), None)}',
        ("tests/laws/test_codec_laws.py::test_every_codec_obeys_every_law",),
    ),
    Mutant(
        "residual_takes_what_is_not_finite", "one overflow spoils all later steps",
        "gradwire/lang/forms.py",
        'return ir.alu("where", ir.alu("isfinite", error), error, residual)',
        "return error",
        ("tests/laws/test_codec_laws.py::test_every_codec_obeys_every_law",),
    ),
    Mutant(
        "wrapper_keeps_what_is_not_finite", "as above, where kernels keep no residual",
        "gradwire/aggregators/error_feedback.py",
        "torch.where(finite & error.isfinite(), error, residual, out=residual)",
        "residual.copy_(error)",
        ("tests/examples/test_skeleton_aggregator.py",),
    ),
    Mutant(
        "wrapper_forgets_a_skipped_step", "a step that GradScaler skips changes residuals",
        "gradwire/aggregators/error_feedback.py",
        "torch.where(average.isfinite().all(), residual, before[c.name], out=residual)",
        "pass",
        ("tests/aggregators/test_laws.py",),
    ),
    Mutant(
        "wrapper_without_the_residual", "what was kept is never sent",
        "gradwire/aggregators/error_feedback.py",
        "wanted = [c.gradient.float() + c.state[RESIDUAL] for c in contexts]",
        "wanted = [c.gradient.float() for c in contexts]",
        ("tests/aggregators/test_laws.py",),
    ),
    # Algorithms.
    Mutant(
        "own_values_first", "the sum's order depends on who owns the chunk",
        "gradwire/algorithms/halves.py",
        "own=sum(p < rank for p in peers),",
        "own=0,",
        ("tests/golden/test_runs.py",),
    ),
    Mutant(
        "ring_one_hop_off", "partial sums are expected too early",
        "gradwire/algorithms/ring.py",
        "c = (rank - 1 - hop) % world_size",
        "c = (rank - hop) % world_size",
        ("tests/algorithms/test_schedules.py",),
    ),
    Mutant(
        "tree_drops_a_child", "the last rank is not summed",
        "gradwire/algorithms/tree.py",
        "if 2**b < reach and rank + 2**b < world_size]",
        "if 2**b < reach and rank + 2**b < world_size - 1]",
        ("tests/algorithms/test_schedules.py",),
    ),
    Mutant(
        "sra_skips_a_segment", "contributions of all segments but the first are not sent",
        "gradwire/algorithms/halves.py",
        "        if away:\n",
        "        if away and not s:\n",
        ("tests/algorithms/test_schedules.py",),
    ),
    Mutant(
        "wrong_server", "servers do not spread evenly over the ranks",
        "gradwire/algorithms/parameter_server.py",
        "k * world_size // partitions for k",
        "k % world_size for k",
        ("tests/algorithms/test_graphs.py",),
    ),
    Mutant(
        "a_machine_counts_twice", "a holder sums one peer's values twice",
        "gradwire/algorithms/hierarchical.py",
        "reads = [self._buffers(tiers.roles[tier], s, chunks, peer) for peer in peers]",
        "reads = [self._buffers(tiers.roles[tier], s, chunks, p) for p in peers[:1] + peers]",
        ("tests/algorithms/test_hierarchical.py",),
    ),
    Mutant(
        "wire_bytes_without_headers", "the formula is short of the results' headers",
        "gradwire/algorithms/scatter_reduce_allgather.py",
        "(world_size - 1) * message(segment[rank])",
        "(world_size - 1) * segment[rank]",
        ("tests/algorithms/test_schedules.py",),
    ),
    # The engine.
    Mutant(
        "youngest_tickets_first", "ranks admit tickets in different orders, and wait for ever",
        "gradwire/engine/core.py",
        "for place in list(self._places)[: self.window]:",
        "for place in list(self._places)[-self.window :]:",
        ("tests/engine/test_core.py",),
    ),
    Mutant(
        "a_task_too_early", "a result is told before the last task",
        "gradwire/engine/core.py",
        "self._left = len(self._waits)\n",
        "self._left = len(self._waits) - 1\n",
        ("tests/engine/test_core.py",),
    ),
    Mutant(
        "a_dependency_not_counted", "a kernel starts before the values are final",
        "gradwire/engine/graph.py",
        "return list(map(len, self._needs))",
        "return list(map(len, self.reads))",
        ("tests/engine/test_graph.py",),
    ),
    Mutant(
        "two_slots_share_a_tag", "messages are taken for each other",
        "gradwire/engine/identity.py",
        "    return tag << _SLOTS | slot\n",
        "    return tag << _SLOTS | slot >> 1\n",
        ("tests/engine/test_tags.py",),
    ),
    Mutant(
        "checksum_not_checked", "a flipped bit becomes a wrong number",
        "gradwire/engine/message.py",
        "    if envelope.checksum:\n        check_sum(",
        "    if envelope.checksum and not payload.size:\n        check_sum(",
        ("tests/engine/test_headers.py",),
    ),
    Mutant(
        "checksums_not_checked", "as above, in messages of several buffers",
        "gradwire/engine/message.py",
        "        if expected.tobytes() !=",
        '        expected["checksum"] = found["checksum"]\n        if expected.tobytes() !=',
        ("tests/engine/test_headers.py",),
    ),
    Mutant(
        "length_not_checked", "a truncated payload is decoded",
        "gradwire/engine/message.py",
        "expected = _fields(envelope, length, checksum, version)",
        "expected = _fields(envelope, found[6], checksum, version)",
        ("tests/engine/test_headers.py",),
    ),
    Mutant(
        "stats_without_headers", "bytes on the wire are not those that are told",
        "gradwire/engine/runs.py",
        "run.wire_bytes += nbytes",
        "run.wire_bytes += nbytes - 48",
        ("tests/laws/test_collective_laws.py::test_every_law",),
    ),
    # Collectives.
    Mutant(
        "average_of_one_rank_less", "the average is too large",
        "gradwire/collectives/job.py",
        "self.factor = 1.0 / collective.comm.world_size if averages else 1.0",
        "self.factor = 1.0 / max(collective.comm.world_size - 1, 1) if averages else 1.0",
        ("tests/laws/test_collective_laws.py::test_every_law",),
    ),
    Mutant(
        "average_not_divided", "the average is a sum",
        "gradwire/collectives/job.py",
        'averages = collective.operation.op == "avg"',
        'averages = collective.operation.op == "mean"',
        ("tests/laws/test_collective_laws.py::test_every_law",),
    ),
    Mutant(
        "plan_offered_too_early", "a plan is adopted that no rank has prepared",
        "gradwire/handles/switch.py",
        "            return self._prepared",
        "            return self.newest.version",
        ("tests/handles/test_update.py",),
    ),
    Mutant(
        "newest_plan_of_any_rank", "a plan is adopted that a rank has not prepared",
        "gradwire/engine/message.py",
        'return int(found["offered"].min())',
        'return int(found["offered"].max())',
        ("tests/engine/test_headers.py",),
    ),
    Mutant(
        "loan_returned_too_early", "a message is overwritten while it is read",
        "gradwire/transport/shm_ring.c",
        "        op->data = message;\n",
        "        op->data = message, give_back(l, op->loan.number);\n",
        ("tests/transport/test_shm_lending.py",),
    ),
    # Control.
    Mutant(
        "difference_in_another_line", "an error names a parameter that is alike",
        "gradwire/control/description.py",
        "both = next(pair for pair in pairs if pair[0] != pair[1])",
        "both = [pair for pair in pairs if pair[0] != pair[1]][-1]",
        ("tests/control/test_control_agreement.py",),
    ),
    Mutant(
        "difference_not_noticed", "ranks with different plans go on",
        "gradwire/control/participant.py",
        "if self.lines is not None and first[:_DIGITS] != self.mine:",
        "if self.lines is not None and len(first[:_DIGITS]) != len(self.mine):",
        ("tests/control/test_control_agreement.py",),
    ),
    # Aggregators.
    Mutant(
        "powersgd_keeps_its_basis", "every step starts with the first random basis",
        "gradwire/lang/emit/lowrank.c",
        "if (all[at].kept) keep_basis(&all[at]);\n        else",
        "if (!all[at].kept)",
        ("tests/aggregators/test_dense_aggregators.py",),
    ),
    Mutant(
        "topkc_selects_by_local_norms", "ranks add up different chunks",
        "gradwire/aggregators/topkc.py",
        "yield [AllReduce(square, of=c) for",
        "yield [AllReduce(square.clone(), of=c) for",
        ("tests/aggregators/test_references.py",),
    ),
    Mutant(
        "thc_without_saturation", "a sum beyond the range becomes NaN",
        "gradwire/codecs/saturating.py",
        "whole = clamp(v, -self.most, self.most) + _ROUNDING - _ROUNDING",
        "whole = v + _ROUNDING - _ROUNDING",
        ("tests/aggregators/test_dense_aggregators.py",),
    ),
    Mutant(
        "dgc_momentum_not_masked", "what was sent pushes on in later steps",
        "gradwire/aggregators/deepgradient.py",
        "u *= part == 0",
        "pass",
        ("tests/aggregators/test_references.py",),
    ),
    Mutant(
        "artopk_leader_fixed", "one rank's largest values are all that is sent",
        "gradwire/aggregators/artopk.py",
        "s.led_by(s.first.step % s.first.world_size)",
        "s.led_by(0)",
        ("tests/aggregators/test_references.py",),
    ),
    # Cross-barrier training.
    Mutant(
        "late_step_has_later_options", "a parameter steps with the next step's learning rate",
        "gradwire/handles/optimizers.py",
        '[{**options, "params": []} for options in self._options]',
        '[{**options, "params": []} for options in self._optimizer.param_groups]',
        ("tests/handles/test_cross_barrier.py",),
    ),
    Mutant(
        "late_gradient_stays_local", "a gradient that is kept is this rank's own",
        "gradwire/handles/cross_barrier.py",
        "                one.gradient.copy_(one.average)",
        "                pass",
        ("tests/handles/test_cross_barrier.py",),
    ),
    Mutant(
        "first_pass_crosses", "DDP moves gradients whose averages are awaited",
        "gradwire/handles/cross_barrier.py",
        "not (first or older or model._join_config.enable)",
        "not (older or model._join_config.enable)",
        ("tests/handles/test_cross_barrier.py",),
    ),
    # State.
    Mutant(
        "residual_dropped_on_load", "a resumed run is not the run that was saved",
        "gradwire/handles/sections.py",
        "member.keep({key: sharding.loaded(name, key, tensor) for key, tensor in kept})",
        "member.keep({})",
        ("tests/aggregators/test_moved_state.py",),
    ),
    Mutant(
        "residual_not_scaled", "on fewer ranks, later averages receive too much",
        "gradwire/state/state.py",
        "total += tensor.cpu() * (self.world_size / self.ranks)",
        "total += tensor.cpu()",
        ("tests/aggregators/test_moved_state.py",),
    ),
    Mutant(
        "step_not_restored", "a resumed run draws the first steps' numbers again",
        "gradwire/handles/sections.py",
        'member.step = saved["steps"][name]',
        "member.step = member.step",
        ("tests/handles/test_training_matrix.py",),
    ),
    Mutant(
        "plan_not_restored", "a resumed policy begins with the uniform plan",
        "gradwire/decide/policy.py",
        "            self._on.rewrite(partial(self._with, methods))\n",
        "",
        ("tests/multiprocess/test_adaptive.py",),
    ),
    # Decisions.
    Mutant(
        "scripts_in_any_order", "of several scripts that of the earliest pass goes first",
        "gradwire/decide/scripts.py",
        "return min(due, key=lambda one: one.due or 0, default=None)",
        "return max(due, key=lambda one: one.due or 0, default=None)",
        ("tests/decide/test_decision_scripts.py",),
    ),
    Mutant(
        "an_update_does_not_hold_up", "an update holds up other scripts until it is in force",
        "gradwire/decide/scripts.py",
        "for one in updating or self._scripts if",
        "for one in self._scripts if",
        ("tests/decide/test_decision_scripts.py",),
    ),
    Mutant(
        "auto_trusts_one_rank", "the slowest rank's passes count in a trial",
        "gradwire/decide/scripts.py",
        "return [max(of) for of in zip(*every, strict=True)]",
        "return every[0]",
        ("tests/decide/test_auto.py",),
    ),
    Mutant(
        "auto_at_any_price", "what is less exact must save a margin",
        "gradwire/decide/auto.py",
        "if taken < (1 - MARGIN) * least:",
        "if taken < least:",
        ("tests/decide/test_auto.py",),
    ),
    # Integrations.
    Mutant(
        "an_excluded_parameter_is_compressed", "law 9: only what is attached is compressed",
        "gradwire/planner/rules.py",
        'return _DENSE, ""',
        'return self.default, ""',
        ("tests/planner/test_plan.py",),
    ),
    Mutant(
        "fsdp2_takes_another_shard", "the own shard gets another rank's values",
        "gradwire/handles/scatter.py",
        "request.target.copy_(shards[rank])",
        "request.target.copy_(shards[rank - 1])",
        ("tests/multiprocess/test_sharded.py",),
    ),
    Mutant(
        "fsdp2_keeps_padding", "padding holds what was in memory before",
        "gradwire/handles/scatter.py",
        "output_tensor[piece.at + piece.lengths[rank] : piece.end].zero_()",
        "pass",
        ("tests/multiprocess/test_sharded_corners.py",),
    ),
    Mutant(
        "weights_not_encoded_anew", "a forward after a step uses the weights before it",
        "gradwire/handles/weights.py",
        "if self.kept is not None and (again or (frozen and self.version >= needed)):",
        "if self.kept is not None:",
        ("tests/multiprocess/test_sharded_weights.py",),
    ),
    Mutant(
        "frozen_weights_sent_always", "weights that nobody trains are sent in every step",
        "gradwire/handles/weights.py",
        'frozen = self.of.keep == "payload" and self.frozen',
        "frozen = False",
        ("tests/multiprocess/test_sharded_weights.py",),
    ),
    Mutant(
        "recovered_with_another_plan", "after an exception ranks go on with plans of their own",
        "gradwire/handles/handle.py",
        "plan = on.switch.prepared(version)",
        "plan = self.plan",
        ("tests/multiprocess/test_sharded_update.py",),
        hangs=True,
    ),
    Mutant(
        "one_shard_tells_no_version", "an update of replicas of one shard never comes into force",
        "gradwire/handles/scatters.py",
        "self.groups.scatter is None or self.groups.shards == 1",
        "self.groups.scatter is None",
        ("tests/multiprocess/test_sharded_replicas.py",),
    ),
    Mutant(
        "weights_draw_the_same_numbers", "rounding errors of weights never average out",
        "gradwire/handles/changes.py",
        "                versions.steps += 1",
        "                versions.steps = 1",
        ("tests/multiprocess/test_saved_handles.py",),
    ),
    Mutant(
        "frozen_later_is_never_gathered_anew", "a group frozen during training lacks its last step",
        "gradwire/handles/weights.py",
        "self.of.changes.version if frozen else OLD",
        "self.of.changes.version",
        ("tests/multiprocess/test_sharded_weights.py",),
    ),
    Mutant(
        "hsdp_owes_a_fraction", "a rank's own residual is lost as an update drops compression",
        "gradwire/handles/scatter.py",
        'weights[rank] = (ranks if reduction == "avg" else 1) / factor',
        "weights[rank] = 1.0",
        ("tests/multiprocess/test_sharded.py",),
    ),
    # Policies and the planner.
    Mutant(
        "hsdp_bench_crosses_each_time", "rows of deferred hops are of hops in each micro-batch",
        "gradwire_tools/bench/train/method_run.py",
        "self.model.set_requires_all_reduce(last)",
        "self.model.set_requires_all_reduce(True)",
        ("tests_tools/bench/test_train_sharded.py::test_machines_replicate_what_their_ranks_shard",),
    ),
    Mutant(
        "hsdp_counts_no_hop", "stats do not tell what goes to other machines",
        "gradwire/handles/scatters.py",
        "self.count(replicas_wire_bytes=sum(one.wire_bytes for one in outcomes))",
        "self.count(replicas_wire_bytes=0)",
        ("tests/multiprocess/test_sharded_replicas.py::test_only_what_crosses_is_compressed",),
    ),
    Mutant(
        "hsdp_policy_sees_one_replica", "replicas plan from averages that differ",
        "gradwire/handles/scatters.py",
        "least = self._run(*of, ends=self.groups.of_replicas == 1)",
        "least = self._run(*of)",
        ("tests/multiprocess/test_sharded_replicas.py",),
    ),
    Mutant(
        "policy_rounds_errors_down", "a plan exceeds its budget",
        "gradwire/controllers/knapsack.py",
        "whole = np.ceil(",
        "whole = np.floor(",
        ("tests/controllers/test_lgreco.py",),
    ),
    Mutant(
        "alpha_and_beta_swapped", "latency is taken for seconds per byte",
        "gradwire/planner/link_pair.py",
        "return [(driver, server, trip / 2, there, back)]",
        "return [(driver, server, there, trip / 2, back)]",
        ("tests/planner/test_measured_links.py",),
    ),
    Mutant(
        "directions_swapped", "a slow uplink is taken for a slow downlink",
        "gradwire/planner/links.py",
        "beta[i][j], beta[j][i] = there, back",
        "beta[j][i], beta[i][j] = there, back",
        ("tests/planner/test_measured_links.py",),
    ),
    # The simulator, the lab, the command line.
    Mutant(
        "a_link_sends_two_at_once", "simulated transfers take half their time",
        "gradwire_tools/sim/fabric.py",
        "if not egress.busy:",
        "if True:",
        ("tests_tools/sim/test_run.py",),
    ),
    Mutant(
        "a_link_receives_two_at_once", "all senders to one rank arrive at once",
        "gradwire_tools/sim/fabric.py",
        "begin = max(self._ingress[receiver.node], self.clock.now + self.link.latency)",
        "begin = self.clock.now + self.link.latency",
        ("tests_tools/sim/test_run.py",),
    ),
    Mutant(
        "lab_limits_egress_alone", "several senders to one node exceed its rate",
        "gradwire_tools/lab/supervisor.py",
        'self._run("tc", links.tc_shape(self._ports(), rate, netem_ns, verb))',
        'self._run("tc", links.tc_shape(self._ports(), 10**11, netem_ns, verb))',
        ("tests_tools/lab/test_settings.py",),
    ),
    Mutant(
        "bad_option_exits_with_0", "a script goes on after a misspelt option",
        "gradwire_tools/cli/program.py",
        "said, code = _misused(error), BAD_INPUT",
        "said, code = _misused(error), OK",
        ("tests_tools/cli/test_bad_input.py",),
    ),
)
