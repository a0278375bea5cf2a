"""Output of `gpu.py` for each part, and for all at the end."""

from __future__ import annotations

from typing import Any

__all__ = ["lines_of", "summary"]

ERROR_LINES = 12


def lines_of(name: str, entry: dict[str, Any]) -> list[str]:
    """Return the lines for a part that has ended, one way or another."""
    if entry["status"] != "ok":
        said = entry["error"].splitlines()[-ERROR_LINES:]
        return [f"{name}: {entry['status']}: {said[0] if said else ''}", *said[1:]]
    result = entry["result"]
    head = f"{name} ({entry['seconds']:.1f} s)"
    if name == "card":
        return [head, *card_lines(result)]
    if "workloads" in result:
        return [head, *peer_lines(result)]
    if "runs" in result:
        lines = [head]
        for run, found in result["runs"].items():
            rate = found.get("requests_per_second")
            lines.append(f"  {run}" + ("" if rate is None else f", {rate:.2f} requests/s sent"))
            lines += [f"  {line}" for line in run_lines(found)]
        if "ratio" in result:
            lines.append(f"  in common is {result['ratio']:.2f} times as fast")
        return lines
    return [head, *run_lines(result["best"])]


def card_lines(result: dict[str, Any]) -> list[str]:
    limits, machine = result["limits"], result["machine"]
    lines = [
        f"  reads {limits['bytes_per_second'] / 1e9:,.1f} GB/s ({limits['fastest_read']}), "
        f"multiplies {limits['flops_per_second'] / 1e12:,.2f} TFLOP/s ({limits['fastest_product']})"
    ]
    for part in ("gpu", "torch", "cupy", "triton"):
        facts = ", ".join(f"{key} {value}" for key, value in machine.get(part, {}).items())
        lines.append(f"  {part}: {facts}")
    return lines


def peer_lines(result: dict[str, Any]) -> list[str]:
    lines = [f"  version {result['version']}, started in {result['start_seconds']:.1f} s"]
    if "attention" in result:
        lines.append(f"  attention: {result['attention']}")
    for workload, found in result["workloads"].items():
        lines.append(f"  {workload}: {found['output_tokens_per_second']:,.1f} tokens/s out")
    return lines


def run_lines(run: dict[str, Any]) -> list[str]:
    """Return the lines for one run of an aioserve engine."""
    rates, answers, device, host = (run[key] for key in ("throughput", "answers", "device", "host"))
    lag = run["loop_lag_milliseconds"]
    lines = [
        f"  {answers['requests']} requests in {run['seconds']:.3f} s: "
        f"{rates['output_tokens_per_second']:,.1f} tokens/s out, "
        f"{rates['prompt_tokens_per_second']:,.1f} in "
        f"({run['prompt_tokens_cached']:,} of {answers['prompt_tokens']:,} cached)",
        *(
            f"  {title:<22} {percentiles(run['latency_milliseconds'][key], 'ms')}"
            for key, title in (("ttft", "time to first token"), ("tpot", "time per output token"))
        ),
        f"  host per step          planning {host['planning_microseconds_per_step']:.0f} us, "
        f"commit {host['commit_microseconds_per_step']:.0f} us, "
        f"delivery {host['delivery_microseconds_per_step']:.0f} us: "
        f"{host['share_of_step']:.1%} of {host['step_milliseconds']:.3f} ms",
        f"  steps                  {device['steps']}, {device['graph_steps']} as graphs "
        f"({percentiles(device['graph_milliseconds'], 'ms')}), others "
        f"({percentiles(device['eager_milliseconds'], 'ms')})",
        f"  device idle            {device['idle_share']:.1%} of "
        f"{device['busy_seconds'] + device['idle_seconds']:.3f} s between steps, by the clock of "
        f"the {device['clock']} ({percentiles(device['idle_milliseconds'], 'ms')})",
        f"  loop lag of a ticker   {percentiles(lag, 'ms')}",
    ]
    return [*lines, *floor_lines(run)]


def floor_lines(run: dict[str, Any]) -> list[str]:
    found = run["floor"]
    if found is None:
        return ["  floor                  unknown without the part card"]
    kinds = []
    for kind in ("decodes", "with_prompts"):
        part = found[kind]
        if part["steps"]:
            share = part["floor_seconds"] / part["seconds"]
            kinds.append(f"{kind.replace('_', ' ')} {share:.2f} of {part['seconds']:.3f} s")
    return [
        f"  floor                  {found['seconds']:.3f} s of {run['seconds']:.3f} s: "
        f"{found['share']:.2f} ({', '.join(kinds)})"
    ]


def percentiles(found: dict[str, float] | None, unit: str) -> str:
    if found is None:
        return "none"
    names = [name for name in ("p50", "p90", "p99", "max") if name in found]
    return ", ".join(f"{name} {found[name]:,.3f}" for name in names) + f" {unit}"


def summary(results: dict[str, Any]) -> list[str]:
    """Return tokens a second out, of aioserve and its peers, and the ratio."""
    lines = []
    for workload in ("offline", "single"):
        if workload not in results:
            continue
        own = results[workload]["best"]["throughput"]["output_tokens_per_second"]
        lines.append(f"{workload}: aioserve {own:,.1f} tokens/s out")
        for peer, result in results.items():
            if workload in result.get("workloads", {}):
                theirs = result["workloads"][workload]["output_tokens_per_second"]
                lines.append(
                    f"  {peer} {theirs:,.1f}: aioserve is {own / theirs:.2f} times as fast"
                )
    return lines
