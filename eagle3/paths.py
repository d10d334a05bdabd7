"""Where the stages keep what they make, relative to the project's folder; dvc.yaml names the same places."""

from pathlib import Path

TARGET = Path("models/target")
DRAFTS = Path("models/drafts")
PROMPTS = Path("data/prompts")
TASKS = Path("data/tasks")
REGENERATED = Path("data/regenerated")
HIDDEN_STATES = Path("data/hidden_states")
VOCABULARY = Path("data/vocabulary")
REPORTS = Path("reports")
TRAINING = REPORTS / "training"
MACHINE = REPORTS / "machine.json"
METRICS = REPORTS / "metrics.json"
INPUTS = REPORTS / "inputs.json"  # hashes of the files that params.yaml names
DRAFT_INPUTS = REPORTS / "draft_inputs"  # and of the folders of drafts from elsewhere, a file each
SERVING = REPORTS / "serving.json"  # of experiments/serving.py
BEST = REPORTS / "best_params.yaml"  # of the sweep
TUNED = REPORTS / "tuned.json"  # hashes of what evaluation reads beside: where one changes, it measures again
# Journals and checkpoints of what is under way: they let a killed stage go on, and no stage depends on them.
RUNS = Path("runs")
