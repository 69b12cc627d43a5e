#!/usr/bin/env python3
"""Writes the Grafana dashboards under deploy/grafana/dashboards; with --check only says whether they would change."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "deploy/grafana/dashboards"
WIDTH, HEIGHT = 24, 8
PREFIX_TOKENS = "stepwire_prefix_cache"
PROMETHEUS, JAEGER = {"type": "prometheus", "uid": "prometheus"}, {"type": "jaeger", "uid": "jaeger"}


@dataclass(frozen=True)
class Panel:
    """A graph: its queries by legend, its unit as Grafana names it, and what a reader should know."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    stacked: bool = False


def rate(metric: str, by: str = "") -> str:
    """Events a second, summed over instances."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[$__rate_interval]))"


def quantiles(metric: str, by: str = "") -> list[tuple[str, str]]:
    """The median, 95th and 99th percentile of a histogram."""
    labels = ", ".join(filter(None, ("le", by)))
    legend = f" {{{{{by}}}}}" if by else ""
    return [
        (f"p{q}{legend}", f"histogram_quantile({q / 100}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))")
        for q in (50, 95, 99)
    ]


def mean(metric: str, by: str) -> list[tuple[str, str]]:
    """The mean of a histogram, by a label."""
    total, count = (f"sum by ({by}) (rate({metric}_{part}[$__rate_interval]))" for part in ("sum", "count"))
    return [(f"{{{{{by}}}}}", f"{total} / {count}")]


def mean_of(metric: str, legend: str) -> list[tuple[str, str]]:
    """The mean of a histogram."""
    return [(legend, f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}")]


SERVICE = [
    Panel("Serving", [("{{model}} {{instance}}", "stepwire_ready")], kind="stat", text="1 while requests are taken."),
    Panel(
        "Requests a second, by end",
        [("{{finish_reason}}", rate("stepwire_requests_total", "finish_reason"))],
        "reqps",
        stacked=True,
    ),
    Panel(
        "Refused a second, by reason",
        [("{{reason}}", rate("stepwire_requests_refused_total", "reason"))],
        "reqps",
        "QUEUE_FULL: more comes in than is served. Clients are told when to come back.",
    ),
    Panel("Time to first token", quantiles("gen_ai_server_time_to_first_token_seconds"), "s"),
    Panel("Time per output token", quantiles("gen_ai_server_time_per_output_token_seconds"), "s"),
    Panel("Request duration", quantiles("gen_ai_server_request_duration_seconds"), "s"),
    Panel(
        "Tokens a second",
        [("prompt", rate("stepwire_prompt_tokens_total")), ("output", rate("stepwire_output_tokens_total"))],
        text="Counted when requests end.",
    ),
    Panel(
        "Output tokens a second, by tenant",
        [("{{tenant}}", rate("stepwire_output_tokens_total", "tenant"))],
        stacked=True,
    ),
    Panel("Sequences", [("{{state}}", "sum by (state) (stepwire_sequences)")], stacked=True),
    Panel(
        "Tokens in the queue",
        [("waiting", "sum(stepwire_queued_tokens)")],
        text="Of prompts, and of what was preempted: divided by the tokens of a second, how long the last one waits.",
    ),
    Panel("Time in the queue", quantiles("stepwire_request_queue_seconds"), "s"),
    Panel(
        "Mean time in the queue, by tenant",
        mean("stepwire_request_queue_seconds", "tenant"),
        "s",
        "Tenants share by their weights: one that waits longer than others asks for more than its share.",
    ),
    Panel(
        "Time before the queue",
        quantiles("stepwire_request_admission_seconds"),
        "s",
        "Chat template, tokenizer and grammar.",
    ),
    Panel(
        "Deadlines a second",
        [("{{outcome}}", rate("stepwire_deadlines_total", "outcome"))],
        "reqps",
        "Of requests that had one.",
        stacked=True,
    ),
    Panel(
        "Deadlines that could not be met, a second",
        [("ended early", rate("stepwire_deadlines_not_meetable_total"))],
        text="These cost no step: they end as soon as their first token cannot come in time.",
    ),
    Panel(
        "Prompt and output lengths, median",
        [
            ("prompt", quantiles("stepwire_request_prompt_tokens")[0][1]),
            ("output", quantiles("stepwire_request_output_tokens")[0][1]),
        ],
    ),
]

REQUEST = [
    Panel(
        "Slow requests",
        quantiles("gen_ai_server_request_duration_seconds"),
        "s",
        "Each dot is an exemplar: it leads to the request's trace.",
    ),
    Panel("First tokens", quantiles("gen_ai_server_time_to_first_token_seconds"), "s", "Dots lead to traces here too."),
    Panel(
        "Where a step's time goes",
        mean("stepwire_step_part_seconds", "part"),
        "s",
        stacked=True,
        text="device_wait: a step waits for the one before it, as it should. rpc: the way between the processes.",
    ),
    Panel(
        "What comes before the first step, mean",
        [
            *mean_of("stepwire_request_admission_seconds", "template, tokenizer, grammar"),
            *mean_of("stepwire_request_queue_seconds", "until the first step"),
        ],
        "s",
    ),
    Panel("Time per output token", quantiles("gen_ai_server_time_per_output_token_seconds"), "s"),
    Panel(
        "Speculation: share of drafts that were right",
        [("right", f"{rate('stepwire_draft_tokens_accepted_total')} / {rate('stepwire_draft_tokens_total')}")],
        "percentunit",
    ),
    Panel("Traces", [("", "stepwire-scheduler")], kind="traces", text="Open one to see its queue, prefill and decode."),
]

WORKERS = [
    Panel("Memory", [("{{use}} {{instance}}", "stepwire_worker_memory_bytes")], "bytes"),
    Panel("Resident memory of the processes", [("{{job}} {{instance}}", "process_resident_memory_bytes")], "bytes"),
    Panel(
        "KV blocks",
        [("{{state}}", "sum by (state) (stepwire_kv_blocks)")],
        stacked=True,
        text="cached: free, and their content is still found by the prefix cache.",
    ),
    Panel(
        "KV blocks: share of their places that is empty",
        [("empty", "sum(stepwire_kv_slots{state='empty'}) / sum(stepwire_kv_slots)")],
        "percentunit",
        "Of the blocks that sequences hold: the price of whole blocks.",
    ),
    Panel(
        "Allocator of the device: share that is not in use",
        [
            (
                "{{instance}}",
                "1 - stepwire_worker_allocator_bytes{state='used'} / ignoring (state) "
                "stepwire_worker_allocator_bytes{state='reserved'}",
            )
        ],
        "percentunit",
        "Taken from the system, and cached or lying in pieces between what is used.",
    ),
    Panel(
        "Prefix cache: share of tokens found",
        [("found", f"{rate(f'{PREFIX_TOKENS}_hit_tokens_total')} / {rate(f'{PREFIX_TOKENS}_queried_tokens_total')}")],
        "percentunit",
    ),
    Panel(
        "Preemptions a second",
        [("preempted", rate("stepwire_preemptions_total"))],
        text="Sequences that lost their blocks to others and are computed again: give the KV cache more memory.",
    ),
    Panel("Steps a second", [("steps", rate("stepwire_steps_total"))]),
    Panel("Step time", quantiles("stepwire_step_seconds"), "s"),
    Panel("Parts of a step in the worker", mean("stepwire_worker_step_part_seconds", "part"), "s", stacked=True),
    Panel(
        "In collectives, share of the time",
        [("{{instance}}", "rate(stepwire_worker_collective_seconds_total[$__rate_interval])")],
        "percentunit",
        "Waiting for the other ranks of a group included.",
    ),
    Panel(
        "Bytes put into collectives, a second",
        [("{{instance}}", "rate(stepwire_worker_collective_bytes_total[$__rate_interval])")],
        "Bps",
    ),
    Panel("Tokens in a step", quantiles("stepwire_step_tokens")),
    Panel("Sequences in a step", quantiles("stepwire_step_sequences")),
    Panel("Steps in flight", [("{{model}} {{instance}}", "stepwire_steps_in_flight")]),
    Panel("Lag of the event loops", quantiles("stepwire_event_loop_lag_seconds", "job"), "s"),
    Panel(
        "Spans a second",
        [
            ("sent {{job}}", rate("stepwire_spans_exported_total", "job")),
            ("lost {{job}}", rate("stepwire_spans_dropped_total", "job")),
        ],
        text="Lost: the trace collector is down or too slow. Serving does not wait for it.",
    ),
]

RECOVERY = [
    Panel("Epoch of the last group that began", [("{{instance}}", "stepwire_epoch")], kind="stat"),
    Panel(
        "Workers lost a minute, by how",
        [("{{cause}}", "sum by (cause) (rate(stepwire_epoch_ends_total[$__rate_interval])) * 60")],
        text="exit: its connection broke. silent: it was not heard of. hung: a step took too long.",
    ),
    Panel(
        "Time to recover", quantiles("stepwire_recovery_seconds"), "s", "From the loss of a worker to the next epoch."
    ),
    Panel("Phase of each worker", [("{{phase}} {{instance}}", "stepwire_worker_phase == 1")]),
    Panel(
        "Epoch of each worker", [("{{instance}}", "stepwire_worker_epoch")], text="Grows with every start and recovery."
    ),
    Panel("Rank of each worker", [("{{instance}}", "stepwire_worker_rank")]),
    Panel("Sequences known to each worker", [("{{instance}}", "stepwire_worker_sequences")]),
    Panel("How long the last load took", [("{{instance}}", "stepwire_worker_load_seconds")], "s"),
    Panel(
        "What the last load's time went to",
        [("{{phase}} {{instance}}", "stepwire_worker_load_phase_seconds")],
        "s",
        "map: from the restart store. read: from files. pack: into the layout of the device.",
        stacked=True,
    ),
    Panel("Reachable", [("{{job}} {{instance}}", "up")]),
]

DASHBOARDS = {
    "service": ("Stepwire: service", SERVICE),
    "request": ("Stepwire: anatomy of requests", REQUEST),
    "workers": ("Stepwire: workers and memory", WORKERS),
    "recovery": ("Stepwire: recovery", RECOVERY),
}


def dashboard(uid: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """A dashboard as Grafana 12 takes it."""
    return {
        "uid": f"stepwire-{uid}",
        "title": title,
        "tags": ["stepwire"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["stepwire"], "title": "Stepwire", "asDropdown": False}],
        "panels": list(_panels(panels)),
    }


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    for number, panel in enumerate(panels):
        width = WIDTH if panel.kind == "traces" else WIDTH // 3
        custom = {
            "fillOpacity": 30 if panel.stacked else 0,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
        yield {
            "id": number + 1,
            "type": "table" if panel.kind == "traces" else panel.kind,
            "title": panel.title,
            "description": panel.text,
            "datasource": JAEGER if panel.kind == "traces" else PROMETHEUS,
            "gridPos": {"x": number % 3 * 8, "y": number // 3 * HEIGHT, "w": width, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
            "targets": [_target(panel, chr(ord("A") + i), *query) for i, query in enumerate(panel.queries)],
        }


def _target(panel: Panel, ref: str, legend: str, query: str) -> dict[str, Any]:
    if panel.kind == "traces":
        return {"refId": ref, "datasource": JAEGER, "queryType": "search", "service": query, "limit": 50}
    return {
        "refId": ref,
        "datasource": PROMETHEUS,
        "expr": query,
        "legendFormat": legend,
        "exemplar": "_bucket" in query,
    }


def main() -> int:
    """Writes, or checks."""
    is_check, stale = "--check" in sys.argv[1:], []
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (title, panels) in DASHBOARDS.items():
        path = FOLDER / f"{name}.json"
        text = json.dumps(dashboard(name, title, panels), indent=2) + "\n"
        if is_check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(path.name)
        elif not is_check:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run scripts/gen_dashboards.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
