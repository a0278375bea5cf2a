"""Options of the simulator, cost tables, profiles and hardware that make no sense: refused with a
short error, before they cost time or memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aioserve import SchedulingPolicy
from aioserve.capacity.capacity import capacity_of
from aioserve.capacity.hardware import PRESETS, Hardware, hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.cli import main
from aioserve.errors import ConfigError
from aioserve.kv.eviction import PageUse
from aioserve.simulation.calibration import read_cost, read_latency_profile
from aioserve.simulation.cost import CostTable, place_on
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.steps.plan import StepPlan
from aioserve.testing import (
    check_admission,
    check_eviction,
    check_observer,
    check_policy,
    replay,
)
from aioserve.traces.trace_request import TraceRequest
from tests import made_up_traces
from tests.attacks.hostile import hostile_texts, hostile_values, is_named, named_errors
from tests.attacks.mutations import NUMBERS, little_memory, mutated
from tests.timing import computing_at_most

MAX_SECONDS = 8.0
TRACE = [TraceRequest(n, n / 10, 40, 3, (), 40) for n in range(6)]
TABLE = {
    "prefill_tokens": [0, 100, 300],
    "decode_batch": [0, 8],
    "seconds": [[0.0, 0.2], [1.0, 1.4], [2.0, 2.4]],
}
MODEL = ModelShape.of(read_model("llama-3-8b"))


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with little_memory():
        yield


class OneSecond:
    def step_seconds(self, plan: StepPlan) -> float:
        return 1.0


class OldestFirst:
    def key(self, use: PageUse) -> float:
        return use.created_tick


def simulated(**options: Any) -> None:
    given = dict[str, Any](cost=OneSecond(), num_pages=64)
    result = simulate(
        options.pop("trace", TRACE), options.pop("policy", SchedulingPolicy()), **(given | options)
    )
    assert all(record.ending is not None for record in result.requests)


def commanded(*words: str) -> tuple[int, str]:
    """The exit code of `aioserve`, and what it wrote to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as leaving,
    ):
        main(list(words))
    return int(leaving.value.code or 0), err.getvalue()


# -- what was found


@pytest.mark.clock
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--num-pages", 2**31),
        ("--num-pages", 2**63),
        ("--num-pages", 10**400),
        ("--max-num-seqs", 10**12),
        ("--max-num-seqs", 10**400),
        ("--max-num-batched-tokens", 10**12),
        ("--page-size", 10**12),
        ("--max-tokens", 10**30),
        ("--num-requests", 10**12),
        ("--num-devices", 10**12),
        ("--num-devices", 10**400),
        ("--seed", 10**400),
        ("--rate", "1e-300"),
        ("--rate", "inf"),
        ("--rate", "nan"),
        ("--scale-lengths", "1e300"),
        ("--scale-lengths", "nan"),
        ("--ttft-target-seconds", "inf"),
        ("--tpot-target-seconds", "nan"),
        ("--model", "x" * 300 + ".json"),
        ("--model", "~nosuchuser/config.json"),
        ("--cost-table", "/dev/zero"),
        ("--cost-table", "."),
    ],
)
def test_an_option_beyond_all_use_is_one_line_and_exit_code_2(option: str, value: object) -> None:
    words = [] if option == "--num-requests" else ["--num-requests", "5"]
    with computing_at_most(MAX_SECONDS):
        code, said = commanded("simulate", "--synthetic", "bursts", *words, option, str(value))
    assert (code, said.count("\n")) == (2, 1), said[-500:]
    assert said.startswith("aioserve: ")
    assert len(said) < 1500


@pytest.mark.parametrize("trace", ["/dev/zero", "fifo", "x" * 300])
def test_a_trace_that_is_none_is_one_line_and_exit_code_2(tmp_path: Path, trace: str) -> None:
    if trace == "fifo":
        os.mkfifo(tmp_path / "fifo")
        trace = str(tmp_path / "fifo")
    code, said = commanded("simulate", trace)
    assert (code, said.count("\n")) == (2, 1), said[-500:]


