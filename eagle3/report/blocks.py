"""What a report is made of, before it becomes HTML or Markdown: both show the same blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Tone(StrEnum):
    """How a table cell or a sentence is to be read."""

    PLAIN = "plain"
    STRONG = "strong"
    GOOD = "good"
    BAD = "bad"
    WARNING = "warning"


@dataclass(frozen=True)
class TableCell:
    """Text with a tone. The text alone must say everything: the tone is a help for the eye."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Table:
    """A captioned table. The first column heads its rows; columns named in `text_columns` are text."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    note: str = ""
    text_columns: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (
                f"{self.caption}: {len(row)} cells in {len(self.columns)} columns"
            )


@dataclass(frozen=True)
class Figure:
    """A figure as SVG text for the page and as a PNG file for Markdown; `description` says what it shows."""

    name: str
    caption: str
    description: str
    svg: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Items:
    """A list of sentences with tones."""

    items: tuple[Paragraph, ...]


@dataclass(frozen=True)
class Code:
    """Commands to copy."""

    text: str


Block = Table | Figure | Paragraph | Items | Code


@dataclass(frozen=True)
class Section:
    """A titled part with an anchor of its own."""

    anchor: str
    title: str
    blocks: tuple[Block, ...] = field(default_factory=tuple)


def cells(values: Sequence[str | TableCell]) -> tuple[TableCell, ...]:
    """A row from texts and cells."""
    return tuple(value if isinstance(value, TableCell) else TableCell(value) for value in values)
