"""Names of spans, attributes and events: the one place where they are spelled.

RPC names follow OpenTelemetry's RPC conventions 1.44, GenAI names the conventions of
semantic-conventions-genai 0.1. Both still move, which is why nothing is imported from a package.
"""

from typing import Final

# Services, as they stand in `service.name`.
SERVICE_CLIENT: Final = "stepwire-client"
SERVICE_SCHEDULER: Final = "stepwire-scheduler"
SERVICE_WORKER: Final = "stepwire-worker"

# Spans of a request. The request's own span is named by `request_span_name`.
SPAN_QUEUE: Final = "queue"
SPAN_PREFILL: Final = "prefill"
SPAN_DECODE: Final = "decode"
SPAN_PREEMPTED: Final = "preempted"
SPAN_RECOVERY: Final = "recovery"
SPAN_STREAM: Final = "stream"
# What a request's time goes to: these follow each other without gaps.
REQUEST_PARTS: Final = (SPAN_QUEUE, SPAN_PREFILL, SPAN_DECODE, SPAN_PREEMPTED, SPAN_RECOVERY, SPAN_STREAM)
SPAN_ATTEMPT: Final = "attempt"
SPAN_WORKER_PREFILL: Final = "worker.prefill"
SPAN_WORKER_DECODE: Final = "worker.decode"

# Spans of a step: a trace of its own.
SPAN_STEP: Final = "step"
SPAN_STEP_PLAN: Final = "step.plan"
SPAN_STEP_SEND: Final = "step.send"
SPAN_STEP_WAIT: Final = "step.wait"
SPAN_STEP_WORKER: Final = "step.worker"
SPAN_STEP_DEVICE_WAIT: Final = "step.device_wait"
SPAN_STEP_PREPARE: Final = "step.prepare"
SPAN_STEP_FORWARD: Final = "step.forward"
SPAN_STEP_SAMPLE: Final = "step.sample"

# Spans of a load on a worker; each phase's span is named `load.<phase>`.
SPAN_LOAD: Final = "load"

# Spans of a start; each phase's span is named `startup.<phase>`.
SPAN_STARTUP: Final = "startup"
# The root of what follows the end of an epoch: the phases of the next are below it.
SPAN_GROUP_RECOVERY: Final = "group_recovery"

# Values of gen_ai.operation.name.
OPERATION_TEXT_COMPLETION: Final = "text_completion"
OPERATION_CHAT: Final = "chat"

# RPC attributes.
RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.response.status_code"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"
ERROR_MESSAGE: Final = "error.message"

# GenAI attributes.
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
PROVIDER_STEPWIRE: Final = "stepwire"

# Stepwire's own attributes.
REQUEST_ID: Final = "stepwire.request_id"
REQUEST_PRIORITY: Final = "stepwire.priority"
SEQUENCE_ID: Final = "stepwire.sequence_id"
SEQUENCE_INDEX: Final = "stepwire.sequence_index"
EPOCH: Final = "stepwire.epoch"
STEP_ID: Final = "stepwire.step_id"
FIRST_STEP_ID: Final = "stepwire.first_step_id"
LAST_STEP_ID: Final = "stepwire.last_step_id"
NUM_STEPS: Final = "stepwire.num_steps"
NUM_TOKENS: Final = "stepwire.num_tokens"
NUM_BYTES: Final = "stepwire.num_bytes"
NUM_PREEMPTIONS: Final = "stepwire.num_preemptions"
NUM_EPOCHS: Final = "stepwire.num_epochs"
NUM_SEQUENCES: Final = "stepwire.num_sequences"
NUM_DECODING: Final = "stepwire.num_decoding"
NUM_STARTED: Final = "stepwire.num_started"
NUM_PREEMPTED: Final = "stepwire.num_preempted"
OUTCOME: Final = "stepwire.outcome"
# Of the span of a call whose client had left, or whose deadline was over, before its handler began.
OUTCOME_NOT_BEGUN: Final = "not_begun"
IS_SLOW: Final = "stepwire.slow"
PHASE: Final = "stepwire.phase"
RANK: Final = "stepwire.rank"
REPLICA: Final = "stepwire.replica"
WORKER: Final = "stepwire.worker"
WORKER_HOST: Final = "stepwire.worker.host"
WORKER_PROCESS_ID: Final = "stepwire.worker.process_id"
# The wall clock of a worker's host less the scheduler's, and by how much that may be wrong either way. Spans keep
# the times of their own host.
CLOCK_OFFSET_S: Final = "stepwire.clock_offset_s"
CLOCK_ERROR_S: Final = "stepwire.clock_error_s"
DEVICE: Final = "stepwire.device"
MODEL_PATH: Final = "stepwire.model_path"
FORWARD_S: Final = "stepwire.forward_s"
# On a root span: it is kept whatever the sampling ratio says.
KEEP: Final = "stepwire.keep"

# Events.
EVENT_FIRST_TOKEN: Final = "first_token"
EVENT_PREEMPTED: Final = "preempted"
EVENT_RESUMED: Final = "resumed"
EVENT_PREFIX_CACHE_HIT: Final = "prefix_cache_hit"
EVENT_WORKER_LOST: Final = "worker_lost"
EVENT_RECOVERED: Final = "recovered"
EVENT_MOVED: Final = "moved"

