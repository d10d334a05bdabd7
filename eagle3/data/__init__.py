"""Prompts, chat rendering and loss masks, regeneration, hidden-state shards and draft vocabulary."""
