"""Values for the {slots} of stems: names, things and topics, so that equal stems make different prompts."""

from __future__ import annotations

import random
import re


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split(","))


SLOTS: dict[str, tuple[str, ...]] = {
    "name": _words(
        "Maria James Aisha Tom Priya Carlos Emma Wei Fatima Lucas Nina Omar Sofia Ben Grace Hiro Leila "
        "Sam Olga Daniel Ruth Ivan Chloe Kofi Ana Peter Mei Jack Zara Henry Lily Noah Ella Amir Julia "
        "Mark"
    ),
    "number": _words(
        "3 4 5 6 7 8 9 10 12 14 15 16 18 20 24 25 30 36 40 45 48 50 60 75 80 90 100 120 150 200"
    ),
    "thing": _words(
        "apples books pencils marbles cookies stickers eggs tickets cards balloons oranges flowers chairs "
        "shirts bottles coins candies toys pages boxes muffins seashells photos bracelets stamps"
    ),
    "place": _phrases(
        "bakery, farm, library, factory, school, bookstore, restaurant, garden, toy shop, hospital, zoo, "
        "train station, gym, supermarket, fruit stand, museum, theater, warehouse, pet store, coffee shop"
    ),
    "verb": _words(
        "count find remove sort check filter reverse sum merge replace split convert compute group "
        "flatten encode decode validate parse rotate extract multiply compare swap move normalize is get "
        "max min has"
    ),
    "noun": _words(
        "vowels duplicates primes words digits list string matrix numbers substring palindrome "
        "even_numbers anagrams characters pairs spaces dictionary intervals lines brackets average median "
        "odd_indices binary date fibonacci elements common_prefix squares factors tuples range triplets"
    ),
    "signature": (
        "(numbers: List[int]) -> int",
        "(numbers: List[int]) -> List[int]",
        "(text: str) -> str",
        "(text: str) -> int",
        "(n: int) -> int",
        "(n: int) -> bool",
        "(n)",
        "(s)",
        "(lst)",
        "(a, b)",
        "(arr, k)",
        "(words: List[str]) -> List[str]",
        "(x: int, y: int) -> int",
        "(strings: List[str], prefix: str) -> List[str]",
        "(matrix)",
        "(d: dict) -> dict",
    ),
    "imports": (
        "",
        "",
        "from typing import List\n\n\n",
        "from typing import List, Tuple\n\n\n",
        "import math\n\n\n",
    ),
    "language": _phrases(
        "Python, Python, Python, JavaScript, Java, C++, C, SQL, Go, Rust, TypeScript, Bash, HTML, R"
    ),
    "topic": _phrases(
        "climate change, renewable energy, the ocean, healthy eating, remote work, artificial "
        "intelligence, the Roman Empire, music, childhood, friendship, space travel, the stock market, "
        "education, social media, a small village, mountains, electric cars, sleep, coffee, democracy, "
        "gardening, football, the French Revolution, photosynthesis, vaccines, chess, inflation, "
        "volcanoes, dreams, bees, time management, public transport, a lost dog, winter, the printing "
        "press, quantum physics, architecture, fashion, migration, the immune system, recycling, robots, "
        "cooking, a lighthouse"
    ),
    "form": _phrases(
        "a short story, a poem, an email, a blog post, a letter, a product description, a speech, a news "
        "article, a dialogue, an essay, a review, a press release, a cover letter, a haiku, a report, a "
        "social media post, a fairy tale, a persuasive paragraph, an invitation, a diary entry"
    ),
    "role": _phrases(
        "a pirate, a doctor, a detective, Albert Einstein, a travel guide, a medieval knight, a chef, a "
        "job interviewer, a robot from the future, a historian, Sherlock Holmes, a financial advisor, a "
        "teacher, an alien, a wise old tree, a football coach, a lawyer, Shakespeare, a personal trainer, "
        "a museum guide"
    ),
    "subject": _words(
        "physics chemistry biology astronomy geology engineering medicine statistics ecology genetics "
        "optics mechanics thermodynamics neuroscience"
    ),
    "humanity": _phrases(
        "history, philosophy, economics, literature, art, psychology, religion, politics, sociology, law, "
        "ethics, archaeology, linguistics, music theory"
    ),
    "opening": _phrases(
        "The, A, An, In, On, Police, Researchers, Scientists, The company, The city, Two, Last week, "
        "Many, For years, More than, According to, After, When, At the, Officials, Students, This, My, "
        "Dear, Our, The film, The team, One of the, Since, While"
    ),
}

_SLOT = re.compile(r"\{(\w+)\}")


def fill(stem: str, generator: random.Random) -> str:
    """The stem with a random value in each slot; two equal slots get independent values."""
    return _SLOT.sub(lambda match: generator.choice(SLOTS[match[1]]), stem)