# Metrics, as Prometheus spells them: those of the GenAI conventions, then Stepwire's own.
METRIC_REQUEST_DURATION: Final = "gen_ai_server_request_duration_seconds"
METRIC_TIME_TO_FIRST_TOKEN: Final = "gen_ai_server_time_to_first_token_seconds"
METRIC_TIME_PER_OUTPUT_TOKEN: Final = "gen_ai_server_time_per_output_token_seconds"
METRIC_REQUESTS: Final = "stepwire_requests_total"
METRIC_REQUESTS_REFUSED: Final = "stepwire_requests_refused_total"
METRIC_ADMISSION_TIME: Final = "stepwire_request_admission_seconds"
METRIC_DEADLINES: Final = "stepwire_deadlines_total"
METRIC_QUEUE_TIME: Final = "stepwire_request_queue_seconds"
METRIC_PROMPT_TOKENS: Final = "stepwire_prompt_tokens_total"
METRIC_OUTPUT_TOKENS: Final = "stepwire_output_tokens_total"
METRIC_REQUEST_PROMPT_TOKENS: Final = "stepwire_request_prompt_tokens"
METRIC_REQUEST_OUTPUT_TOKENS: Final = "stepwire_request_output_tokens"
METRIC_SEQUENCES: Final = "stepwire_sequences"
METRIC_STEPS_IN_FLIGHT: Final = "stepwire_steps_in_flight"
METRIC_QUEUED_TOKENS: Final = "stepwire_queued_tokens"
METRIC_BLOCKS: Final = "stepwire_kv_blocks"
METRIC_SLOTS: Final = "stepwire_kv_slots"
METRIC_PREFIX_QUERIES: Final = "stepwire_prefix_cache_queried_tokens_total"
METRIC_PREFIX_HITS: Final = "stepwire_prefix_cache_hit_tokens_total"
METRIC_DRAFT_TOKENS: Final = "stepwire_draft_tokens_total"
METRIC_ACCEPTED_TOKENS: Final = "stepwire_draft_tokens_accepted_total"
METRIC_PREEMPTIONS: Final = "stepwire_preemptions_total"
METRIC_HOPELESS: Final = "stepwire_deadlines_not_meetable_total"
METRIC_STEPS: Final = "stepwire_steps_total"
METRIC_STEP_TOKENS: Final = "stepwire_step_tokens"
METRIC_STEP_SEQUENCES: Final = "stepwire_step_sequences"
METRIC_STEP_TIME: Final = "stepwire_step_seconds"
METRIC_STEP_PARTS: Final = "stepwire_step_part_seconds"
METRIC_READY: Final = "stepwire_ready"
# Parts of a step in the worker, in their order: values of the label "part".
STEP_PARTS: Final = ("device_wait", "prepare", "forward", "sample")
METRIC_WORKER_PHASE: Final = "stepwire_worker_phase"
METRIC_WORKER_EPOCH: Final = "stepwire_worker_epoch"
METRIC_WORKER_RANK: Final = "stepwire_worker_rank"
METRIC_WORKER_SEQUENCES: Final = "stepwire_worker_sequences"
METRIC_WORKER_COLLECTIVE_TIME: Final = "stepwire_worker_collective_seconds_total"
METRIC_WORKER_COLLECTIVE_BYTES: Final = "stepwire_worker_collective_bytes_total"
METRIC_WORKER_MEMORY: Final = "stepwire_worker_memory_bytes"
METRIC_WORKER_ALLOCATOR: Final = "stepwire_worker_allocator_bytes"
METRIC_WORKER_LOAD_TIME: Final = "stepwire_worker_load_seconds"
METRIC_WORKER_LOAD_PHASES: Final = "stepwire_worker_load_phase_seconds"
METRIC_WORKER_STEP_PARTS: Final = "stepwire_worker_step_part_seconds"
METRIC_EPOCH: Final = "stepwire_epoch"
METRIC_EPOCH_ENDS: Final = "stepwire_epoch_ends_total"
METRIC_RECOVERY_TIME: Final = "stepwire_recovery_seconds"
METRIC_LOOP_LAG: Final = "stepwire_event_loop_lag_seconds"
METRIC_SPANS_EXPORTED: Final = "stepwire_spans_exported_total"
METRIC_SPANS_DROPPED: Final = "stepwire_spans_dropped_total"

# Calls that are made all the time, or last as long as the service: traced only for a caller that sends a
# trace context.
UNTRACED_METHODS: Final = frozenset(
    {
        "grpc.health.v1.Health/Check",
        "grpc.health.v1.Health/Watch",
        "grpc.health.v1.Health/List",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "stepwire.v1.InferenceService/GetModel",
        "stepwire.v1.WorkerService/ExecuteModel",
        "stepwire.v1.WorkerService/GetStatus",
    }
)

# Calls of operators that do more than look: rare, and traced whatever the sampling ratio says, with what they start.
KEPT_METHODS: Final = frozenset(
    f"stepwire.v1.AdminService/{method}"
    for method in (
        "LoadModel",
        "UnloadModel",
        "Profile",
        "AddReplica",
        "DrainReplica",
        "LoadAdapter",
        "UnloadAdapter",
        "Sleep",
        "WakeUp",
    )
)


def request_span_name(operation: str, model: str) -> str:
    """The name of a request's INTERNAL span, such as "chat SmolLM2"."""
    return f"{operation} {model}"


def startup_span_name(phase: str) -> str:
    """The name of the span of one start phase, such as "startup.load_model"."""
    return f"{SPAN_STARTUP}.{phase}"


def load_span_name(phase: str) -> str:
    """The name of the span of one phase of a load, such as "load.read"."""
    return f"{SPAN_LOAD}.{phase}"
