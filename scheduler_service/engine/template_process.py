"""Renders chat templates in a process of its own, which its parent may kill at any time.

A checkpoint's template is foreign code: it runs in Jinja's sandbox, under memory and file limits set here, and under a
time limit held by the parent.
"""

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from scheduler_service.engine.helper_process import Answer, confine, serve

MEMORY_BYTES = 1 << 30
CACHE_SIZE = 4


class OutputTooLong(Exception):
    """The rendered text is longer than the parent allows."""


class GenerationTag(jinja2.ext.Extension):
    """The `{% generation %}` block that marks the assistant's part for training: rendered as its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that Hugging Face's chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def render(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> str:
    """The template's text. Raises whatever the template raises, and OutputTooLong."""
    parts, length = [], 0
    for part in template.generate(**variables):
        length += len(part)
        if length > max_characters:
            raise OutputTooLong(f"the rendered prompt has more than {max_characters} characters")
        parts.append(part)
    return "".join(parts)


def answer(request: dict[str, Any], compile_template: Callable[[str], jinja2.Template]) -> dict[str, str]:
    """What to send back: {"text": …} or {"error": …}."""
    try:
        return {"text": render(compile_template(request["template"]), request["variables"], request["max_characters"])}
    except MemoryError:
        return {"error": "the template used too much memory"}
    except RecursionError:
        return {"error": "the template recursed too deeply"}
    except Exception as error:  # a template may raise anything, and its message is for the caller
        return {"error": f"{error or type(error).__name__}"[:2000]}


def main() -> None:
    """Answers requests until stdin is closed."""
    serve(_get_ready)


def _get_ready(_greeting: dict[str, Any]) -> Answer:
    confine(MEMORY_BYTES)
    environment = make_environment()
    compiled: dict[str, jinja2.Template] = {}

    def compile_template(source: str) -> jinja2.Template:
        if source not in compiled:
            if len(compiled) >= CACHE_SIZE:
                compiled.clear()
            compiled[source] = environment.from_string(source)
        return compiled[source]

    return lambda request: answer(request, compile_template)