def test_a_trace_whose_name_is_no_text_is_simulated_and_reported(tmp_path: Path) -> None:
    trace = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.csv")
    Path(trace).write_text("arrival_s,context_tokens,generated_tokens\n0,10,2\n")
    for words in (["--json"], ["--report", str(tmp_path / "page.html")]):
        assert commanded("simulate", trace, *words) == (0, "")
    assert ".csv: fcfs" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_pipe_is_no_place_for_a_report(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    words = ("--synthetic", "bursts", "--num-requests", "5", "--report", str(tmp_path / "fifo"))
    code, said = commanded("simulate", *words)
    assert (code, said.count("\n")) == (2, 1)
    assert "pipe" in said


def test_memory_without_a_limit_has_one_after_all() -> None:
    trace = [TraceRequest(n, 0.0, 1 << 24, 1, (), 1 << 24) for n in range(40)]
    with pytest.raises(ConfigError, match="num_pages=None"):
        simulated(trace=trace, num_pages=None)


@pytest.mark.more
def test_prompts_that_wait_are_refused_before_they_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = [TraceRequest(n, 0.0, 1 << 24, 1, (), 1 << 24) for n in range(4000)]
    made: list[int] = []
    prompt_ids = TraceRequest.prompt_ids

    def counted(request: TraceRequest) -> object:
        made.append(request.number)
        return prompt_ids(request)

    monkeypatch.setattr(TraceRequest, "prompt_ids", counted)
    with pytest.raises(ConfigError, match="trace: 33 requests wait or run at 0 s, with 553648128 "):
        simulated(trace=trace, num_pages=1 << 21)
    assert made == list(range(32))


@pytest.mark.more
def test_tenants_that_wait_at_once_are_refused_before_they_fill_the_memory() -> None:
    trace = [
        TraceRequest(n, 0.0, 1, 1, (), 1, tenant=f"tenant {n % 20_000}") for n in range(40_000)
    ]
    with pytest.raises(ConfigError, match="tenants"):
        simulated(trace=trace, max_num_seqs=60_000, max_num_batched_tokens=60_000)


@pytest.mark.parametrize("eviction", ["lfu", OldestFirst()])
@pytest.mark.parametrize("idle", [{"num_pages": None}, {"prefix_caching": False}])
def test_an_eviction_with_nothing_to_decide_is_refused_from_python_too(
    eviction: Any, idle: dict[str, Any]
) -> None:
    simulated(eviction=eviction)
    with pytest.raises(ConfigError, match=r"eviction=.* has no effect"):
        simulated(eviction=eviction, **idle)
    options: dict[str, Any] = {"num_pages": 64} | idle
    if options["num_pages"] is None:  # which replay takes for what the devices hold
        options = {"unbounded_cache": True}
    with pytest.raises(ConfigError, match=r"eviction=.* has no effect"):
        replay(TRACE, "fcfs", eviction=eviction, **options)


@pytest.mark.parametrize(
    "seconds", [0, -1.0, float("nan"), float("inf"), 1e300, 5e-324, 10**400, "1", None, [1.0]]
)
def test_steps_that_take_no_time_or_all_of_it_are_refused(seconds: Any) -> None:
    class Cost:
        def step_seconds(self, plan: StepPlan) -> Any:
            return seconds

    trace = [TraceRequest(n, 1e9 + n, 40, 3, (), 40) for n in range(6)]
    with pytest.raises(ConfigError, match="cost: ") as caught:
        simulated(cost=Cost(), trace=trace)
    assert is_named(caught.value)


def test_a_cost_model_that_raises_is_named() -> None:
    class Cost:
        def step_seconds(self, plan: StepPlan) -> float:
            raise OverflowError("no idea")

    with pytest.raises(ConfigError, match=r"cost: step_seconds: .*no idea"):
        simulated(cost=Cost())


def test_answers_without_end_are_read_as_they_are_served() -> None:
    """Huge limits of a completion are accepted: a limit takes no memory by itself."""
    trace = [TraceRequest(0, 0.0, 40, 1 << 24, (), 40, max_tokens=2**31 - 1)]
    simulated(trace=trace, num_pages=64)
    simulated(output_reserve_tokens=2**31 - 1)
    simulated(max_tokens=2**31 - 1, num_pages=None)


# -- tables, profiles, hardware and models


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        json.dumps(TABLE)[:-1] + ', "measured": {"a": ' + "[" * 20_000 + "]" * 20_000 + "}}",
        json.dumps(TABLE | {"prefill_tokens": [0, 1, 10**30]}),
        json.dumps(TABLE | {"seconds_per_context_token": 1e300}),
        json.dumps(TABLE | {"seconds": [[0.0, 1e300]] * 3}),
        json.dumps(TABLE | {"x" * 10**6: 1}),
        json.dumps(TABLE) + " " * (20 << 20),
        json.dumps(TABLE | {"prefill_tokens": list(range(10**5))}),
    ],
    ids=range(8),
)
def test_a_table_beyond_all_use_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"cost table {path}: ") as caught:
        read_cost(str(path))
    assert is_named(caught.value)


def test_a_place_on_a_long_axis_is_found_as_on_a_short_one() -> None:
    axis = [0, 1, 5, 9, 30]
    for value in range(40):
        index, along = place_on(axis, value)
        assert 0 <= index <= 3
        assert axis[index] + along * (axis[index + 1] - axis[index]) == pytest.approx(value)
        assert along <= 1 or index == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"flops_per_second": 0.0},
        {"flops_per_second": float("nan")},
        {"bytes_per_second": -1.0},
        {"memory_bytes": 10**400},
        {"step_seconds": float("inf")},
        {"compute_efficiency": 0.0},
        {"bandwidth_efficiency": 2.0},
        {"num_devices": 0},
        {"num_devices": "1"},
    ],
)
def test_hardware_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    good = {name: getattr(PRESETS["h100"], name) for name in Hardware.__struct_fields__}
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Hardware(**(good | changes))


