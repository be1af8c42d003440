"""A flowchart of a few dozen boxes as SVG: each box below all that point to it, arrows as curves."""

import re
from statistics import mean

WIDTH, HEIGHT, ACROSS, DOWN = 130, 30, 150, 62
NODE = re.compile(r'^\s*(\w+)[\[(]"([^"]+)"[\])]$', re.MULTILINE)
ARROW = re.compile(r"^\s*(\w+) --> (\w+)$", re.MULTILINE)

Places = dict[str, tuple[float, float]]


def levels(nodes: list[str], arrows: list[tuple[str, str]]) -> list[list[str]]:
    """Rows from top to bottom: a node stands one row below the lowest of those that point to it."""
    depth = dict.fromkeys(nodes, 0)
    for _ in nodes:
        for upper, lower in arrows:
            depth[lower] = max(depth[lower], depth[upper] + 1)
    return [[n for n in nodes if depth[n] == row] for row in range(max(depth.values()) + 1)]


def places(rows: list[list[str]], arrows: list[tuple[str, str]]) -> Places:
    """Centre of every box; within a row they stand in the order of those that point to them."""
    found: Places = {}
    for number, row in enumerate(rows):
        above = {n: [found[u][0] for u, lower in arrows if lower == n and u in found] for n in row}
        ordered = sorted(row, key=lambda n: mean(above[n]) if above[n] else 0.0)
        for place, name in enumerate(ordered):
            found[name] = (ACROSS * (place - (len(row) - 1) / 2), DOWN * number)
    return found


def _box(label: str, x: float, y: float) -> str:
    corner = f'x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"'
    text = f'<text x="{x:g}" y="{y + 4:g}" text-anchor="middle" fill="currentColor" font-size="13">{label}</text>'
    return f'<rect {corner} fill="none" stroke="currentColor"/>{text}'


def _curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (a, b) = start, end
    y, b, bend = y + HEIGHT / 2, b - HEIGHT / 2 - 4, DOWN / 2
    way = f"M{x:g} {y:g} C{x:g} {y + bend:g} {a:g} {b - bend:g} {a:g} {b:g}"
    return f'<path d="{way}" fill="none" stroke="currentColor" stroke-opacity="0.5" marker-end="url(#tip)"/>'


def svg(text: str) -> str:
    """The picture of the lines of a Mermaid flowchart, on one line."""
    labels, arrows = dict(NODE.findall(text)), ARROW.findall(text)
    rows = levels(list(labels), arrows)
    at = places(rows, arrows)
    wide, high = ACROSS * max(map(len, rows)), DOWN * len(rows)
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
    )
    drawn = [_curve(at[upper], at[lower]) for upper, lower in arrows] + [_box(labels[n], *at[n]) for n in labels]
    frame = f'viewBox="{-wide / 2:g} {-DOWN / 2:g} {wide:g} {high:g}" style="max-width: 100%; width: {wide:g}px"'
    return f'<svg role="img" aria-label="imports between the parts" {frame}>{tip}{"".join(drawn)}</svg>'
