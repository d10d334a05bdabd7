"""Training prompts written by the target itself: what to sample, and what of it to keep.

An aligned target that is given its own chat template up to the user's turn writes the request (Magpie,
arXiv 2406.08464). Left alone it writes few kinds of request, so most plans also start the request with a
stem. Everything is a function of seed, kind and number: neither batch nor order changes a prompt.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from eagle3.data.chat import Message, conversation, encode, render_prompt, user_turn_end, user_turn_text
from eagle3.data.completion import Completion, PlannedPrompt
from eagle3.data.filters import STRICT, answers_instead, refusal, special_tokens
from eagle3.data.follow_ups import follow_up_stems
from eagle3.data.prompt import Prompt
from eagle3.data.slots import fill
from eagle3.data.stems import KINDS, Kind

SYSTEMS = (
    "You are a helpful assistant who answers questions about programming and software.",
    "You are a patient tutor for mathematics and science.",
    "You are an editor who writes, rewrites and summarises texts.",
    "You are an expert in history, economics and the arts.",
    "You are a friendly companion for conversation, travel and cooking.",
    "You extract information from texts and return it in the format that the user asks for.",
    "You are a careful analyst who solves puzzles and reasons step by step.",
)
"""Besides the template's own, what freely sampled prompts are sampled under: each leads to other requests."""

FOLLOW_UP_SHARE = 0.15
"""Second turns planned for each first turn that was kept."""

# Of the freely sampled prompts, those that are answered under the system message they were sampled with. The
# others are answered under the template's own, as nearly every request to a deployed target is.
_KEEPS_SYSTEM = 0.5
_MIN_PASSAGE_CHARACTERS = 160
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s|$)")
# What a second turn is sampled after, in place of the answer: regeneration answers the first turn only later.
_STAND_IN_ANSWER = "Here is my answer to your request."


def plan_prompts(tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[PlannedPrompt]:
    """`count` first turns over all kinds, in proportion to their shares.

    Prompt `index` of a kind is the same in every plan of the same seed, however large. Raises ValueError
    when the chat template cannot start a user turn.
    """
    systems = _usable_systems(tokenizer)
    heads = {system: user_turn_text(tokenizer, system) for system in systems}
    plan = []
    for kind, number in zip(KINDS, _apportion([kind.share for kind in KINDS], count), strict=True):
        for index in range(number):
            generator = random.Random(f"{seed}:{kind.name}:{index}")
            stem = fill(_stem_pattern(kind, index, seed), generator)
            sampled_under = None if kind.steered else systems[index % len(systems)]
            system = sampled_under if generator.random() < _KEEPS_SYSTEM else None
            prefix = encode(tokenizer, heads[sampled_under] + stem)
            plan.append(
                PlannedPrompt(
                    _id(seed, kind.name, index, stem), kind.name, kind.ending, tuple(prefix), stem, system
                )
            )
    return plan


def plan_follow_ups(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], seed: int
) -> list[PlannedPrompt]:
    """A second turn for about FOLLOW_UP_SHARE of the self-made prompts, chosen by id: a plan of its own."""
    plan = []
    for prompt in prompts:
        generator = random.Random(f"{seed}:follow_up:{prompt.id}")
        if generator.random() >= FOLLOW_UP_SHARE:
            continue
        kind = prompt.source.removeprefix("self:")
        stem = generator.choice(follow_up_stems(kind))
        before: list[Message] = conversation(prompt.turns, [_STAND_IN_ANSWER])
        prefix = encode(tokenizer, user_turn_text(tokenizer, prompt.system, before) + stem)
        plan.append(
            PlannedPrompt(
                id=f"{prompt.id}-2",
                kind=f"{kind}_follow_up",
                ending="message",
                prefix_ids=tuple(prefix),
                stem=stem,
                system=prompt.system,
                turns_before=prompt.turns,
            )
        )
    return plan


