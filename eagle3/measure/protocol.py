"""The measuring protocol: every method in one process, interleaved by prompt in seeded random order.

Vanilla is measured twice ("vanilla" and "vanilla-aa"); the ratio of the two shows what the protocol calls a
speedup where there is none. One block is one prompt at one temperature: all methods decode it one after the
other, in an order drawn anew for every block, so that drift of the machine falls on all of them alike.
"""

import gc
import hashlib
import random
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass

from eagle3.decoding.generation import Decoder, Generation
from eagle3.decoding.sampling import Sampling
from eagle3.measure.load import ForeignCpu
from eagle3.measure.records import Cell, CellKey, Failure, cell_from_generation
from eagle3.measure.rendering import Prompt, Renderer
from eagle3.measure.settings import EvaluationSettings

VANILLA = "vanilla"
VANILLA_AGAIN = "vanilla-aa"


@dataclass(frozen=True)
class Block:
    """One prompt, all of its turns, at one temperature in one repeat."""

    repeat: int
    temperature: float
    prompt: Prompt


@dataclass(frozen=True)
class WarmUp:
    """Untimed generations of one method before measuring. Seconds; the first one includes compilation."""

    first_seconds: float
    last_seconds: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def arms(decoders: Sequence[Decoder], again: Decoder | None = None) -> dict[str, Decoder]:
    """Methods by name, vanilla first, then the A/A arm. Raises ValueError for ambiguous names.

    Args:
        again: decodes the A/A arm, whatever its name; None for vanilla's own decoder.
    """
    names = [decoder.name for decoder in decoders]
    if names.count(VANILLA) != 1:
        raise ValueError(
            f"methods are {names}: exactly one must be named {VANILLA!r}, every speedup is over it"
        )
    if VANILLA_AGAIN in names:
        raise ValueError(f"methods are {names}: {VANILLA_AGAIN!r} is added by itself, take it out")
    if len(set(names)) < len(names):
        raise ValueError(f"methods are {names}: give every method a name of its own")
    by_name = {decoder.name: decoder for decoder in decoders}
    vanilla = by_name.pop(VANILLA)
    return {VANILLA: vanilla, VANILLA_AGAIN: again or vanilla, **by_name}


def schedule(prompts: Sequence[Prompt], settings: EvaluationSettings) -> list[Block]:
    """All blocks: repeat by repeat, within a repeat in seeded random order over prompts and temperatures."""
    blocks = []
    for repeat in range(settings.repeats):
        part = [
            Block(repeat, temperature, prompt) for temperature in settings.temperatures for prompt in prompts
        ]
        _random(settings.seed, "blocks", repeat).shuffle(part)
        blocks += part
    return blocks


def method_order(names: Iterable[str], block: Block, turn: int, seed: int) -> list[str]:
    """The methods in the block's own random order, which a resumed run draws again."""
    order = list(names)
    _random(seed, *block.prompt.key, block.temperature, block.repeat, turn).shuffle(order)
    return order


def sampling_for(prompt: Prompt, turn: int, temperature: float, settings: EvaluationSettings) -> Sampling:
    """Sampling seeded by prompt and turn: the same in every repeat and for every method."""
    if temperature == 0.0:
        return Sampling(temperature=0.0)
    seed = _random(settings.seed, "sampling", *prompt.key, turn).getrandbits(31)
    return Sampling(temperature=temperature, top_k=settings.top_k, top_p=settings.top_p, seed=seed)


