"""The kinds of rows, in the order in which a row is compared with them."""

from gradwire_tools.bench.rows import Row, RowKind, kind

_TRAIN = "task:text net:text method:text ranks:positive"
_TRAIN_MORE = (
    "parameters:count? metric_name:text? link_bytes:amount? peak_extra_bytes:amount? "
    "rolling_loss:number? rolling_metric:number? timing_only:flag composed:flag "
    "task_options:options sharded:flag policy:text accumulate:positive "
    "weights_wire_bytes:amount? gradients_wire_bytes:amount?"
)
_SIM = (
    "codec:text algorithm:text model:text ranks:positive seconds:amount wire_bytes:amount "
    "messages:count limit_seconds:amount?"
)
_SIM_MARKS = "codec backward_seconds buckets"
_SWEPT = f"{_SIM} sweep:text value:plain"
_STEP = (
    "part:text available:flag detail:text method:text net:text ranks:positive numel:count "
    "step_seconds:amount compute_seconds:amount communication_seconds:amount "
    "exposed_seconds:amount turn_seconds:amounts"
)
_STEP_MORE = "machines:positive transport:text load:amount cores:positive"
_PROBED = "ranks:positive net:text cached:flag"
_ERROR = (
    "task:text at:count steps:positive ranks:positive method:text algorithm:text "
    "error_feedback:flag numel:count nmse:amount? nmse_of_fed:amount? nmse_of_sum:amount? "
    "cosine:number? input_bits:amount packed_bits:amount wire_bytes:amount?"
)
_ERROR_MORE = "nmse_by_step:times recorded:options"

