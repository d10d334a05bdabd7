"""Chat rendering: conversations to token ids, exact assistant spans, and the start of a user turn.

Everything is decided on token ids of the tokenizer's own chat template. Masks that search the rendered text
for role markers break silently when the template and the tokenizer disagree; here every prompt must be a
token prefix of its conversation, and a template for which that fails is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

Message = Mapping[str, str]
"""One chat message: {"role": "system" | "user" | "assistant", "content": text}."""

# For base models without a chat template. The content stands on its own line, so that its first token never
# merges with the role's; a closed answer ends with the tokenizer's EOS, as in every chat template.
PLAIN_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User:\n' + message['content'] + '\n\n' }}"
    "{% else %}{{ 'Assistant:\n' + message['content'] + eos_token + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)

RENDERED_ON = datetime(2025, 3, 1)
"""The day of every rendering. Templates such as those of Llama 3.2 and gpt-oss print today's date, and with
the clock's, tomorrow's prompts would be other ones than those that were answered, trained on and measured.
Any day would do. Where a template has a date of its own, as that of Llama 3.1, it keeps it.
"""

# Stands for a message whose text does not matter or is looked for; no template alters plain letters.
_MARKER = "Xq7zMarkerz7qX"


@dataclass(frozen=True)
class RenderedConversation:
    """Token ids of a whole conversation and the half-open spans of its assistant answers.

    A span starts at the answer's first token and includes the end-of-turn token, because the target has to
    produce both. Worked: ids `<u> hi <e> <a> yes <e> \\n` have the one span (4, 6), "yes <e>".
    """

    token_ids: tuple[int, ...]
    assistant_spans: tuple[tuple[int, int], ...]

    def loss_mask(self) -> list[bool]:
        """True where the token at that index was produced by the assistant. [T]"""
        mask = [False] * len(self.token_ids)
        for start, end in self.assistant_spans:
            mask[start:end] = [True] * (end - start)
        return mask


def template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """Which template renders: "tokenizer" for its own, "plain" for the fallback for base models."""
    return "tokenizer" if tokenizer.chat_template else "plain"


def conversation(
    turns: Sequence[str], answers: Sequence[str] = (), system: str | None = None
) -> list[Message]:
    """Interleaves user turns and answers: turn 0, answer 0, turn 1, ...

    Raises ValueError unless there are as many answers as turns, or fewer.
    """
    if len(answers) > len(turns):
        raise ValueError(
            f"{len(answers)} answers to {len(turns)} turns: an answer needs a user turn before it"
        )
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if index < len(answers):
            messages.append({"role": "assistant", "content": answers[index]})
    return messages


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generation_prompt: bool
) -> str:
    """The text the chat template makes of the messages. A template that prints today's date prints
    `RENDERED_ON`.

    Raises ValueError when the template refuses them (for example a system message it does not know), or
    when the fallback for base models needs an EOS token that the tokenizer lacks.
    """
    if tokenizer.chat_template:
        template = tokenizer.get_chat_template()
    elif tokenizer.eos_token is not None:
        template = PLAIN_CHAT_TEMPLATE
    else:
        raise ValueError(
            f"{tokenizer.name_or_path}: no chat template and no EOS token; "
            "set eos_token in tokenizer_config.json"
        )
    try:
        # transformers hands no function of its caller's to a template, and gives each one that reads the
        # clock. It keeps what it has compiled, so that this is the template that it renders.
        _compile_jinja_template(template).globals["strftime_now"] = RENDERED_ON.strftime
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"{tokenizer.name_or_path}: the chat template refuses messages with roles {roles}: {error}. "
            "Remove the system message, or make the turns alternate"
        ) from error
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of rendered text; special tokens come from the template alone, never a second time."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids up to the point where the assistant answers. Raises ValueError like `render_text`."""
    return encode(tokenizer, render_text(tokenizer, messages, generation_prompt=True))


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], eos_token_ids: Collection[int] = ()
) -> RenderedConversation:
    """Token ids of the whole conversation and the spans of its answers.

    `eos_token_ids` are all the ids at which the target stops; the tokenizer's own EOS is always among them.

    Raises ValueError when a prompt is not a token prefix of the conversation (the template rewrites earlier
    turns, or an answer's first characters merge with the prompt's last token) and when an answer is not
    closed by an EOS.
    """
    full = encode(tokenizer, render_text(tokenizer, messages, generation_prompt=False))
    stops = _stops(tokenizer, eos_token_ids)
    spans = tuple(
        _answer_span(tokenizer, messages[: index + 1], full, stops)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    )
    return RenderedConversation(tuple(full), spans)


