"""How second turns begin, by the kind of the first turn."""

from __future__ import annotations

FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "code": (
        "Add",
        "Now write",
        "Can you add comments",
        "What is the time complexity",
        "Rewrite it",
        "Write tests for",
        "Explain the code",
        "How would you change it",
    ),
    "arithmetic": (
        "What if",
        "Now suppose",
        "Explain how",
        "How many",
        "Show the steps",
        "Can you check",
        "And if",
    ),
    "other": (
        "Rewrite your answer",
        "Now",
        "Can you",
        "Explain",
        "Give an example",
        "What about",
        "Make it shorter",
        "Summarize your answer in",
        "Why",
        "How",
        "Do the same",
        "Take your previous answer and",
        "In your answer,",
        "Tell me more about",
        "Translate your answer",
        "Modify",
    ),
}


def follow_up_stems(kind: str) -> tuple[str, ...]:
    """How second turns to a prompt of this kind begin."""
    if kind.startswith("code"):
        return FOLLOW_UPS["code"]
    return FOLLOW_UPS["arithmetic" if kind in ("arithmetic", "math") else "other"]
