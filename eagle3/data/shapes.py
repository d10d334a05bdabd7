"""The shapes in which people keep prompts, each turned into user turns and a system message.

Every function raises ValueError with a reason that fits a quarantine file: what is wrong, in a few words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

Turns = tuple[tuple[str, ...], str | None]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
}
# A passage shorter than this is the first half of its question, not something to summarise.
_PASSAGE_CHARACTERS = 240


def turns_of_row(row: object) -> Turns:
    """User turns and system message of a row of any known shape; the first key that is there decides.

    {"turns": [text, ...]}, {"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]},
    {"prompt": text or messages}, {"instruction", "input"}, {"question", "passage", "options"}, {"document"}.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object, found {type(row).__name__}")
    if "turns" in row:
        return _from_turns(row["turns"], row.get("system"))
    for key in ("messages", "conversations"):
        if key in row:
            return turns_of_messages(row[key])
    if "prompt" in row:
        if isinstance(row["prompt"], list):
            return turns_of_messages(row["prompt"])
        return _from_turns([row["prompt"]], row.get("system"))
    if "instruction" in row:
        return (_joined(row["instruction"], row.get("input")),), None
    if "question" in row:
        return (_question(row),), None
    if "document" in row:
        return (_summarise(_text(row["document"], "document")),), None
    raise ValueError(f"unknown shape with keys {', '.join(map(str, row)) or '(none)'}")


def turns_of_messages(messages: object) -> Turns:
    """User turns of a chat in OpenAI or ShareGPT form. The chat must begin with the user, after at most one
    system message, and alternate; its answers are dropped.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("the conversation is empty or not a list")
    roles, texts = [], []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"a message is not an object but {type(message).__name__}")
        name = message.get("role", message.get("from"))
        if not isinstance(name, str) or name not in _ROLES:
            raise ValueError(f"role {name!r} is not supported")
        roles.append(_ROLES[name])
        texts.append(_content(message.get("content", message.get("value"))))
    system = None
    if roles[0] == "system":
        system = texts[0].strip() or None
        roles, texts = roles[1:], texts[1:]
    expected = ["user" if index % 2 == 0 else "assistant" for index in range(len(roles))]
    if not roles or roles != expected:
        raise ValueError(f"roles do not alternate from the user on: {', '.join(roles) or '(none)'}")
    return _from_turns(texts[::2], system)


def _from_turns(turns: object, system: object = None) -> Turns:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ValueError("turns is empty or not a list")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"system is not a text but {type(system).__name__}")
    return tuple(_text(turn, "a turn") for turn in turns), system or None


def _content(content: object) -> str:
    """A message's text; OpenAI also allows a list of parts, of which only text can be read."""
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
        if any(kind != "text" for kind in kinds):
            raise ValueError(f"message parts of type {kinds} are not only text")
        return "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"a message's content is not a text but {type(content).__name__}")
    return content


def _joined(instruction: object, extra: object) -> str:
    text = _text(instruction, "instruction")
    if extra is None or (isinstance(extra, str) and not extra.strip()):
        return text
    return f"{text}\n\n{_text(extra, 'input')}"


def _question(row: Mapping[str, Any]) -> str:
    """A question with what belongs to it, in one of several forms chosen by its hash.

    Long passages are asked about, summarised, or left out; options are listed or left out: so one data set
    trains several kinds of prompt.
    """
    question = _text(row["question"], "question")
    passage = next((row[key] for key in ("passage", "context") if row.get(key)), None)
    options = row.get("options")
    form = hashlib.sha256(question.encode()).digest()[0] % 4
    if options and form != 0:
        question = f"{question}\n{_listed(options)}"
    if passage is None:
        return question
    passage = _text(passage, "passage")
    if len(passage) < _PASSAGE_CHARACTERS:
        return f"{passage} {question}"
    if form == 2:
        return _summarise(passage)
    if form == 3:
        return question
    return f"{passage}\n\nQuestion: {question}"


def _listed(options: object) -> str:
    if isinstance(options, list):
        return "\n".join(f"{chr(65 + index)}. {option}" for index, option in enumerate(options))
    return _text(options, "options")


def _summarise(passage: str) -> str:
    wordings = (
        "Write a short summary of this text.\n\n{}",
        "{}\n\nWhat is this text about? Answer in two sentences.",
        "Please sum up the following passage:\n\n{}",
        "Give me the key points of this text:\n\n{}",
    )
    return wordings[hashlib.sha256(passage.encode()).digest()[0] % len(wordings)].format(passage)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a text but {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{what} is empty")
    return value.strip()
