"""The report as Markdown: the same tables, and the figures as PNG files."""

from collections.abc import Sequence

from eagle3.report.blocks import Block, Code, Figure, Items, Paragraph, Section, Table, TableCell, Tone

_MARKS = {Tone.GOOD: "✓ ", Tone.WARNING: "⚠ ", Tone.BAD: "✗ ", Tone.PLAIN: "", Tone.STRONG: ""}


def render_markdown(title: str, lead: str, verdict: Sequence[Block], sections: Sequence[Section]) -> str:
    """One Markdown document, ending in a newline."""
    parts = [f"# {title}", lead, *(_block(block) for block in verdict)]
    for section in sections:
        parts += [f"## {section.title}", *(_block(block) for block in section.blocks)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    match block:
        case Table():
            return table(block)
        case Figure():
            return f"![{_escape(block.caption)}](figures/{block.name}.png)\n\n*{_escape(block.caption)}*"
        case Items():
            return "\n".join(f"- {_MARKS[item.tone]}{_escape(item.text)}" for item in block.items)
        case Code():
            return f"```bash\n{block.text}\n```"
        case Paragraph():
            text = _escape(block.text)
            return text if block.tone is Tone.PLAIN else f"**{_MARKS[block.tone]}{text}**"


def table(block: Table) -> str:
    """A pipe table with its caption above and its note below."""
    align = [
        ":---" if index == 0 or name in block.text_columns else "---:"
        for index, name in enumerate(block.columns)
    ]
    lines = [
        f"| {' | '.join(_escape(name) for name in block.columns)} |",
        f"| {' | '.join(align)} |",
        *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in block.rows),
    ]
    parts = [f"**{_escape(block.caption)}**", "\n".join(lines)]
    if block.note:
        parts.append(f"<sub>{_escape(block.note)}</sub>")
    return "\n\n".join(parts)


def _cell(cell: TableCell) -> str:
    text = _escape(cell.text)
    return f"**{text}**" if cell.tone in (Tone.STRONG, Tone.BAD) else text


def _escape(text: str) -> str:
    """Keep characters that Markdown would take for its own."""
    for character in ("\\", "|", "*", "_", "<", "`", "["):
        text = text.replace(character, "\\" + character if character != "<" else "&lt;")
    return text