KINDS = (
    kind(
        "bench train", "",
        f"{_TRAIN} seed:integer step:count seconds:amount loss:number? wire_bytes:amount?",
        f"{_TRAIN_MORE} metric:number?", row="evaluation",
    ),
    kind(
        "bench train", "",
        f"{_TRAIN} steps:count final_loss:number? target:number? time_to_target:amount? "
        "step_seconds:amount? ideal_step_seconds:amount? wire_bytes:amount?",
        f"{_TRAIN_MORE} seeds:integers? target_from:text? time_to_target_by_seed:times? "
        "final_metric:number? final_loss_by_seed:numbers? seconds:amount? "
        "step_seconds_quartiles:spread? step_seconds_mean:amount? timed_steps:amount? "
        "timed_bytes:amount? "
        "kernel_seconds:amount? "
        "exposed_seconds:amount? mean_ratio:amount? plan_changes:amount? "
        "utility:amount? evaluation_gap_seconds:amount? "
        "steps_by_seed:integers? wire_bytes_per_step:amount? link_bytes_per_step:amount? "
        "utility_against:text? final_metric_by_seed:numbers? "
        "final_metric_difference_by_seed:numbers?", row="summary",
    ),
    kind(
        "bench train", "",
        "task:text net:text method:text ranks:positive steps:count composed_seconds:amount? "
        "whole_seconds:amount? error:number?",
        "parameters:count? task_options:options composed_time_to_target:amount? "
        "whole_time_to_target:amount? composed_final_loss:number? whole_final_loss:number?",
        row="validation",
    ),
    kind(
        "decisions", "", f"{_TRAIN} seed:integer step:count line:text",
        f"{_TRAIN_MORE} tried:tried", row="decision",
    ),
    kind(
        "bench adapt", "policy family error_metric",
        "policy:text family:text task:text reference:text error_metric:text layers:positive "
        "choices:positive ratio:amount? uniform_ratio:amount? of_uniform:amount? error:amount? "
        "budget:amount? error_l2:amount? error_squared:amount? global_error:amount? "
        "solve_seconds:amount? fallback:text?",
        "at:count? sigma:amount? seed:count? bits_by_layer:layers?",
    ),
    kind(
        "bench planner", "partition_ratio decline_ratio",
        "ranks:positive net:text nbytes:positive method:text algorithm:text "
        "segments:count? expected_seconds:amount seconds:amount best_method:text "
        "best_seconds:amount ratio:amount compress:flag best_compresses:flag "
        "decline_ratio:amount partition_ratio:amount? error:number settings:count",
        "message_seconds:amount coordinated:flag",
    ),
    kind(
        "bench ablation", "where part cut",
        "where:text part:text method:text ranks:positive net:text numel:count "
        "step_seconds:amount? synchronisation_seconds:amount cut:number?", "model:text",
    ),
    kind("bench error", "nmse error_feedback", _ERROR, _ERROR_MORE, row="total"),
    kind("bench error", "nmse error_feedback", f"{_ERROR} layer:text", _ERROR_MORE, row="layer"),
    kind(
        "bench aggregators", "method ms_per_million",
        "method:text task:text ranks:positive numel:positive seconds:number ms_per_million:number "
        "limit_seconds:amount of_limit:number? orthogonal_share:amount? rounds:count "
        "wire_bytes:amount state_bytes:amount wall_seconds:amount peak_extra_bytes:amount?",
        "parameters:count state_bytes_per_value:amount",
    ),
    kind(
        "sim --validate", "measured_seconds simulated_seconds",
        "net:text method:text algorithm:text ranks:positive numel:count measured_seconds:amount "
        "simulated_seconds:amount error:number spread:amount", "of_limit:amount? runs:positive",
    ),
    kind(
        "sim --sharded", "sharded forward_seconds backward_seconds",
        "method:text model:text net:text algorithm:text ranks:positive per_node:positive "
        "seconds:amount forward_seconds:amount backward_seconds:amount compute_seconds:amount "
        "blocking:flag weights_wire_bytes:amount gradients_wire_bytes:amount ratio:amount? "
        "limit_seconds:amount?", "machine:text? sweep:text value:plain",
    ),
    kind("sim", _SIM_MARKS, f"{_SWEPT} net:network", "machine:text?", sweep="rate"),
    kind("sim", _SIM_MARKS, f"{_SWEPT} net:network", "machine:text?", sweep="latency"),
    kind("sim", f"{_SIM_MARKS} sweep", f"{_SWEPT} net:text", "machine:text?"),
    kind("sim", _SIM_MARKS, f"{_SIM} net:text", "machine:text?"),
    kind(
        "bench collectives", "method algorithm nmse limit_seconds",
        "method:text algorithm:text net:text ranks:positive numel:count seconds:amount "
        "wire_bytes:amount limit_seconds:amount? of_limit:amount? nmse:amount?",
        "transport:text per_node:positive? seconds_quartiles:spread? link_bytes:amount?",
    ),
    kind(
        "bench kernels", "codec op gbps",
        "codec:text op:text target:text numel:count threads:positive seconds:amount gbps:amount "
        "of_limit:amount", "device:text options:options? limit_seconds:amount? copy_gbps:amount?",
    ),
    kind(
        "bench profile", "method part seconds",
        "method:text part:text net:text seconds:amount ranks:positive numel:count", "steps:count",
    ),
    kind(
        "bench transports", "transport latency_us",
        "transport:text bytes:positive latency_us:amount gbps:amount",
    ),
    kind(
        "probe", "from to alpha",
        f"{_PROBED} measured:text from:count to:count alpha:amount beta:amount bandwidth:amount?",
        part="pair",
    ),
    kind(
        "probe", "cached bytes", f"{_PROBED} measured:text bytes:count seconds:amount",
        part="send",
    ),
    kind(
        "probe", "codec form call",
        f"{_PROBED} codec:text form:text call:amount value:amount payload:amount",
        "threads:positive", part="curve",
    ),
    kind("doctor", "part available method", _STEP, _STEP_MORE),
    kind("doctor", "part available step_seconds", _STEP),  # without its method: refused
    kind("doctor", "part available detail", "part:text available:flag detail:text"),
)  # fmt: skip


def kind_of(row: Row) -> RowKind | None:
    """The kind of a row; None if it is of none."""
    return next((kind for kind in KINDS if kind.has(row)), None)
