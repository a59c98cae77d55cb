"""Draw packing.svg and rooms.svg, pictures of design.md, beside this file, from plain shapes.

python docs/drawings.py
"""

from __future__ import annotations

from pathlib import Path

COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377")
INK, GREY, PALE = "#222222", "#8a8f98", "#eceef1"
Shapes = list[str]


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", radius: float = 3) -> str:
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius}" fill="{fill}" stroke="{stroke}"/>'


def text(
    x: float, y: float, words: str, size: int = 14, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>{words}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{GREY}" stroke-width="2" marker-end="url(#head)"/>'


def picture(width: int, height: int, title: str, shapes: Shapes) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{title}">'
    )
    marker = (
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>'
    )
    return (
        "\n".join([head, f"<title>{title}</title>", marker, box(0, 0, width, height, "#ffffff"), *shapes, "</svg>"])
        + "\n"
    )


def packing() -> str:
    """Samples of four jobs, one microbatch, one frozen model, four optimizers."""
    jobs = (
        ("LoRA r 8", (60, 34, 46)),
        ("LoRA r 16", (26, 22, 30, 18)),
        ("DoRA r 16", (84, 40)),
        ("rsLoRA r 64", (38, 52)),
    )
    shapes: Shapes = []
    for row, ((name, lengths), colour) in enumerate(zip(jobs, COLOURS, strict=True)):
        y, x = 52 + 46 * row, 16.0
        shapes.append(text(16, y - 5, f"job {row + 1}: {name}", 13))
        for length in lengths:
            shapes.append(box(x, y, length, 16, colour))
            x += length + 3
    shapes.append(text(16, 22, "samples of four jobs", 15, bold=True))

    shapes += [arrow(182, 122, 216, 122), text(228, 22, "one microbatch, no padding", 15, bold=True)]
    x = 228.0
    for (_, lengths), colour in zip(jobs, COLOURS, strict=True):
        for length in lengths[:2]:
            shapes.append(box(x, 106, length * 0.55, 32, colour, "#ffffff", 0))
            x += length * 0.55
    shapes += [
        box(228, 106, x - 228, 32, "none", INK, 0),
        text(228, 158, "each sample attends to itself alone", 13, GREY),
    ]
    shapes += [arrow(x + 10, 122, x + 42, 122), text(x + 52, 22, "one frozen model", 15, bold=True)]
    left = x + 52
    shapes.append(box(left, 38, 190, 172, PALE, GREY))
    for layer in range(3):
        y = 50 + 52 * layer
        shapes += [box(left + 12, y, 96, 42, "#cfd4da"), text(left + 60, y + 26, "W x", 14, anchor="middle")]
        for number, colour in enumerate(COLOURS):
            shapes.append(box(left + 118 + 15 * number, y + 6, 11, 30, colour))
    shapes.append(text(left + 95, 228, "small A and B per job, in every layer", 12, GREY, "middle"))
    right = left + 232
    shapes += [arrow(left + 196, 122, right - 8, 122), text(right, 22, "trained as if alone", 15, bold=True)]
    for row, colour in enumerate(COLOURS):
        y = 42 + 46 * row
        shapes += [
            box(right, y, 12, 30, colour),
            text(right + 20, y + 13, "own loss, clipping,", 12),
            text(right + 20, y + 27, "AdamW, learning rate", 12),
        ]
    return picture(int(right + 158), 244, "Samples of four jobs share one microbatch and one frozen model", shapes)


def rooms() -> str:
    """The rooms of the package: a room imports what lies below it."""
    placed = (  # x, floor, width, floors high, name, words
        (16, 0, 165, 1, "cli", "arguments"),
        (193, 0, 166, 1, "commands", "one file a command"),
        (371, 0, 165, 1, "plug-ins", "codes, images, sweep, ..."),
        (16, 1, 520, 1, "runtime", "the loop, executor, jobs, checkpoints"),
        (16, 2, 96, 1, "live", "PEFT models"),
        (124, 2, 96, 1, "megatron", "Megatron-Core's"),
        (232, 2, 96, 1, "engine", "rows, objectives"),
        (340, 2, 196, 1, "parallel", "one model, several processes"),
        (16, 3, 330, 1, "adapters", "spec, layers, owners, siblings, norms, files"),
        (16, 4, 330, 1, "plans", "which one for a case: cost, measurement, cache"),
        (358, 3, 178, 2, "base", "the frozen model"),
        (16, 5, 520, 1, "ops", "operators: reference, autograd, torch path, Triton path"),
        (580, 2, 180, 1, "data", "rows to token ids"),
        (580, 3, 180, 1, "report", "events, what a run shows"),
        (580, 4, 180, 1, "schedule", "samples to microbatches"),
    )
    shapes: Shapes = []
    for x, floor, width, high, name, words in placed:
        y, height = 16 + 58 * floor, 58 * high - 16
        middle = y + height // 2
        shapes += [
            box(x, y, width, height, PALE, GREY),
            text(x + width / 2, middle - 3, name, 15, anchor="middle", bold=True),
            text(x + width / 2, middle + 13, words, 11, "#555555", "middle"),
        ]
    for x, floor in ((276, 1), (416, 2), (64, 3), (172, 3), (280, 3), (447, 3), (181, 4), (181, 5), (447, 5)):
        shapes.append(arrow(x, 58 * floor, x, 58 * floor + 13))
    shapes += [
        arrow(540, 95, 666, 128),
        text(580, 324, "beside the others: they import", 12, "#555555"),
        text(580, 340, "no adapters and no operators", 12, "#555555"),
    ]
    return picture(776, 364, "Rooms of the package, each importing what lies below it", shapes)


DRAWINGS = {"packing.svg": packing, "rooms.svg": rooms}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (Path(__file__).parent / name).write_text(draw())
