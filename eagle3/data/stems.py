"""Kinds of self-made prompts: how a user message begins before the target completes it.

Free sampling from the user turn alone is narrow; each kind here steers to what a draft must be good at:
chat in the categories of MT-bench, code, arithmetic, passages to summarise, questions, instructions with
constraints. No stem ends in white space: the next token would have to begin in the middle of a word. No stem
has the wording that an evaluation task adds to its prompts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of prompt: its share of the plan, its stems with {slots}, and how its completion ends.

    `ending` "message": the target must end the user turn itself. "passage": a running text that may be cut
    at its last sentence. "docstring": everything up to the closing quotes of the docstring. "question": up
    to the last question mark of the first paragraph, because targets go on with the solution.
    `steered` kinds are sampled under the template's own system message, others under several ones.
    """

    name: str
    share: float
    stems: tuple[str, ...]
    ending: str = "message"
    steered: bool = True


def _alternatives(text: str) -> tuple[str, ...]:
    return tuple(stem.strip() for stem in text.split("|"))


KINDS: tuple[Kind, ...] = (
    Kind("free", 2.5, ("",), steered=False),
    Kind(
        "code_function",
        1.0,
        (
            "Write a Python function that",
            "Write a {language} function that",
            "Write a Python function called {verb}_{noun} that",
            "Write a {language} program that",
            "Implement a class in {language} that",
            "Write a function to {verb}",
            "Create a script in {language} that",
            "Given a list of {thing}, write a Python function that",
            "Write a regular expression that",
            "Write a SQL query that",
            "Implement an algorithm that",
        ),
    ),
    Kind(
        "code_completion",
        1.6,
        (
            'Complete the following code:\n\n{imports}def {verb}_{noun}{signature}:\n    """',
            'Write the body of this function.\n\n{imports}def {verb}_{noun}{signature}:\n    """Given',
            '{imports}def {verb}_{noun}{signature}:\n    """Return',
            'Implement the function below.\n\n{imports}def {verb}_{noun}{signature}:\n    """Write code that',
            'Complete this function:\n\n```python\n{imports}def {verb}_{noun}{signature}:\n    """',
            'Finish the following Python function.\n\n{imports}def {verb}_{noun}{signature}:\n    """',
        ),
        ending="docstring",
    ),
    Kind(
        "code_help",
        0.6,
        (
            "Explain what this code does:\n\n```python\ndef {verb}_{noun}(",
            "What is wrong with this {language} code?\n\n```",
            "How do I {verb}",
            "In {language}, how can I",
            "What is the difference between",
            "How does {language} handle",
            "Convert this Python code to {language}:\n\n```python\ndef {verb}_{noun}(",
            "I get this error in {language}:",
        ),
    ),
    Kind(
        "arithmetic",
        2.0,
        (
            "{name} has {number} {thing}",
            "{name} bought {number} {thing}",
            "{name} and {name} have",
            "A {place} sells",
            "There are {number} {thing} in",
            "{name} works at a {place}",
            "{name} reads {number} pages",
            "{name} earns ${number}",
            "A train travels",
            "In a class of {number} students,",
            "{name} is {number} years old.",
            "If {name} drives",
            "{name} makes {number} {thing} every",
            "A {place} has {number}",
            "{name} wants to buy",
            "The price of",
            "{name} spends",
            "Every day, {name}",
            "{name} ran {number} miles",
            "A box contains {number} {thing}",
        ),
        ending="question",
    ),
    Kind(
        "math",
        0.5,
        (
            "Solve the equation",
            "What is the value of",
            "Find the",
            "Simplify the expression",
            "What is the probability that",
            "A rectangle has",
            "Calculate the",
            "If x =",
            "Prove that",
            "How many ways",
        ),
    ),
    Kind(
        "writing",
        0.9,
        (
            "Write {form} about {topic}",
            "Write {form} that",
            "Write {form} to",
            "Compose {form} about",
            "Draft {form} in which",
            "Describe {topic}",
            "Edit the following paragraph to correct any grammatical errors:\n\n{opening}",
            "Imagine you are writing {form}",
            "Come up with a title for",
            "Write an introduction for",
        ),
    ),
    Kind(
        "roleplay",
        0.5,
        (
            "Pretend to be {role}.",
            "Act as {role} and",
            "You are {role}.",
            "Imagine you are {role}.",
            "I want you to act as {role}.",
            "Take on the role of {role} and explain",
        ),
    ),
    Kind(
        "reasoning",
        0.6,
        (
            "Which word does not belong:",
            "{name} is taller than",
            "If all",
            "Suppose that",
            "Which of the following",
            "Three friends,",
            "Read the following and decide",
            "Imagine you are in a race",
            "True or false:",
            "What comes next in the sequence",
            "Given that",
        ),
    ),
    Kind(
        "extraction",
        0.6,
        (
            "Extract the names of",
            "Given the following text, list",
            "Read this review and rate it from 1 to 5:\n\n{opening}",
            "Identify the countries, their capitals",
            "Extract the main points from the following text:\n\n{opening}",
            "From the text below, return a JSON object with",
            "List all the {thing} mentioned in this text:",
            "Classify the sentiment of this sentence:",
        ),
        ending="passage",
    ),
    Kind(
        "stem",
        0.6,
        _alternatives(
            "Explain | Explain how | In {subject}, what is | What is the role of | Describe the process "
            "of | What are the main causes of | How does | Why do | What happens when | Explain the "
            "concept of"
        ),
    ),
    Kind(
        "humanities",
        0.6,
        _alternatives(
            "Discuss the | What were the causes of | Compare | Explain the significance of | In "
            "{humanity}, what | How did | What are the main ideas of | Describe the relationship between "
            "| Who was | Provide insights into"
        ),
    ),
    Kind(
        "summary",
        1.2,
        (
            "Summarize the following article in one or two sentences.\n\n{opening}",
            "Summarize the following text in three sentences.\n\n{opening}",
            "Summarize this news story:\n\nPolice",
            "Summarize this text:\n\n{name}",
            "Summarize the following passage in a few sentences.\n\n{opening}",
            "Give a short summary of this text about {topic}:\n\n{opening}",
            "What is the main point of this article?\n\nThe",
            "TL;DR of the following:\n\nThe",
            "Summarise the text below in your own words.\n\nResearchers",
            "Write a one-sentence summary of this report:\n\nThe government",
        ),
        ending="passage",
    ),
    Kind(
        "question",
        1.4,
        _alternatives(
            "Who | What | When did | Where is | Which | who is the | who played | when was the | where "
            "does the | what is the name of | how many | who wrote | what year did | when is the | where "
            "was | who sings | what does | is it true that | how long does"
        ),
    ),
    Kind(
        "instruction",
        1.0,
        (
            "Write {form} about {topic} in exactly {number} words. Do not",
            "List {number}",
            "Write {form} about {topic}. Include the word",
            "Answer in one sentence:",
            "Explain {topic} without using",
            "Give me {number} ideas for",
            "Write a paragraph about {topic} in which every sentence",
            "Respond only with",
            "Create a table of",
            "In bullet points, explain",
            "Write {form} where",
            "Explain {topic} to a",
        ),
    ),
    Kind(
        "advice",
        0.7,
        _alternatives(
            "How can I | What should I | Can you recommend | I'm planning | What are some | I need help "
            "with | Is it a good idea to | What's the best way to | Can you help me | I want to learn"
        ),
    ),
    Kind(
        "rewriting",
        0.5,
        (
            "Rewrite the following sentence:",
            "Make this email more polite:\n\n{opening}",
            "Translate the following into Spanish:",
            "Paraphrase this paragraph:\n\n{opening}",
            "Correct the grammar:",
            "Rewrite this text for children:\n\n{opening}",
            "Make the following text shorter:\n\n{opening}",
        ),
        ending="passage",
    ),
)