def config_of(tmp_path: Path, **changes: Any) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 320,
        "max_position_embeddings": 512,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | changes))
    return str(path)


@pytest.mark.clock
@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 10**9, "num_key_value_heads": 10**9, "head_dim": 2},
        {"num_attention_heads": 10**15, "num_key_value_heads": 10**15, "head_dim": 2},
        {"hidden_size": 2**70, "num_attention_heads": 2**60, "num_key_value_heads": 2**60},
        {"intermediate_size": 10**300, "vocab_size": 10**300},
    ],
)
def test_a_model_beyond_all_use_is_refused_or_counted_quickly(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    name = config_of(tmp_path, **changes)
    for verb in ("plan", "simulate"):
        words = [name] if verb == "plan" else ["--synthetic", "bursts", "--model", name]
        with computing_at_most(MAX_SECONDS):
            code, said = commanded(verb, *words)
        assert code in (0, 1, 2)
        assert said.count("\n") == (code != 0), said


@pytest.mark.parametrize("check", [check_policy, check_eviction, check_observer, check_admission])
def test_a_check_of_a_plugin_has_arguments_that_are_some(check: Callable[..., None]) -> None:
    for made in (5, None, SchedulingPolicy()):
        with pytest.raises(ConfigError, match="must be callable"):
            check(made)
    for most in (0, -1, 10**12, 10**5000, True, "5", 1.5, None):
        with pytest.raises(ConfigError, match="max_examples must be"):
            check(SchedulingPolicy, max_examples=most)


LONG = "x" * 20_000


@pytest.mark.parametrize(
    "name",
    [LONG, f"{LONG}:a=1", f"fcfs:{LONG}", f"fcfs:{LONG}=1", f"round_robin:chunk_size={LONG}"],
)
@pytest.mark.parametrize("option", ["policy", "eviction"])
def test_a_name_of_any_length_is_refused_in_few_words(option: str, name: str) -> None:
    arguments: dict[str, Any] = {"policy": "fcfs", "cost": OneSecond(), "num_pages": 64}
    arguments[option] = name
    with pytest.raises(ConfigError) as caught:
        replay(TRACE, arguments.pop("policy"), **arguments)
    assert len(str(caught.value)) < 300


# -- and what nobody has thought of

COUNTS = st.one_of(hostile_values(), st.sampled_from([1, 2, 2**20, 2**25, 2**31 - 1]))
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "num_pages": st.one_of(hostile_values(), st.sampled_from([1, 2, 100])),
    "page_size": COUNTS,
    "max_num_seqs": COUNTS,
    "max_num_batched_tokens": COUNTS,
    "output_reserve_tokens": COUNTS,
    "max_tokens": COUNTS,
    "prefix_caching": hostile_values(),
    "eviction": hostile_values(),
    "overlap": hostile_values(),
    "timeline": hostile_values(),
    "on_progress": hostile_values(),
    "policy": hostile_values(),
    "cost": hostile_values(),
    "trace": hostile_values(),
}


WINDOWS = {
    "num_host_pages": COUNTS,
    "num_window_groups": st.one_of(hostile_values(), st.sampled_from([1, 5, 1024])),
    "window": COUNTS,
}


def some_options(
    options: dict[str, st.SearchStrategy[Any]] = OPTIONS,
) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(st.sampled_from(list(options)), min_size=1, max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: options[name] for name in names})
    )


@given(some_options(OPTIONS | WINDOWS) | st.fixed_dictionaries(WINDOWS))
def test_fuzz_simulation_options(options: dict[str, Any]) -> None:
    with computing_at_most(MAX_SECONDS), named_errors():
        simulated(**options)


OF_REPLAY: dict[str, st.SearchStrategy[Any]] = {
    name: hostile_values()
    for name in (
        "num_requests",
        "arrivals",
        "rate",
        "seed",
        "closed_loop",
        "scale_lengths",
        "predictor",
        "priority",
        "num_devices",
        "step_noise",
        "num_host_pages",
        "unbounded_cache",
        "max_model_len",
        "preemption",
    )
}


@given(some_options() | st.fixed_dictionaries({}, optional=OF_REPLAY))
def test_fuzz_replay(options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"cost": OneSecond(), "num_pages": 64, **options}
    trace, policy = arguments.pop("trace", TRACE), arguments.pop("policy", "fcfs")
    with computing_at_most(MAX_SECONDS), named_errors():
        replay(trace, policy, **arguments)