def next_turn_ids(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[str],
    system: str | None = None,
    eos_token_ids: Collection[int] = (),
) -> list[int]:
    """The ids between the EOS that closed the answer to turns[-2] and the answer to turns[-1].

    Appended to the ids the target really sampled, they continue the conversation without tokenising an
    answer again: `prompt(turns[:1]) + answer 0 (with EOS) + next_turn_ids(turns[:2]) + answer 1 + ...`. The
    text of the answers does not enter. ValueError as in `render_conversation`, and for fewer than two
    turns.
    """
    if len(turns) < 2:
        raise ValueError(f"a next turn needs at least two turns, got {len(turns)}")
    messages = conversation(turns, [_MARKER] * (len(turns) - 1), system)
    full = render_prompt(tokenizer, messages)
    _, end = _answer_span(tokenizer, messages[:-1], full, _stops(tokenizer, eos_token_ids))
    return full[end:]


def user_turn_text(
    tokenizer: PreTrainedTokenizerBase, system: str | None = None, before: Sequence[Message] = ()
) -> str:
    """The template's text up to the first character of a user turn: there the target can write one itself.

    A stem is appended to it before tokenising, so that both merge naturally. `system` None keeps the
    template's own default system message. `before` are complete user/assistant messages that precede the
    turn. Source of the idea: Magpie, arXiv 2406.08464.

    Raises ValueError when the template does not copy the user's text into its output.
    """
    messages = [*conversation([], system=system), *before, {"role": "user", "content": _MARKER}]
    text = render_text(tokenizer, messages, generation_prompt=False)
    head, marker, _ = text.rpartition(_MARKER)
    if not marker:
        raise ValueError(
            f"{tokenizer.name_or_path}: the chat template does not copy the user's text, so no user turn "
            "can be started; use prompts from files instead of self-made ones"
        )
    return head


def user_turn_end(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the template puts between the user's text and the answer, without outer white space.

    A target that writes a user turn itself may go on with it where the turn's end is no EOS: "[/INST]"
    (Mistral) or "Assistant:" (the fallback for base models). What follows it is no longer the request.
    """
    text = render_text(tokenizer, conversation([_MARKER]), generation_prompt=True)
    return text.rpartition(_MARKER)[2].strip()


def _stops(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> frozenset[int]:
    own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return frozenset((*own, *eos_token_ids))


def _answer_span(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    full: Sequence[int],
    stops: frozenset[int],
) -> tuple[int, int]:
    """Span of the answer messages[-1] in `full`, the rendering of a conversation that begins with them."""
    prompt = render_prompt(tokenizer, messages[:-1])
    start = len(prompt)
    if list(full[:start]) != prompt:
        at = next((i for i, (a, b) in enumerate(zip(full, prompt, strict=False)) if a != b), len(full))
        raise ValueError(
            f"{tokenizer.name_or_path}: the prompt before answer {_excerpt(messages[-1]['content'])} "
            f"is not a token prefix of the conversation (first difference at token {at} of {start}). "
            "The chat template rewrites earlier turns, or the answer's first characters merge with the "
            "prompt: strip the answer, or set a chat template that only appends"
        )
    end = next((i + 1 for i in range(start, len(full)) if full[i] in stops), None)
    closed = len(encode(tokenizer, render_text(tokenizer, messages, generation_prompt=False)))
    if end is None or end > closed:
        raise ValueError(
            f"{tokenizer.name_or_path}: the chat template does not close answer "
            f"{_excerpt(messages[-1]['content'])} with any of the stop ids {sorted(stops)}; give the "
            "target's EOS ids, or a template that ends each answer with one"
        )
    return start, end


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
