"""Line charts as one SVG file: no library, no script, no font of its own."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 720, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 28, 34
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706")


@dataclass(frozen=True, slots=True)
class Line:
    """Points to join; xs rise."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. Both axes begin at 0."""

    title: str
    x_label: str
    lines: Sequence[Line]


def render_svg(title: str, panels: Sequence[Panel]) -> str:
    """The panels, one below the other."""
    height = 40 + len(panels) * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {40 + number * _HEIGHT})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def cumulative(name: str, values: Iterable[float | None], *, num_points: int = 200) -> Line:
    """The share of values, in percent, that do not exceed x."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Line(name, [], [])
    places = sorted({round(i * (len(ordered) - 1) / num_points) for i in range(num_points + 1)})
    return Line(name, [ordered[i] for i in places], [100 * (i + 1) / len(ordered) for i in places])


def _panel(panel: Panel) -> list[str]:
    largest_x = _round_up(max((x for line in panel.lines for x in line.xs), default=0.0))
    largest_y = _round_up(max((y for line in panel.lines for y in line.ys), default=0.0))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="{_TOP - 10}" font-weight="bold">{escape(panel.title)}</text>']
    for i in range(5):
        x, y = _LEFT + width * i / 4, _TOP + height * (1 - i / 4)
        parts += [
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + width}" y2="{y:.1f}" stroke="#e5e7eb"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{largest_y * i / 4:.4g}</text>',
            f'<text x="{x:.1f}" y="{_TOP + height + 14}" text-anchor="middle">{largest_x * i / 4:.4g}</text>',
        ]
    parts.append(
        f'<text x="{_LEFT + width}" y="{_TOP + height + 27}" text-anchor="end" fill="#6b7280">'
        f"{escape(panel.x_label)}</text>"
    )
    legend = _LEFT + width
    for number, line in reversed(list(enumerate(panel.lines))):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{_LEFT + width * x / largest_x:.1f},{_TOP + height * (1 - y / largest_y):.1f}"
            for x, y in zip(line.xs, line.ys, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{legend}" y="{_TOP - 10}" text-anchor="end" fill="{colour}">{escape(line.name)}</text>')
        legend -= 7 * len(line.name) + 16
    return parts


def _round_up(value: float) -> float:
    """A number with few digits at or above `value`; 1 for nothing."""
    if not 0 < value < math.inf:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1.0, 2.0, 4.0, 5.0, 8.0, 10.0) if step * unit >= value * (1 - 1e-12))
