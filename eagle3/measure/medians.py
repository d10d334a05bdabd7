"""Cells to answers: the medians over the repeats of one prompt's turn by one method."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from eagle3.measure.acceptance import Rounds
from eagle3.measure.records import Cell
from eagle3.measure.statistics import median_over_repeats, relative_spread


@dataclass(frozen=True)
class AnswerKey:
    """One prompt's turn decoded by one method at one temperature."""

    method: str
    task: str
    prompt_id: str
    turn: int
    temperature: float


@dataclass(frozen=True)
class Answer:
    """Medians over repeats. Times in seconds.

    Tokens and rounds are repeat 0's; `repeatable` says whether all repeats produced the same tokens, and
    `outputs` holds the different token sequences. `spread` is (max - min) / median of the decode times.
    """

    key: AnswerKey
    repeats: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    finish_reason: str
    rounds: Rounds
    prefill_seconds: float
    decode_seconds: float
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    cache_seconds: float
    spread: float

    @property
    def repeatable(self) -> bool:
        return len(self.outputs) == 1

    @property
    def decode_tokens(self) -> int:
        """New tokens without the prefill's."""
        return len(self.token_ids) - 1

    @property
    def total_seconds(self) -> float:
        """End to end: prefill and decoding."""
        return self.prefill_seconds + self.decode_seconds


def answers_from_cells(cells: Iterable[Cell]) -> list[Answer]:
    """One answer a (method, prompt, turn, temperature), in order of first appearance."""
    groups: dict[AnswerKey, list[Cell]] = defaultdict(list)
    for cell in cells:
        key = cell.key
        groups[AnswerKey(key.method, key.task, key.prompt_id, key.turn, key.temperature)].append(cell)
    return [_answer(key, sorted(group, key=lambda cell: cell.key.repeat)) for key, group in groups.items()]


def _answer(key: AnswerKey, cells: list[Cell]) -> Answer:
    first = cells[0]
    return Answer(
        key=key,
        repeats=len(cells),
        prompt_tokens=first.prompt_tokens,
        token_ids=first.token_ids,
        outputs=tuple(dict.fromkeys(cell.token_ids for cell in cells)),
        finish_reason=first.finish_reason,
        rounds=first.rounds,
        prefill_seconds=median_over_repeats([cell.prefill_seconds for cell in cells]),
        decode_seconds=median_over_repeats([cell.decode_seconds for cell in cells]),
        draft_seconds=median_over_repeats([cell.draft_seconds for cell in cells]),
        verify_seconds=median_over_repeats([cell.verify_seconds for cell in cells]),
        accept_seconds=median_over_repeats([cell.accept_seconds for cell in cells]),
        cache_seconds=median_over_repeats([cell.cache_seconds for cell in cells]),
        spread=relative_spread([cell.decode_seconds for cell in cells]),
    )
