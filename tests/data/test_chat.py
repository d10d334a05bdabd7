"""Chat rendering protects the loss mask: one token too many or too few trains the draft on what nobody
predicts.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.chat import (
    conversation,
    encode,
    next_turn_ids,
    render_conversation,
    render_prompt,
    render_text,
    template_source,
    user_turn_text,
)
from tests.data.tiny_tokenizer import CHATML, chatml_tokenizer

TOKENIZER = chatml_tokenizer()
EOS = TOKENIZER.eos_token_id
# An answer that begins with a newline would merge with the newline of the template (tested on its own below).
ANSWERS = st.text(alphabet="abhe .\n!é", min_size=1, max_size=12).filter(
    lambda text: not text.startswith("\n")
)


def test_span_covers_answer_and_end_of_turn_only() -> None:
    rendered = render_conversation(TOKENIZER, conversation(["hi"], ["he is"]))
    ((start, end),) = rendered.assistant_spans
    assert TOKENIZER.decode(list(rendered.token_ids[start:end])) == "he is<|im_end|>"
    assert TOKENIZER.decode(list(rendered.token_ids[end:])) == "\n"
    assert list(rendered.token_ids[:start]) == render_prompt(TOKENIZER, conversation(["hi"]))


@given(st.lists(st.tuples(ANSWERS, ANSWERS), min_size=1, max_size=4), st.none() | st.just("Be short."))
@settings(max_examples=50, deadline=None)
def test_every_answer_of_a_conversation_is_masked_exactly(
    pairs: list[tuple[str, str]], system: str | None
) -> None:
    turns, answers = [turn for turn, _ in pairs], [answer for _, answer in pairs]
    rendered = render_conversation(TOKENIZER, conversation(turns, answers, system))
    decoded = [TOKENIZER.decode(list(rendered.token_ids[a:b])) for a, b in rendered.assistant_spans]
    assert decoded == [answer + "<|im_end|>" for answer in answers]
    assert sum(rendered.loss_mask()) == sum(b - a for a, b in rendered.assistant_spans)


@given(st.lists(st.tuples(ANSWERS, ANSWERS), min_size=2, max_size=4), st.none() | st.just("Be short."))
@settings(max_examples=50, deadline=None)
def test_turns_joined_by_ids_equal_the_rendered_conversation(
    pairs: list[tuple[str, str]], system: str | None
) -> None:
    turns, answers = [turn for turn, _ in pairs], [answer for _, answer in pairs]
    ids = render_prompt(TOKENIZER, conversation(turns[:1], system=system))
    for count in range(1, len(turns)):
        ids += [*TOKENIZER(answers[count - 1])["input_ids"], EOS]
        ids += next_turn_ids(TOKENIZER, turns[: count + 1], system)
    assert ids == render_prompt(TOKENIZER, conversation(turns, answers[:-1], system))


def test_next_turn_needs_two_turns() -> None:
    with pytest.raises(ValueError, match="at least two turns"):
        next_turn_ids(TOKENIZER, ["hi"])


def test_answer_that_merges_with_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="not a token prefix"):
        render_conversation(TOKENIZER, conversation(["hi"], ["\nhello"]))


def test_template_that_rewrites_history_is_refused() -> None:
    forgetful = CHATML.replace("message['content'] +", "(message['content'] if loop.last else 'gone') +")
    tokenizer = chatml_tokenizer(forgetful)
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        render_conversation(tokenizer, conversation(["one", "two"], ["a", "b"]))


def test_template_that_does_not_close_answers_is_refused() -> None:
    tokenizer = chatml_tokenizer(CHATML.replace("<|im_end|>", "<end>"))
    with pytest.raises(ValueError, match="does not close answer"):
        render_conversation(tokenizer, conversation(["one", "two"], ["a", "b"]))


def test_stop_ids_of_the_target_close_an_answer_too() -> None:
    tokenizer = chatml_tokenizer(eos="<|endoftext|>")
    with pytest.raises(ValueError, match="does not close answer"):
        render_conversation(tokenizer, conversation(["hi"], ["yes"]))
    rendered = render_conversation(tokenizer, conversation(["hi"], ["yes"]), {EOS})
    assert rendered.token_ids[rendered.assistant_spans[0][1] - 1] == EOS


def test_system_message_the_template_refuses_is_a_value_error() -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    with pytest.raises(ValueError, match=r"refuses messages with roles \['system', 'user'\].*no system"):
        render_prompt(chatml_tokenizer(strict), conversation(["hi"], system="x"))


def test_the_text_before_a_user_turn_ends_where_the_user_speaks() -> None:
    text = user_turn_text(TOKENIZER, "Be short.")
    assert text == "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n"
    full = render_prompt(TOKENIZER, conversation(["Name a fish"], system="Be short."))
    prefix = encode(TOKENIZER, text)
    assert full[: len(prefix)] == prefix
    assert "You are a helpful assistant." in user_turn_text(TOKENIZER)


def test_user_turn_after_an_answer_starts_like_the_rendered_second_turn() -> None:
    first = conversation(["one"], ["a"])
    prefix = encode(TOKENIZER, user_turn_text(TOKENIZER, before=first))
    full = render_prompt(TOKENIZER, conversation(["one", "two"], ["a"]))
    assert full[: len(prefix)] == prefix
    assert TOKENIZER.decode(full[len(prefix) :]).startswith("two<|im_end|>")


def test_template_without_the_users_text_cannot_start_a_user_turn() -> None:
    with pytest.raises(ValueError, match="does not copy the user's text"):
        user_turn_text(chatml_tokenizer("{{ 'fixed' }}"))


def test_base_model_gets_the_plain_template() -> None:
    tokenizer = chatml_tokenizer(template=None)
    assert (template_source(tokenizer), template_source(TOKENIZER)) == ("plain", "tokenizer")
    messages = conversation(["hi", "more"], ["yes", "no"], "Be short.")
    text = render_text(tokenizer, messages, generation_prompt=False)
    assert text == (
        "Be short.\n\nUser:\nhi\n\nAssistant:\nyes<|im_end|>\n\nUser:\nmore\n\nAssistant:\nno<|im_end|>\n\n"
    )
    rendered = render_conversation(tokenizer, messages)
    assert [tokenizer.decode(list(rendered.token_ids[a:b])) for a, b in rendered.assistant_spans] == [
        "yes<|im_end|>",
        "no<|im_end|>",
    ]


def test_base_model_without_eos_is_refused() -> None:
    with pytest.raises(ValueError, match="no chat template and no EOS"):
        render_prompt(chatml_tokenizer(template=None, eos=None), conversation(["hi"]))


def test_template_that_prints_todays_date_prints_one_that_stays() -> None:
    """With the clock's, tomorrow's prompts would not be those that were answered today."""
    dated = chatml_tokenizer("{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML)
    text = render_text(dated, conversation(["hi"]), generation_prompt=True)
    assert text.startswith("Today: 01 Mar 2025\n<|im_start|>system")


@pytest.mark.parametrize(
    ("own", "printed"), [("strftime_now('%d %b %Y')", "01 Mar 2025"), ("'26 Jul 2024'", "26 Jul 2024")]
)
def test_template_with_a_date_string_prints_its_own(own: str, printed: str) -> None:
    """Where nobody gives them one, Llama 3.2 takes today's, and Llama 3.1 always the same."""
    choice = "{% if not date_string is defined %}{% set date_string = " + own + " %}{% endif %}"
    dated = chatml_tokenizer(choice + "{{ 'Today: ' + date_string + '\n' }}" + CHATML)
    text = render_text(dated, conversation(["hi"]), generation_prompt=True)
    assert text.startswith(f"Today: {printed}\n")


def test_more_answers_than_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="2 answers to 1 turns"):
        conversation(["hi"], ["a", "b"])
