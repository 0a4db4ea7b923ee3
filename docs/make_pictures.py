"""Draws the pictures of the pages, docs/pictures/*.svg. `make docs` runs it.

    python docs/make_pictures.py               draw all; names the ones that changed
    python docs/make_pictures.py --run NAME …  first run the jobs of NAME … again (docs/picture_runs.py)

What a run measured is in docs/pictures/measured.json, so that drawing takes seconds. Everything else is computed by the
project's own code each time: templates, packing, prefix trees, image ids, the import graph.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import re
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.tools.report.chart import HEIGHT, WIDTH, Curve, hues, interval_curves, svg
from runner.tools.report.run_facts import Series

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
MEASURED = FOLDER / "measured.json"

STYLE = """
svg { --paper: #fff; --ink: #222; --faint: #667; --rule: #dde; --line: 42%; --tint: 88%; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #1c1f27; --ink: #e6e6ea; --faint: #a3a7b3; --rule: #3a3f4b; --line: 62%; --tint: 30%; }
}
text { font: 11px sans-serif; fill: var(--faint); }
.name { font-size: 12px; fill: var(--ink); }
.mono { font: 11px monospace; fill: var(--ink); }
.grid, .none { stroke: var(--rule); fill: none; }
.axis { stroke: var(--faint); }
.curve { fill: none; stroke: hsl(var(--hue) 65% var(--line)); stroke-width: 1.8; stroke-linejoin: round; }
.raw { opacity: .3; }
.band, .box { fill: hsl(var(--hue) 65% var(--line) / .18); stroke: hsl(var(--hue) 65% var(--line) / .5); }
circle.curve, .full { fill: hsl(var(--hue) 65% var(--line)); }
"""
BLUE, GREEN, ORANGE, VIOLET = 210, 145, 30, 280  # angles of the color circle
PAD = 12


def picture(width: float, height: float, *parts: str) -> str:
    """An SVG file with a ground of its own, which reads on light and dark pages."""
    ground = f'<rect width="{width:g}" height="{height:g}" rx="8" style="fill: var(--paper)"/>'
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    body = "\n".join((ground, *parts))
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, hue: int | None, kind: str = "box") -> str:
    """A rectangle in a color; without one, its outline."""
    look = f'class="{kind}" style="--hue: {hue}"' if hue is not None else 'class="none"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" {look}/>'


def legend(x: float, y: float, names: Iterable[tuple[str, int | None]]) -> str:
    """Names beside a square in their color, in one line."""
    parts = []
    for name, hue in names:
        parts += [box(x, y - 9, 10, 10, hue), text(x + 15, y, name)]
        x += 26 + 6.2 * len(name)
    return "".join(parts)


Panel = tuple[str, Sequence[Curve]]  # a heading, and the curves below it


def charts(
    panels: Sequence[Panel], columns: int = 1, *, is_log: bool = False, names: Mapping[str, int] | None = None
) -> str:
    """Charts as in a report, below their headings. names: of the legend, with their hues; None = the curves'."""
    parts, rows = [], -(-len(panels) // columns)
    for number, (heading, curves) in enumerate(panels):
        x, y = PAD + number % columns * WIDTH, PAD + number // columns * (HEIGHT + 22)
        drawn = re.findall(r"<svg.*?</svg>", svg(curves, heading))[0 if is_log else -1]
        place = f'<svg x="{x}" y="{y + 18}" width="{WIDTH}" height="{HEIGHT}"'
        parts += [text(x + 6, y + 10, heading, "name"), drawn.replace("<svg", place, 1)]
        if len(curves) > 1:
            parts.append(legend(x + 150, y + 10, (names or {curve.name: curve.hue for curve in curves}).items()))
    return picture(columns * WIDTH + 2 * PAD, rows * (HEIGHT + 22) + 2 * PAD, *parts)


def curves_of(measured: Mapping[str, Any], *metrics: str, hue: int = BLUE, name: str = "") -> list[Curve]:
    """The curves of some metrics of a run, each with its interval."""
    series = {metric: Series(tuple(map(tuple, points))) for metric, points in measured.items()}
    found = [interval_curves(name or metric, metric, hue, series)[metric] for metric in metrics]
    return [Curve(c.name, c.key, at, c.series, c.bounds) for c, at in zip(found, _hues(len(found), hue), strict=True)]


def _hues(count: int, first: int) -> list[int]:
    return [(hue - 210 + first) % 360 for hue in hues(count)]


def demo() -> str:
    """The loss and the exact matches of the demo."""
    run = measured("demo")["sft_demo"]
    return charts([(name, curves_of(run, name)) for name in ("train/loss", "eval/exact_match")], is_log=True)


def report() -> str:
    """Six charts of the demo's report."""
    run = measured("demo")["sft_demo"]
    names = ("train/loss", "eval/loss", "eval/exact_match", "train/grad_norm", "eval/length", "train/lr")
    return charts([(name, curves_of(run, name)) for name in names if name in run], 2)


def sft() -> str:
    """The loss of training and of held-out chats, and the exact matches."""
    run = measured("sft")["shop"]
    return charts(
        [
            ("loss, nats per token", curves_of(run, "train/loss", "eval/loss")),
            ("exact match", curves_of(run, "eval/exact_match")),
        ],
    )


def dpo() -> str:
    """The margin of pairs, and the log-probabilities of both answers."""
    run = measured("dpo")["polite"]
    answers = curves_of(run, "policy/chosen_logprob", "policy/rejected_logprob")
    named = [replace(curve, name=name) for curve, name in zip(answers, ("chosen", "rejected"), strict=True)]
    return charts([("reward/margin", curves_of(run, "reward/margin")), ("log-probability per token", named)])


def grpo() -> str:
    """The reward and the entropy."""
    run = measured("grpo")["digits"]
    return charts([(name, curves_of(run, name)) for name in ("reward/mean", "policy/entropy")])


def sweep() -> str:
    """The held-out loss of each job, in one color for each learning rate."""
    jobs = measured("sweep")
    rates = sorted({name.split()[0] for name in jobs}, key=lambda rate: float(rate.removeprefix("lr=")))
    colors = dict(zip(rates, hues(len(rates)), strict=True))
    curves = [curves_of(run, "eval/loss", hue=colors[name.split()[0]], name=name)[0] for name, run in jobs.items()]
    return charts([("eval/loss, nats per token", [replace(curve, bounds=()) for curve in curves])], names=colors)


def ascend() -> str:
    """The loss on the CPU and on a simulated card."""
    runs = measured("ascend")
    named = {"cpu": ("CPU", BLUE), "card": ("simulated card", ORANGE)}
    curves = [curves_of(runs[key], "train/loss", hue=hue, name=name)[0] for key, (name, hue) in named.items()]
    return charts([("train/loss", curves)])


def serve() -> str:
    """When each request waited, and when it was answered."""
    requests = measured("serve")["requests"]
    end, left, width = max(stop for *_, stop in requests), 76, 380
    parts = [legend(left, 22, [("waits for its first token", None), ("tokens arrive", GREEN)])]
    for number, (start, first, stop) in enumerate(requests):
        y = 34 + number * 20
        a, b, c = (left + width * moment / end for moment in (start, first, stop))
        parts += [text(PAD, y + 11, f"request {number + 1}"), box(a, y, b - a, 14, None), box(b, y, c - b, 14, GREEN)]
    y = 34 + len(requests) * 20
    parts += [text(left, y + 12, "0"), text(left + width, y + 12, f"{end:.2f} s", anchor="end")]
    return picture(left + width + PAD, y + 22, *parts)


def plan() -> str:
    """What a card holds in each phase of a step."""
    plan = measured("plan")
    unit, left, width = 2**30, 100, 350
    scale = width / max(plan["band_bytes"][1] / unit, 1)
    names = list(dict.fromkeys(term for phase in plan["phases"].values() for term in phase))
    colors = dict(zip(names, hues(len(names)), strict=True))
    parts, y = [], PAD + 6
    for phase, terms in plan["phases"].items():
        x = float(left)
        for term, size in terms.items():
            parts.append(box(x, y, size / unit * scale, 18, colors[term]))
            x += size / unit * scale
        parts += [text(PAD, y + 13, phase, "name"), text(x + 5, y + 13, f"{sum(terms.values()) / unit:.1f} GiB")]
        y += 26
    low, high = (size / unit for size in plan["band_bytes"])
    parts += [box(left + low * scale, y, (high - low) * scale, 18, ORANGE), text(PAD, y + 13, "the card shows", "name")]
    parts.append(text(left + low * scale - 5, y + 13, f"{low:.1f} to {high:.1f} of 64 GiB", anchor="end"))
    for number, name in enumerate(names):
        x, row = left + number % 2 * 180, y + 44 + number // 2 * 18
        parts.append(legend(x, row, [(name, colors[name])]))
    return picture(left + width + PAD, y + 44 + -(-len(names) // 2) * 18, *parts)


def tokens(
    rows: Sequence[tuple[str, Sequence[tuple[str, int | None]]]], *more: str, left: float = 84, least: float = 0
) -> str:
    """Rows of tokens as boxes, with a label at the beginning of each, and `more` shapes."""
    parts, y = [], float(PAD)
    for label, row in rows:
        parts.append(text(PAD, y + 13, label))
        x = left
        for word, hue in row:
            size = 8 + 6.8 * len(word)
            if x + size > 480 - PAD:
                x, y = left, y + 22
            parts += [box(x, y, size, 18, hue), text(x + size / 2, y + 13, word, "mono", "middle")]
            x += size + 2
        y += 28
    return picture(480, max(y + 4, least + 24), *parts, *more)


def _tokenizer(*words: str) -> Any:
    """The tokenizer of a job."""
    from runner.build.components import build_tokenizer
    from runner.cli.job_builder import compose_job
    from runner.core.auto_choices import Decisions

    spec = compose_job([*words]).spec
    return build_tokenizer(spec, Decisions(strict=False))


def _word(renderer: Any, token: int) -> str:
    return str(renderer.tokenizer.decode([token])).replace("\n", "⏎").replace(" ", "␣")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def loss_mask() -> str:
    """A conversation token by token, and what is trained on."""
    from runner.data.chat import Renderer

    messages = [_turn("user", "2+2?"), _turn("assistant", "4"), _turn("user", "3+3?"), _turn("assistant", "6")]
    renderer = Renderer(_tokenizer("+recipe=sft_demo"))
    [segments] = renderer.render(messages)
    rows = [
        (
            "trained" if part.is_trained else "context",
            [(_word(renderer, one), GREEN if part.is_trained else None) for one in renderer.control.ids_of([part])],
        )
        for part in segments
    ]
    return tokens(rows)


def image_ids() -> str:
    """A row with an image: its pixels, and the row token by token."""
    from PIL import Image

    from runner.core.media import MEDIA_ID
    from runner.data.chat import Renderer
    from runner.data.demo_shapes import answer, draw

    number, size = 7, 4
    parts = [{"type": "image", "image": draw(number)}, {"type": "text", "text": "which shapes?"}]
    renderer = Renderer(_tokenizer("+recipe=vision_demo"))
    [row] = renderer.render([{"role": "user", "content": parts}, _turn("assistant", answer(number))])
    words = [
        ("image", ORANGE) if one >= MEDIA_ID else (_word(renderer, one), GREEN if part.is_trained else None)
        for part in row
        for one in renderer.control.ids_of([part])
    ]
    image = Image.open(io.BytesIO(draw(number))).convert("RGB")
    pixels = [
        f'<rect x="{PAD + x * size}" y="{PAD + y * size}" width="{size}" height="{size}" fill="rgb{color}"/>'
        for y in range(image.height)
        for x in range(image.width)
        if any(color := image.getpixel((x, y)))
    ]
    ground = f'<rect x="{PAD}" y="{PAD}" width="{size * image.width}" height="{size * image.height}" fill="#000"/>'
    names = [("id above the vocabulary", ORANGE), ("trained", GREEN), ("context", None)]
    more = (ground, *pixels, legend(PAD, 132, names))
    return tokens([("", words)], *more, left=PAD + size * image.width + 16, least=size * image.height + 20)


def packing() -> str:
    """Conversations of several lengths in micro-batches: packed, and padded."""
    from runner.core.batch import pack
    from runner.core.micro_batches import micro_batches
    from runner.data.chat import Renderer

    renderer, lengths = Renderer(_tokenizer("+recipe=sft_demo")), []
    for turns in (1, 4, 2, 1, 3, 1, 2, 5, 1, 2):
        messages = [
            _turn(role, "2+2?" if role == "user" else "4") for _ in range(turns) for role in ("user", "assistant")
        ]
        lengths.append(len(renderer.conversation_ids(messages)))
    batch = pack([range(length) for length in lengths], [[1.0] * length for length in lengths])
    budget, left, width = 192, PAD, 440
    parts, y = [], float(PAD)
    for padded in (False, True):
        found = [part.rows["lengths"].tolist() for part in micro_batches(batch, budget, padded=padded)]
        slots = sum(len(part) * max(part) if padded else sum(part) for part in found)
        look = "model.batch_layout=padded" if padded else "model.batch_layout=packed"
        parts.append(
            text(left, y + 10, f"{look}: {sum(lengths)} tokens in {slots} slots, {len(found)} micro-batches", "name")
        )
        y += 18
        for part in found:
            x, longest = float(left), max(part)
            parts.append(box(x, y, width, 16, None))
            for length in part:
                parts.append(box(x, y, length / budget * width, 16, BLUE))
                parts.append(text(x + 3, y + 12, str(length)))
                x += (longest if padded else length) / budget * width
            y += 20
        y += 10
    return picture(width + 2 * PAD, y, *parts)


def shared_prompt() -> str:
    """A prompt with three completions: positions, and what each token attends to."""
    from runner.core.prefix_tree import Branch, Tree, pack_trees

    words = ["s", "3", "1", "2", "→", "1", "2", "3", "⏎", "3", "2", "1", "⏎", "1", "⏎"]
    batch = pack_trees([Tree(range(5), [Branch(range(5, 9)), Branch(range(9, 13)), Branch(range(13, 15))])])
    parent, branch = batch.tokens["parent"].tolist(), batch.rows["branch"].tolist()
    rows = [row for row, length in enumerate(batch.rows["lengths"].tolist()) for _ in range(length)]
    size, left, top = 18, 60, 40
    colors = [BLUE, GREEN, ORANGE, VIOLET]
    parts = [text(left - 6, top - 6, "position", anchor="end")]
    for at, (word, position) in enumerate(zip(words, batch.tokens["positions"].tolist(), strict=True)):
        middle = at * size + size / 2
        parts += [
            text(left + middle, top - 22, word, "mono", "middle"),
            text(left + middle, top - 6, str(position), "", "middle"),
        ]
        parts.append(text(left - 6, top + middle + 4, word, "mono", "end"))
        seen = at
        while seen >= 0:
            parts.append(
                box(left + seen * size + 1, top + at * size + 1, size - 2, size - 2, colors[branch[rows[at]] + 1])
            )
            seen = parent[seen]
    side = len(words) * size
    names = [("prompt", BLUE), ("completion 1", GREEN), ("completion 2", ORANGE), ("completion 3", VIOLET)]
    return picture(left + side + 50, top + side + 34, *parts, legend(PAD, top + side + 22, names))


def _call(call: Mapping[str, Any]) -> str:
    return f"{call['name']}({', '.join(f'{name}={value}' for name, value in call['arguments'].items())})"


def episode() -> str:
    """An episode with two tools, turn by turn."""
    parts, y = [], float(PAD)
    for turn in measured("episode"):
        calls = [call["function"] for call in turn.get("tool_calls", ())]
        said = [
            re.sub(r"<\|.*?\|>\w*", "", turn["content"]).strip(),
            *map(_call, calls),
        ]
        hue = GREEN if turn["role"] == "assistant" else None
        lines = [line for words in said for line in textwrap.wrap(words, 54)]
        parts += [text(PAD, y + 15, turn["role"]), box(90, y, 378, 8 + 15 * len(lines), hue)]
        parts += [text(98, y + 15 + 15 * i, line, "mono") for i, line in enumerate(lines)]
        y += 14 + 15 * len(lines)
    names = [("written by the policy: trained", GREEN), ("context", None)]
    return picture(480, y + 24, *parts, legend(90, y + 14, names))


def lag() -> str:
    """When a job samples and when it trains, at lag 0 and at lag 1."""
    spans, left, width = measured("lag"), 90, 390
    end = max(stop for one in spans.values() for *_, stop in one)
    parts, y = [], float(PAD)
    for number, one in sorted(spans.items()):
        parts.append(text(PAD, y + 10, f"algorithm.lag={number}", "name"))
        for row, kind in enumerate(("sample", "train")):
            top = y + 18 + 22 * row
            parts.append(text(PAD, top + 13, kind))
            for what, step, start, stop in one:
                if what == kind:
                    x, size = left + width * start / end, width * (stop - start) / end
                    parts += [box(x, top, size, 18, BLUE if kind == "sample" else GREEN)]
                    parts.append(text(x + size / 2, top + 13, str(step), "mono", "middle"))
        y += 74
    parts += [text(left, y + 2, "0"), text(left + width, y + 2, f"{end:.1f} s", anchor="end")]
    return picture(left + width + PAD, y + 10, *parts)


def imports() -> str:
    """Which package imports which: rows import columns."""
    import grimp

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(one for one in contracts["contracts"] if one["id"] == "layers")["layers"]
    packages = [name.strip() for layer in layers for name in layer.split("|")]
    graph = grimp.build_graph("runner", exclude_type_checking_imports=True, cache_dir=None)
    size, left, top = 13, 88, 84
    parts, side = [], len(packages) * size
    for row, name in enumerate(packages):
        y = top + row * size
        turned = f'transform="rotate(-60 {left + row * size + 8} {top - 4})"'
        parts += [
            text(left - 6, y + 10, name, anchor="end"),
            text(left + row * size + 8, top - 4, name).replace("<text", f"<text {turned}"),
        ]
        parts.append(box(left + row * size, y, size, size, None))
        for column, other in enumerate(packages):
            if row != column and graph.direct_import_exists(
                importer=f"runner.{name}", imported=f"runner.{other}", as_packages=True
            ):
                parts.append(
                    box(left + column * size + 2, y + 2, size - 4, size - 4, BLUE if column > row else ORANGE, "full")
                )
    names = [("a layer below", BLUE), ("an exception that the contract names", ORANGE)]
    return picture(left + side + 40, top + side + 34, *parts, legend(left, top + side + 22, names))


def measured(name: str) -> Any:
    """What the runs of a picture measured."""
    return json.loads(MEASURED.read_text(encoding="utf-8"))[name]


PICTURES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "report": report,
    "sft": sft,
    "dpo": dpo,
    "grpo": grpo,
    "sweep": sweep,
    "serve": serve,
    "ascend": ascend,
    "plan": plan,
    "loss_mask": loss_mask,
    "image_ids": image_ids,
    "packing": packing,
    "shared_prompt": shared_prompt,
    "episode": episode,
    "lag": lag,
    "imports": imports,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the pages.")
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="run the jobs of these pictures again")
    for name in parser.parse_args().run:
        from picture_runs import RUNS

        with tempfile.TemporaryDirectory() as folder:
            found = RUNS[name](Path(folder))
        kept = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted((kept | {name: found}).items()))
        MEASURED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, draw in PICTURES.items():
        path, drawn = FOLDER / f"{name}.svg", draw()
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            path.write_text(drawn, encoding="utf-8")
            print(f"{path.relative_to(ROOT)} changed: commit it, and look at the page that shows it")


if __name__ == "__main__":
    main()