WORDS = st.one_of(
    st.sampled_from(NUMBERS),
    hostile_texts(),
    st.integers(-1, 60).map(str),
    st.floats(-1, 10).map(str),
).map(lambda text: "".join(c for c in text if c != "\0" and not "\ud800" <= c <= "\udfff"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    *("--num-requests", "--seed", "--rate", "--scale-lengths", "--model"),
                    *("--hardware", "--num-devices", "--cost-table", "--num-pages", "--page-size"),
                    *("--max-num-seqs", "--max-num-batched-tokens", "--max-tokens", "--eviction"),
                    *("--ttft-target-seconds", "--tpot-target-seconds", "--gantt-window"),
                    *("--policy", "--synthetic"),
                ]
            ),
            WORDS,
        ),
        min_size=1,
        max_size=2,
    )
)
@example([("--num-requests", "5"), ("--num-pages", "9")])
def test_fuzz_simulate_command(options: list[tuple[str, str]]) -> None:
    words = [] if any(name == "--synthetic" for name, _ in options) else ["--synthetic", "bursts"]
    # What is large and allowed is simulated, which takes as long as there is to do.
    for name, value in (("--num-requests", "9"), ("--max-tokens", "4")):
        words += [] if any(name == given for given, _ in options) else [name, value]
    words += [word for pair in options for word in pair]
    with computing_at_most(MAX_SECONDS):
        code, said = commanded("simulate", *words)
    assert code in (0, 1, 2), said
    if code == 1:  # what is no matter of the command line says so in one line too
        assert said.startswith("aioserve: ")
    assert "Traceback" not in said


def _profile() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        lines = gzip.decompress(made_up_traces.splitwise(Path(name)).read_bytes()).splitlines()
    return b"\n".join(lines[:30]) + b"\n"


PROFILE = _profile()
ROWS = [json.loads(line) for line in PROFILE.splitlines()]
FILES = {
    "table.json": json.dumps(TABLE | {"measured": {"a": 1}}).encode(),
    "profile.jsonl": PROFILE,
    "profile.csv": "\n".join(
        [",".join(ROWS[0]), *(",".join(row.values()) for row in ROWS), ""]
    ).encode(),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FILES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_fuzz_latency_profiles(tmp_path: Path, name: str, data: st.DataObject) -> None:
    text = data.draw(mutated(FILES[name]))
    path = tmp_path / name
    if text[:2] == b"\x1f\x8b" and name != "table.json":
        path = tmp_path / f"{name}.gz"
    path.write_bytes(text)
    with computing_at_most(MAX_SECONDS), named_errors():
        if name == "table.json":
            simulated(cost=read_cost(str(path)))
        else:
            simulated(cost=read_latency_profile(path, "llama2-70b,a100-80gb,2"))


def _fields(kind: Any, good: dict[str, Any]) -> Callable[[st.DataObject], None]:
    def attack(data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(good)), min_size=1, max_size=2))
        with named_errors():
            kind(**(good | {name: data.draw(hostile_values()) for name in names}))

    return attack


H100 = {name: getattr(PRESETS["h100"], name) for name in Hardware.__struct_fields__}
SHAPE = {name: getattr(MODEL, name) for name in ModelShape.__struct_fields__}


def one_step(**fields: Any) -> None:
    """Assert that a roofline simulates with any hardware and model that it accepts."""
    model = ModelShape(**{n: v for n, v in fields.items() if n in SHAPE})
    hardware = Hardware(**{n: v for n, v in fields.items() if n in H100})
    simulated(cost=RooflineCost(model, hardware))


@pytest.mark.parametrize(
    "attack",
    [
        _fields(one_step, H100 | SHAPE),
        _fields(RooflineCost, {"model": MODEL, "hardware": PRESETS["h100"]}),
        _fields(PRESETS["h100"].times, {"num_devices": 2}),
        _fields(hardware_preset, {"name": "h100"}),
        _fields(
            CostTable,
            TABLE
            | {
                "seconds_per_context_token": 0.0,
                "step_noise": None,
                "max_context_tokens": 9,
                "max_attended_pairs": 9,
                "kv": None,
            },
        ),
        _fields(
            lambda **options: capacity_of("m", read_model("llama-3-8b"), **options),
            {
                "dtype": "auto",
                "kv_dtype": "auto",
                "contexts": (),
                "gpu_memory_bytes": 80 << 30,
                "num_gpus": 1,
                "memory_utilization": 0.9,
                "page_size": 16,
            },
        ),
        _fields(read_model, {"name": "llama-3-8b"}),
    ],
    ids=["roofline", "cost", "times", "preset", "table", "capacity", "model"],
)
@given(st.data())
def test_fuzz_hardware_models_and_tables(
    attack: Callable[[st.DataObject], None], data: st.DataObject
) -> None:
    attack(data)
