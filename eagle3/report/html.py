"""The report as one HTML page that needs nothing else: no scripts, no network, no other file."""

from collections.abc import Mapping, Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from eagle3.report.blocks import Block, Section


def render_html(
    title: str,
    lead: str,
    facts: Mapping[str, str],
    verdict: Sequence[Block],
    sections: Sequence[Section],
) -> str:
    """The page; `facts` are the few lines under the title."""
    folder = files("eagle3.report")
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    template = environment.from_string(folder.joinpath("page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        lead=lead,
        facts=facts,
        verdict=verdict,
        sections=sections,
        style=Markup(folder.joinpath("page.css").read_text(encoding="utf-8")),
    )