def finish_prompts(
    tokenizer: PreTrainedTokenizerBase,
    plan: Sequence[PlannedPrompt],
    completions: Mapping[str, Completion],
) -> tuple[list[Prompt], Counter[str]]:
    """The usable prompts in the plan's order, and the reasons of what was refused.

    Raises ValueError when a planned prompt has no completion.
    """
    end, forbidden = user_turn_end(tokenizer), special_tokens(tokenizer)
    prompts: list[Prompt] = []
    reasons: Counter[str] = Counter()
    for planned in plan:
        if planned.id not in completions:
            raise ValueError(f"self-made prompt {planned.id}: the generator returned no completion for it")
        text, reason = finish(planned, completions[planned.id], end)
        reason = reason or refusal(text, STRICT, forbidden) or ("answer" if answers_instead(text) else None)
        if reason:
            reasons[reason] += 1
        else:
            turns = (*planned.turns_before, text)
            prompts.append(Prompt(planned.id, f"self:{planned.kind}", turns, planned.system))
    return prompts, reasons


def finish(planned: PlannedPrompt, completion: Completion, turn_end: str = "") -> tuple[str, str | None]:
    """The user's text from a completion, and "unfinished" when it has no acceptable end.

    `turn_end` is what the template puts after the user's text; when the target wrote it, the request ended
    there.
    """
    stopped = completion.finish_reason == "stop"
    added = completion.text
    if turn_end and turn_end in added:
        added, stopped = added.partition(turn_end)[0], True
    if planned.ending == "docstring":
        return _finish_docstring(planned.stem, added)
    if planned.ending == "question":
        return _finish_question(planned.stem, added, stopped)
    text = planned.stem + added
    if stopped:
        return text.strip(), None
    if planned.ending == "passage":
        ends = [match.end() for match in _SENTENCE_END.finditer(added)]
        if ends and ends[-1] >= _MIN_PASSAGE_CHARACTERS:
            return (planned.stem + added[: ends[-1]]).strip(), None
    return text.strip(), "unfinished"


def _finish_docstring(stem: str, added: str) -> tuple[str, str | None]:
    body, quotes, _ = added.partition('"""')
    if not quotes or not body.strip():
        return (stem + added).strip(), "unfinished"
    fence = "\n```" if "```" in stem else "\n"
    return stem + body + quotes + fence, None


def _finish_question(stem: str, added: str, stopped: bool) -> tuple[str, str | None]:
    """Cut after the first paragraph's last question mark; without one, the whole turn if the target ended
    it.
    """
    paragraph = added.split("\n\n")[0]
    at = paragraph.rfind("?")
    if at >= 0:
        return (stem + paragraph[: at + 1]).strip(), None
    return (stem + added).strip(), None if stopped else "unfinished"


def _usable_systems(tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, ...]:
    """The template's own system message, and ours where the template takes one (Gemma's does not)."""
    try:
        render_prompt(tokenizer, conversation(["x"], system=SYSTEMS[0]))
    except ValueError:
        return (None,)
    return (None, *SYSTEMS)


def _stem_pattern(kind: Kind, index: int, seed: int) -> str:
    """Every stem once, in a seeded order, before any comes twice."""
    order = list(kind.stems)
    random.Random(f"{seed}:{kind.name}:{index // len(order)}:order").shuffle(order)
    return order[index % len(order)]


def _apportion(shares: Sequence[float], count: int) -> list[int]:
    """Whole numbers in proportion to the shares that add up to `count` (cumulative rounding)."""
    total, done, sums = sum(shares), 0, []
    running = 0.0
    for share in shares:
        running += share
        upto = round(count * running / total)
        sums.append(upto - done)
        done = upto
    return sums


def _id(seed: int, kind: str, index: int, stem: str) -> str:
    return "self-" + hashlib.sha256(f"{seed}\0{kind}\0{index}\0{stem}".encode()).hexdigest()[:14]
