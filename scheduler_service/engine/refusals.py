"""What calls are told for which the engine is not there."""

from stepwire.rpc.errors import StepwireError

RETRY_AFTER_S = 1.0


def not_ready() -> StepwireError:
    """Before any workers are ready, and where they are not at the moment."""
    text = "the model is not ready: its workers are being started; try again"
    return StepwireError("MODEL_NOT_READY", text, retry_after_s=RETRY_AFTER_S)


def draining() -> StepwireError:
    """Once the service is told to end."""
    text = "the service is shutting down and takes no new requests; try another replica"
    return StepwireError("DRAINING", text, retry_after_s=RETRY_AFTER_S)


def unloading(model: str) -> StepwireError:
    """While a model is being unloaded."""
    return StepwireError(
        "DRAINING", f"the model {model!r} is being unloaded and takes no new requests", {"model": model}
    )
