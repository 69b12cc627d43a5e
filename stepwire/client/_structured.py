"""The form of output that a client asks for, as a wire message."""

import json
from typing import Any

from stepwire.client.types import SamplingParams
from stepwire.rpc.errors import StepwireError

FIELDS = ("json_schema", "json_object", "regex", "choices", "grammar")


def structured_output(params: SamplingParams) -> dict[str, Any] | None:
    """The fields of a StructuredOutput message; None when no form is asked for.

    Raises StepwireError FIELD_INVALID for more than one form, TypeError for a schema that is no JSON.
    """
    nothing = (None, False, ())
    # A schema may be false, too.
    given = [name for name in FIELDS[1:] if getattr(params, name) not in nothing]
    if params.json_schema is not None:
        given.insert(0, "json_schema")
    if not given:
        return None
    if len(given) > 1:
        text = f"output has one form, not {len(given)}: {', '.join(given)}"
        raise StepwireError("FIELD_INVALID", text, {"field": given[1]})
    name = given[0]
    if name == "choices":
        if isinstance(params.choices, str):
            raise TypeError("choices is a sequence of strings, not one string")
        return {name: {"choices": list(params.choices)}}
    if name == "json_object":
        return {name: {}}
    value = getattr(params, name)
    return {name: value if isinstance(value, str) else json.dumps(value)}
