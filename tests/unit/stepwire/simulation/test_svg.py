from xml.etree import ElementTree

from stepwire.simulation.svg import Line, Panel, cumulative, render_svg

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}


def test_a_chart_is_well_formed_and_holds_every_line() -> None:
    panels = [
        Panel("Tokens <per> second & more", "seconds", [Line("a", [0, 1, 2], [5, 0, 2.5]), Line("b", [0], [1])]),
        Panel("Nothing", "seconds", [Line("empty", [], [])]),
    ]
    root = ElementTree.fromstring(render_svg("A & B", panels))
    lines = root.findall(".//s:polyline", NAMESPACE)
    assert len(lines) == 3
    points = [tuple(map(float, point.split(","))) for point in lines[1].attrib["points"].split()]
    # The highest value lies at the top, 0 at the bottom, and x goes right.
    assert points[0][1] < points[2][1] < points[1][1]
    assert points[0][0] < points[1][0] < points[2][0]
    assert "Tokens <per> second & more" in [text.text for text in root.findall(".//s:text", NAMESPACE)]


def test_shares_end_at_a_hundred_percent() -> None:
    line = cumulative("x", [3.0, None, 1.0, 2.0, 4.0])
    assert list(zip(line.xs, line.ys, strict=True)) == [(1.0, 25.0), (2.0, 50.0), (3.0, 75.0), (4.0, 100.0)]
    many = cumulative("x", [float(i) for i in range(10_000)])
    assert len(many.xs) <= 201
    assert many.ys[-1] == 100.0
