"""Tuning by measured speed: space, trials, early stop, cost model, the winner on held-out prompts."""