def measure(
    decoders: Mapping[str, Decoder],
    blocks: Iterable[Block],
    renderer: Renderer,
    settings: EvaluationSettings,
    cells: MutableMapping[CellKey, Cell],
    *,
    excluded: Iterable[tuple[str, str]] = (),
    process: int = 1,
) -> Iterator[Cell | Failure]:
    """Measure every cell of the blocks that `cells` lacks, one at a time, as the caller asks for the next.

    The caller stores each yielded cell in `cells` before the next is asked for; later turns take their
    answers from it. At T = 0 a second turn continues vanilla's first answer, which every lossless method
    gives too, so that all methods decode the same prompt. At T > 0 the answers differ by nature, and each
    method continues its own, sampled with the seed of the prompt. Answers are always those of repeat 0.

    With `on_failure` "fail" an exception of a decoder passes through, with the cell named in a note; with
    "exclude" it is yielded as a Failure and the prompt is skipped from then on.
    """
    left_out = set(excluded)
    meter = ForeignCpu()
    for block in blocks:
        for turn in range(len(block.prompt.turns)):
            for name in method_order(decoders, block, turn, settings.seed):
                key = CellKey(name, *block.prompt.key, turn, block.temperature, block.repeat)
                if key in cells or block.prompt.key in left_out:
                    continue
                try:
                    prompt_ids = prompt_ids_of(key, block.prompt, renderer, cells)
                    sampling = sampling_for(block.prompt, turn, block.temperature, settings)
                    meter.share()
                    generation = _generate(decoders[name], prompt_ids, settings.max_new_tokens, sampling)
                except Exception as error:
                    if settings.on_failure == "fail":
                        error.add_note(
                            f"while measuring {key}; evaluate.on_failure: exclude would leave it out"
                        )
                        raise
                    left_out.add(block.prompt.key)
                    yield Failure(key, f"{type(error).__name__}: {error}")
                else:
                    yield cell_from_generation(key, len(prompt_ids), generation, process, meter.share())


def prompt_ids_of(
    key: CellKey, prompt: Prompt, renderer: Renderer, cells: Mapping[CellKey, Cell]
) -> list[int]:
    """Token ids that the cell's method was, or will be, given."""
    source = VANILLA if key.temperature == 0.0 else key.method
    answers = [
        cells[CellKey(source, key.task, key.prompt_id, turn, key.temperature, 0)].token_ids
        for turn in range(key.turn)
    ]
    return renderer(prompt, answers)


def warm_up(
    decoders: Mapping[str, Decoder],
    prompts: Sequence[Prompt],
    renderer: Renderer,
    settings: EvaluationSettings,
) -> dict[str, WarmUp]:
    """Run every method untimed on the longest and the shortest prompt at every temperature.

    A decoding step's shapes depend on the method and the length of the context alone, and the two prompts
    span the lengths. The first generation of a method includes what it compiles. A prompt that a method
    cannot decode ends the run here already, before anything is measured; with `on_failure` "exclude" the next
    one is taken, and measuring will leave that prompt out.
    """
    contexts = [prompt_ids for prompt in prompts for prompt_ids in _turn_contexts(prompt, renderer, settings)]
    contexts.sort(key=len)
    warmed: dict[str, WarmUp] = {}
    for name, decoder in decoders.items():
        if any(decoder is decoders[other] for other in warmed):
            continue
        seconds = []
        for temperature in settings.temperatures:
            sampling = sampling_for(prompts[0], 0, temperature, settings)
            for candidates in (contexts[::-1], contexts):
                seconds += _warm(decoder, candidates, settings, sampling)
        if seconds:
            warmed[name] = WarmUp(seconds[0], seconds[-1])
    return warmed


def _warm(
    decoder: Decoder, contexts: Sequence[list[int]], settings: EvaluationSettings, sampling: Sampling
) -> list[float]:
    """Seconds of one generation after the first of the contexts that the decoder takes; [] without one."""
    for prompt_ids in contexts:
        began = time.perf_counter()
        try:
            decoder.generate(prompt_ids, settings.max_new_tokens, sampling)
        except ValueError as error:
            if settings.on_failure == "fail":
                error.add_note("while warming up; evaluate.on_failure: exclude would leave such prompts out")
                raise
            continue
        return [time.perf_counter() - began]
    return []


def _turn_contexts(prompt: Prompt, renderer: Renderer, settings: EvaluationSettings) -> Iterator[list[int]]:
    """Each turn's token ids, with answers of full length (one token over and over) before it."""
    first = renderer(prompt, [])
    filler = [first[-1]] * settings.max_new_tokens
    for turn in range(len(prompt.turns)):
        yield renderer(prompt, [filler] * turn)


def _generate(
    decoder: Decoder, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling
) -> Generation:
    """Generate without the garbage collector's pauses, which would fall on some methods by chance.

    Garbage of this project's own objects is freed by counting references; the collector is for cycles alone.
    """
    gc.disable()
    try:
        return decoder.generate(prompt_ids, max_new_tokens, sampling)
    finally:
        gc.enable()


def _random(*parts: object) -> random.Random:
    """A generator seeded by content, the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))
