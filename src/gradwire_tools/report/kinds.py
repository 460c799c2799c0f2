"""The kinds of rows: by which keys each is known, and what stands under every key.

`check` is applied once to every row, when it is read, so that what draws meets no other values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.errors import ConfigError
from gradwire_tools.lab import Network

Row = dict[str, Any]

_LEAST, _MOST = 1e-100, 1e100  # of numbers other than zero: their ratios stay finite
_LONG = 2**63


@dataclass(frozen=True)
class Value:
    """What may stand under a key: in words, and as a test."""

    words: str
    allows: Callable[[Any], bool]

    def or_null(self) -> Value:
        return Value(f"{self.words} or null", lambda value: value is None or self.allows(value))


@dataclass(frozen=True)
class RowKind:
    """A kind of rows.

    Attributes:
        name: of the command that writes them.
        marks: the keys by which a row is known to be of this kind.
        values: marks that have one given value.
        keys: keys that every row has, and what they hold.
        more: keys that a row may have.
    """

    name: str
    marks: frozenset[str]
    values: Mapping[str, str]
    keys: Mapping[str, Value]
    more: Mapping[str, Value]

    def has(self, row: Row) -> bool:
        return self.marks <= row.keys() and all(row[k] == v for k, v in self.values.items())


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or _LEAST <= abs(value) <= _MOST


def _amount(value: Any) -> bool:
    return _number(value) and bool(value >= 0)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LONG


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _list(of: Callable[[Any], bool], null: bool = False) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list) and all((null and one is None) or of(one) for one in value)
    )


def _object(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


def _tried(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("used"), bool):
        return False
    return _text(value.get("setting")) and _amount(value.get("seconds"))


def _network(value: Any) -> bool:
    try:
        return isinstance(value, str) and Network.parse(value, emulated=False).shaped
    except ConfigError:
        return False


def _run(value: Any) -> bool:
    known = _object(lambda one: one is None or _text(one) or _number(one))(value)
    return value is None or (known and _amount(value.get("load") or 0))


_VALUES = {
    "text": Value("a text", _text),
    "number": Value("a number", _number),
    "amount": Value("a number of 0 or more", _amount),
    "integer": Value("an integer", _integer),
    "count": Value("an integer of 0 or more", lambda v: _integer(v) and v >= 0),
    "positive": Value("an integer of 1 or more", lambda v: _integer(v) and v > 0),
    "spread": Value(
        "a list of two numbers, the lower one first,",
        lambda v: _list(_amount)(v) and len(v) == 2 and v[0] <= v[1],
    ),
    "amounts": Value("a list of numbers of 0 or more", lambda v: _list(_amount)(v) and bool(v)),
    "integers": Value("a list of integers", _list(_integer)),
    "numbers": Value("a list of numbers or nulls", _list(_number, null=True)),
    "times": Value("a list of numbers of 0 or more or nulls", _list(_amount, null=True)),
    "flag": Value("true or false", lambda v: isinstance(v, bool)),
    "layers": Value("an object of numbers of 0 or more", _object(_amount)),
    "tried": Value("a list of what was tried: setting, seconds and used", _list(_tried)),
    "options": Value("an object", lambda v: isinstance(v, dict)),
    "plain": Value("a text or a number", lambda v: isinstance(v, bool | str) or _number(v)),
    "network": Value("a network as RATE,LATENCY", _network),
}
_RUN = Value("an object of texts and numbers or null", _run)


def _kind(name: str, marks: str, keys: str, more: str = "", **values: str) -> RowKind:
    """Of keys as "seconds:amount loss:number?", where `?` allows null."""
    known = frozenset([*marks.split(), *values])
    return RowKind(name, known, values, _values(keys), _values(more))


def _values(told: str) -> dict[str, Value]:
    found = {}
    for one in told.split():
        key, _, name = one.partition(":")
        value = _VALUES[name.rstrip("?")]
        found[key] = value.or_null() if name.endswith("?") else value
    return found


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
    _kind(
        "bench train", "",
        f"{_TRAIN} seed:integer step:count seconds:amount loss:number? wire_bytes:amount?",
        f"{_TRAIN_MORE} metric:number?", row="evaluation",
    ),
    _kind(
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
    _kind(
        "bench train", "",
        "task:text net:text method:text ranks:positive steps:count composed_seconds:amount? "
        "whole_seconds:amount? error:number?",
        "parameters:count? task_options:options composed_time_to_target:amount? "
        "whole_time_to_target:amount? composed_final_loss:number? whole_final_loss:number?",
        row="validation",
    ),
    _kind(
        "decisions", "", f"{_TRAIN} seed:integer step:count line:text",
        f"{_TRAIN_MORE} tried:tried", row="decision",
    ),
    _kind(
        "bench adapt", "policy family error_metric",
        "policy:text family:text task:text reference:text error_metric:text layers:positive "
        "choices:positive ratio:amount? uniform_ratio:amount? of_uniform:amount? error:amount? "
        "budget:amount? error_l2:amount? error_squared:amount? global_error:amount? "
        "solve_seconds:amount? fallback:text?",
        "at:count? sigma:amount? seed:count? bits_by_layer:layers?",
    ),
    _kind(
        "bench planner", "partition_ratio decline_ratio",
        "ranks:positive net:text nbytes:positive method:text algorithm:text "
        "segments:count? expected_seconds:amount seconds:amount best_method:text "
        "best_seconds:amount ratio:amount compress:flag best_compresses:flag "
        "decline_ratio:amount partition_ratio:amount? error:number settings:count",
        "message_seconds:amount coordinated:flag",
    ),
    _kind(
        "bench ablation", "where part cut",
        "where:text part:text method:text ranks:positive net:text numel:count "
        "step_seconds:amount? synchronisation_seconds:amount cut:number?", "model:text",
    ),
    _kind("bench error", "nmse error_feedback", _ERROR, _ERROR_MORE, row="total"),
    _kind("bench error", "nmse error_feedback", f"{_ERROR} layer:text", _ERROR_MORE, row="layer"),
    _kind(
        "bench aggregators", "method ms_per_million",
        "method:text task:text ranks:positive numel:positive seconds:number ms_per_million:number "
        "limit_seconds:amount of_limit:number? orthogonal_share:amount? rounds:count "
        "wire_bytes:amount state_bytes:amount wall_seconds:amount peak_extra_bytes:amount?",
        "parameters:count state_bytes_per_value:amount",
    ),
    _kind(
        "sim --validate", "measured_seconds simulated_seconds",
        "net:text method:text algorithm:text ranks:positive numel:count measured_seconds:amount "
        "simulated_seconds:amount error:number spread:amount", "of_limit:amount? runs:positive",
    ),
    _kind(
        "sim --sharded", "sharded forward_seconds backward_seconds",
        "method:text model:text net:text algorithm:text ranks:positive per_node:positive "
        "seconds:amount forward_seconds:amount backward_seconds:amount compute_seconds:amount "
        "blocking:flag weights_wire_bytes:amount gradients_wire_bytes:amount ratio:amount? "
        "limit_seconds:amount?", "machine:text? sweep:text value:plain",
    ),
    _kind("sim", _SIM_MARKS, f"{_SWEPT} net:network", "machine:text?", sweep="rate"),
    _kind("sim", _SIM_MARKS, f"{_SWEPT} net:network", "machine:text?", sweep="latency"),
    _kind("sim", f"{_SIM_MARKS} sweep", f"{_SWEPT} net:text", "machine:text?"),
    _kind("sim", _SIM_MARKS, f"{_SIM} net:text", "machine:text?"),
    _kind(
        "bench collectives", "method algorithm nmse limit_seconds",
        "method:text algorithm:text net:text ranks:positive numel:count seconds:amount "
        "wire_bytes:amount limit_seconds:amount? of_limit:amount? nmse:amount?",
        "transport:text per_node:positive? seconds_quartiles:spread? link_bytes:amount?",
    ),
    _kind(
        "bench kernels", "codec op gbps",
        "codec:text op:text target:text numel:count threads:positive seconds:amount gbps:amount "
        "of_limit:amount", "device:text options:options? limit_seconds:amount? copy_gbps:amount?",
    ),
    _kind(
        "bench profile", "method part seconds",
        "method:text part:text net:text seconds:amount ranks:positive numel:count", "steps:count",
    ),
    _kind(
        "bench transports", "transport latency_us",
        "transport:text bytes:positive latency_us:amount gbps:amount",
    ),
    _kind(
        "probe", "from to alpha",
        f"{_PROBED} measured:text from:count to:count alpha:amount beta:amount bandwidth:amount?",
        part="pair",
    ),
    _kind(
        "probe", "cached bytes", f"{_PROBED} measured:text bytes:count seconds:amount",
        part="send",
    ),
    _kind(
        "probe", "codec form call",
        f"{_PROBED} codec:text form:text call:amount value:amount payload:amount",
        "threads:positive", part="curve",
    ),
    _kind("doctor", "part available method", _STEP, _STEP_MORE),
    _kind("doctor", "part available step_seconds", _STEP),  # without its method: refused
    _kind("doctor", "part available detail", "part:text available:flag detail:text"),
)  # fmt: skip


def kind_of(row: Row) -> RowKind | None:
    """The kind of a row; None if it is of none."""
    return next((kind for kind in KINDS if kind.has(row)), None)


def check(row: Row, where: str) -> None:
    """Raise ConfigError, which begins with `where` and names the key, if the row is not as its kind
    is."""
    if not row:
        raise ConfigError(f"{where}: the row has no keys")
    kind = kind_of(row)
    needed = dict(kind.keys) if kind else {}
    allowed = {**needed, **(kind.more if kind else {}), "run": _RUN}
    whose = f", a row of `gradwire {kind.name}`" if kind else ""
    for key, value in allowed.items():
        if key not in row and key not in needed:
            continue
        if key not in row or not value.allows(row[key]):
            found = f"{key!r} is {json.dumps(row[key])[:60]}" if key in row else f"no {key!r}"
            raise ConfigError(f"{where}{whose}: {found}, where {value.words} is needed")
