"""Templates: rendered as Hugging Face does, and killed when they do not end."""

import asyncio
import time

import pytest

from scheduler_service.engine.template import ChatTemplate
from scheduler_service.engine.template_process import make_environment
from scheduler_service.engine.values import ChatMessage
from stepwire.rpc.errors import StepwireError

HI = [ChatMessage("user", "hi")]


def render(source: str) -> str:
    return make_environment().from_string(source).render(messages=[{"role": "user", "content": "é<b>"}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "é<b>"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "é<b>"\n}'),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_templates_see_what_hugging_face_gives_them(source: str, expected: str) -> None:
    assert render(source) == expected


async def test_special_tokens_and_the_generation_prompt_are_given() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}", {"bos_token": "<s>"}
    )
    try:
        assert await template.render(HI) == "<s>hi>"
        assert await template.render([ChatMessage("user", "\ud800é")]) == "<s>\ud800é>"
    finally:
        await template.close()


async def test_a_template_that_never_ends_is_killed_and_others_go_on() -> None:
    source = (
        "{% if messages[0].content == 'loop' %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% endif %}{{ messages[0].content }}"
    )
    template = ChatTemplate(source, {}, time_limit_s=0.5)
    try:
        await template.start()
        began = time.monotonic()
        loops = [asyncio.create_task(template.render([ChatMessage("user", "loop")]))]
        await asyncio.sleep(0.1)
        assert await template.render(HI) == "hi"
        with pytest.raises(StepwireError, match=r"longer than 0\.5 s"):
            await loops[0]
        assert time.monotonic() - began < 3
        assert await template.render(HI) == "hi"
    finally:
        await template.close()


async def test_a_cancelled_render_leaves_a_clean_process() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, num_processes=1)
    try:
        await template.start()
        for turns in range(0, 40, 3):
            task = asyncio.create_task(template.render([ChatMessage("user", "x" * 400_000)]))
            # However far it has come: starting, asking, or with half of the answer read.
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            async with asyncio.timeout(10):
                await asyncio.gather(task, return_exceptions=True)
                assert await template.render(HI) == "hi"
    finally:
        await template.close()


async def test_the_size_of_the_text_is_bounded() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, max_characters=10)
    try:
        with pytest.raises(StepwireError, match="more than 10 characters"):
            await template.render([ChatMessage("user", "x" * 11)])
    finally:
        await template.close()
