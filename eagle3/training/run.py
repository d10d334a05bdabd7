"""One training from data on disk to a stored draft: what the training stage and the studies share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3 import paths
from eagle3.config import EagleSettings, IndependentSettings, Settings, TrainedSettings, TrainSettings
from eagle3.data.hidden_states import OnlineStates, RowStates
from eagle3.data.rows import MANIFEST, HiddenStates, Row, read_rows
from eagle3.data.vocabulary import DraftVocabulary, hash_tokenizer, load_vocabulary
from eagle3.models.checkpoint import save_draft
from eagle3.models.draft import DraftConfig
from eagle3.models.eagle import EagleModule
from eagle3.models.eagle3 import Eagle3Module
from eagle3.models.independent import IndependentModule, save_independent
from eagle3.models.target import Target
from eagle3.provenance import hash_tree
from eagle3.training.batches import Batch, make_batch, plan_batches
from eagle3.training.independent import IndependentObjective
from eagle3.training.objective import Eagle3Objective, EagleObjective, Objective
from eagle3.training.parallel import ALONE, Processes
from eagle3.training.start import start_eagle, start_eagle3, state_scale
from eagle3.training.trainer import Trainer, TrainingResult, describe

# Tokens that the linear start of a draft is solved from.
START_TOKENS = 32768


@dataclass(frozen=True)
class TrainingData:
    """What every draft of a target is trained on; `identity` names it in resume keys and manifests."""

    target: Target
    device: str  # where drafts are trained
    vocabulary: DraftVocabulary
    rows: Sequence[Row]
    states: Callable[[Row], RowStates]
    identity: dict[str, Any]

    @classmethod
    def load(cls, settings: Settings, device: str) -> TrainingData:
        """The regenerated rows and their vocabulary; what the target makes of a row is stored or computed.

        Raises:
            ValueError: if rows, vocabulary or target are missing, or do not belong together.
        """
        rows = read_rows(paths.REGENERATED)
        target = Target.load(paths.TARGET, compiled=False)
        manifest = json.loads((paths.REGENERATED / MANIFEST).read_text(encoding="utf-8"))
        vocabulary = load_vocabulary(
            paths.VOCABULARY, hash_tokenizer(target.tokenizer), manifest["data_hash"]
        )
        identity = {
            "target": hash_tree(paths.TARGET),
            "tokenizer": vocabulary.tokenizer_hash,
            "data": manifest["data_hash"],
            "vocabulary": hash_tree(paths.VOCABULARY),
        }
        if settings.train.hidden_states == "captured":
            captured = HiddenStates(paths.HIDDEN_STATES)

            def stored(row: Row) -> RowStates:
                return RowStates(captured[row.id], torch.tensor(row.target_argmax))

            return cls(target, device, vocabulary, rows, stored, identity)
        online = OnlineStates(Target.load(paths.TARGET, getattr(torch, settings.regenerate.dtype), device))
        return cls(target, device, vocabulary, rows, online, identity)


def build_objective(data: TrainingData, draft: TrainedSettings, train: TrainSettings, seed: int) -> Objective:
    """A draft at its start, solved on the CPU, and what it is trained for, on the device of the training."""
    target, device = data.target, data.device
    vocabulary = data.vocabulary.draft_to_target().to(device)
    embedding, head = target.embed_weight.to(device), target.lm_head_weight.to(device)
    if isinstance(draft, IndependentSettings):
        small = IndependentModule(target, draft.layers).to(device)
        return IndependentObjective(small, embedding, head, vocabulary, train.prompt_loss)
    batches, kv_heads = _start_batches(data), draft.num_key_value_heads
    if isinstance(draft, EagleSettings):
        eagle = EagleModule(DraftConfig.for_target(target, draft.family, num_key_value_heads=kv_heads))
        start_eagle(eagle, target, batches, seed)
        return EagleObjective(eagle.to(device), embedding, head, vocabulary, draft, train.prompt_loss)
    config = DraftConfig.for_target(
        target,
        draft.family,
        data.vocabulary.size,
        kv_heads,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        fused=draft.fused,
    )
    eagle3 = Eagle3Module(config)
    eagle3.set_vocabulary(data.vocabulary.draft_to_target())
    scale = state_scale(eagle3, batches)
    start_eagle3(eagle3, target, batches, scale, seed)
    return Eagle3Objective(eagle3.to(device), embedding, head, draft, train.prompt_loss, scale.to(device))


def train_draft(
    data: TrainingData,
    draft: TrainedSettings,
    train: TrainSettings,
    seed: int,
    identity: dict[str, Any],
    work: Path,
    out: Path,
    log: Callable[[dict[str, float], int], None],
    processes: Processes = ALONE,
) -> TrainingResult:
    """Train one draft and store it in `out`; a killed training goes on from its checkpoint in `work`.

    Args:
        identity: what the result depends on beside `data.identity`, `draft` and `train`: the code.
        log: called with every measurement and its step.
        processes: that train together; the first of them stores the draft.
    """
    known = {"draft": draft.model_dump(mode="json"), **data.identity, **identity}
    objective = build_objective(data, draft, train, seed)
    hidden_size = data.target.hidden_size
    trainer = Trainer(
        objective, train, data.rows, data.states, hidden_size, seed, work, known, log, processes
    )
    result = trainer.run()
    if not processes.first:
        return result
    manifest = {
        **known,
        "train": train.model_dump(mode="json"),
        "seed": seed,
        "result": describe(result),
    }
    module = objective.module.cpu()
    if isinstance(module, IndependentModule):
        save_independent(out, module, data.target, manifest)
    else:
        assert isinstance(module, Eagle3Module | EagleModule)
        save_draft(out, module, data.target, manifest)
    return result


def _start_batches(data: TrainingData) -> list[Batch]:
    """Training rows of about START_TOKENS tokens, the same for every draft."""
    train = [row for row in data.rows if row.split == "train"]
    chosen: list[Batch] = []
    tokens = 0
    for batch in plan_batches([len(row.token_ids) for row in train], 4096, "start"):
        if tokens < START_TOKENS:
            chosen.append(make_batch([train[index] for index in batch], data.states, data.target.hidden_size))
            tokens += chosen[-1].tokens
    return chosen
