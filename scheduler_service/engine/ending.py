"""The last word on a request: one log line with its whole story, and the end of its span."""

import time

import structlog
from opentelemetry.util.types import AttributeValue

from scheduler_service.engine.live import LiveRequest
from scheduler_service.engine.tracing import RequestTrace
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names

_log = structlog.stdlib.get_logger(__name__)


def note_end(model: str, trace: RequestTrace, live: LiveRequest | None, error: StepwireError | None) -> None:
    """Ends a request's trace and logs how it went: `live` is None for one that was refused.

    The record is "request_finished", "request_cancelled" or "request_failed", and has ids, tokens, preemptions,
    epochs, moves between replicas, the seconds of each part that it was in ("queue_s", "decode_s", …) and of the
    whole; and of tenant, priority and adapter those that it named.
    """
    fields: dict[str, object] = {"request_id": trace.request_id, "model": model}
    attributes: dict[str, AttributeValue] = {names.GEN_AI_RESPONSE_MODEL: model}
    if live is not None:
        reasons = [live.finish_reasons[i].value for i in sorted(live.finish_reasons)]
        fields |= {
            "prompt_tokens": len(live.request.prompt_token_ids),
            "output_tokens": live.num_output_tokens,
            "cached_tokens": live.num_cached_tokens,
            "finish_reasons": reasons,
        }
        request = live.request
        named = {"tenant": request.tenant, "priority": request.priority, "adapter_fingerprint": request.adapter}
        fields |= {name: value for name, value in named.items() if value}
        if live.first_token_at is not None:
            fields["ttft_s"] = round(live.first_token_at - live.arrival, 4)
        attributes[names.GEN_AI_OUTPUT_TOKENS] = live.num_output_tokens
        attributes[names.GEN_AI_CACHED_TOKENS] = live.num_cached_tokens
        attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = reasons
    trace.end(error, attributes)
    if live is not None:
        fields |= {f"{part}_s": round(trace.parts_ns[part] / 1e9, 4) for part in trace.parts_ns}
        fields |= {
            "seconds": round(time.monotonic() - live.arrival, 4),
            "preemptions": trace.num_preemptions,
            "epochs": trace.num_epochs,
            "moves": live.num_moves,
        }
    if error is None:
        _log.info("request_finished", **fields)
    elif error.reason == "CANCELLED":
        _log.info("request_cancelled", **fields)
    else:
        _log.info("request_failed", reason=error.reason, error=error.message, **fields)
