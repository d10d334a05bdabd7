"""Decoders of the methods in params.yaml, all over one target; a draft that several use is loaded once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3 import paths
from eagle3.config import (
    AdaptiveHeadMethod,
    EvaluateSettings,
    HeadMethod,
    HybridMethod,
    MethodSettings,
    ModelMethod,
    PromptLookupMethod,
    StaticHeadMethod,
)
from eagle3.decoding.adaptive import AdaptiveShape, RoundCosts, measure_costs
from eagle3.decoding.batch import BatchDecoder
from eagle3.decoding.batch_drafter import BatchEagleDrafter
from eagle3.decoding.copies import CopiesDecoder
from eagle3.decoding.drafter import Drafter
from eagle3.decoding.eagle_drafter import EagleDrafter
from eagle3.decoding.engine import SpeculativeDecoder
from eagle3.decoding.generation import Decoder
from eagle3.decoding.hybrid_drafter import HybridDrafter
from eagle3.decoding.independent_drafter import IndependentDrafter
from eagle3.decoding.prompt_lookup import PromptLookupDrafter
from eagle3.decoding.tree import TreeShape
from eagle3.decoding.vanilla import VanillaDecoder
from eagle3.measure.evaluation import code_digest, evaluate
from eagle3.measure.losslessness import target_rescorer
from eagle3.measure.protocol import VANILLA_AGAIN
from eagle3.measure.rendering import ChatRenderer, Prompt
from eagle3.measure.settings import EvaluationSettings
from eagle3.models.checkpoint import load_draft
from eagle3.models.draft import Draft
from eagle3.models.formats import read_family
from eagle3.models.independent import load_independent
from eagle3.models.target import Target
from eagle3.provenance import fingerprint_machine, hash_object, hash_tree, write_json

if TYPE_CHECKING:
    from eagle3.tuning.space import Configuration


def evaluated_target(settings: EvaluateSettings, device: str) -> Target:
    """The prepared target as params.yaml evaluates it; sets the number of threads."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return Target.load(paths.TARGET, getattr(torch, settings.dtype), device)


class Bench:
    """Makes decoders over one target.

    `costs` holds what was measured for adaptive trees, by method, in milliseconds.
    """

    def __init__(
        self, target: Target, drafts: Path, draft_dtype: torch.dtype, costs: Path | None = None
    ) -> None:
        """
        Args:
            drafts: the folder of the drafts' folders.
            draft_dtype: of the drafts' weights, where a decoder does not ask for another.
            costs: keeps the measured costs of adaptive trees, for a run that goes on after a kill.
        """
        self.target = target
        self.costs: dict[str, dict[str, Any]] = (
            json.loads(costs.read_text(encoding="utf-8")) if costs is not None and costs.exists() else {}
        )
        self._folder, self._costs_file = drafts, costs
        self._dtype = self._possible(draft_dtype)
        self._heads: dict[tuple[str, torch.dtype, str], Draft] = {}
        self._models: dict[str, Target] = {}

    def describe(self) -> dict[str, Any]:
        """What decodes, as an evaluation records it."""
        return {"engine": "native"}

    def vanilla(self, batch_size: int = 1) -> Decoder:
        """The baseline; in a batch, copies of one prompt (`decoding.copies`)."""
        if batch_size == 1:
            return VanillaDecoder(self.target)
        return CopiesDecoder(BatchDecoder(self.target, "vanilla", batch_size))

    def decoder(self, method: MethodSettings) -> Decoder:
        """The decoder of one row of the comparison."""
        return SpeculativeDecoder(self.target, self._drafter(method), method.name)

    def tuned(self, configuration: Configuration, name: str, batch_size: int = 1) -> Decoder:
        """The decoder of a configuration that a sweep tries, in batches as those of `vanilla`."""
        dtype = getattr(torch, configuration.draft_dtype)
        head = self.head(configuration.draft, dtype, configuration.backend)
        shape = TreeShape(**configuration.tree, confidence=configuration.confidence)
        if batch_size == 1:
            return SpeculativeDecoder(self.target, EagleDrafter(head, shape), name)
        batch = BatchDecoder(self.target, name, batch_size, BatchEagleDrafter(head, shape))
        return CopiesDecoder(batch, configuration.num_steps)

    def evaluate(
        self,
        decoders: Sequence[Decoder],
        prompts: Sequence[Prompt],
        settings: EvaluationSettings,
        **options: Any,
    ) -> dict[str, Any]:
        """`evaluation.evaluate` with this target's chat template, and its logits for the near-tie check.

        Where vanilla is plain decoding in this process, its A/A arm is a decoder with a cache of its own, as
        every method has: what the place of a cache in memory does to the time is then seen in it.
        """
        renderer = ChatRenderer(self.target.tokenizer, self.target.eos_token_ids)
        plain = any(isinstance(decoder, VanillaDecoder) for decoder in decoders)
        again = VanillaDecoder(self.target, VANILLA_AGAIN) if plain else None
        rescore = target_rescorer(self.target)
        return evaluate(decoders, prompts, renderer, rescore, settings, again=again, **options)

    def families(self, methods: Sequence[MethodSettings]) -> dict[str, str]:
        """The family of every head's draft, as the draft itself tells it: that of an external one is not
        among the settings."""
        return {
            method.draft: read_family(self._folder / method.draft)
            for method in methods
            if isinstance(method, HeadMethod | StaticHeadMethod)
        }

    def head(self, name: str, dtype: torch.dtype | None = None, backend: str = "kernels") -> Draft:
        """A trained head; see `HeadMethod` for `backend`.

        Raises:
            ValueError: for plain torch beside CPU kernels whose activations have another dtype.
        """
        plain = backend != "kernels"
        if plain and self.target.activation_dtype != self.target.dtype:
            raise ValueError(
                f"backend {backend!r} drafts in plain torch, which cannot mix the float32 activations of the "
                f"CPU kernels with weights in {self.target.dtype}; set evaluate.dtype to float32"
            )
        dtype = self.target.dtype if plain else self._possible(dtype or self._dtype)
        key = name, dtype, backend
        if key not in self._heads:
            draft = load_draft(self._folder / name, self.target, weights=dtype, compiled=not plain)
            if backend == "compile":
                draft.forward = torch.compile(draft.forward, dynamic=True)  # type: ignore[method-assign]
            self._heads[key] = draft
        return self._heads[key]

    def _drafter(self, method: MethodSettings) -> Drafter:
        if isinstance(method, PromptLookupMethod):
            return PromptLookupDrafter(
                method.num_steps, max_ngram=method.max_ngram, min_ngram=method.min_ngram
            )
        if isinstance(method, ModelMethod):
            if method.draft not in self._models:
                folder = self._folder / method.draft
                self._models[method.draft] = load_independent(folder, self._dtype, self.target.device)
            return IndependentDrafter(self._models[method.draft], self.target, method.num_steps)
        if isinstance(method, HeadMethod):
            return EagleDrafter(self.head(method.draft, backend=method.backend), method.tree.shape)
        if isinstance(method, StaticHeadMethod):
            return EagleDrafter(self.head(method.draft, backend=method.backend), method.tree)
        head = self.head(method.draft)
        if isinstance(method, HybridMethod):
            shape = self._adaptive(method, head) if method.adaptive else method.tree.shape
            return HybridDrafter(
                EagleDrafter(head, shape),
                method.num_steps,
                max_ngram=method.max_ngram,
                min_ngram=method.min_ngram,
            )
        assert isinstance(method, AdaptiveHeadMethod)
        return EagleDrafter(head, self._adaptive(method, head))

    def _adaptive(self, method: AdaptiveHeadMethod | HybridMethod, head: Draft) -> AdaptiveShape:
        """The shape of an adaptive tree, from costs measured now or by the run that this one goes on with."""
        key = hash_object(
            [
                method.model_dump(mode="json"),
                hash_tree(self._folder / method.draft),
                *(str(part) for part in (self.target.dtype, self._dtype, self.target.device)),
                torch.get_num_threads(),
                (self.target.num_layers, self.target.hidden_size, self.target.vocab_size),
                code_digest(),
                fingerprint_machine(),
            ]
        )
        kept = self.costs.get(method.name)
        if kept is None or kept["key"] != key:
            measured = measure_costs(self.target, head, method.tree.shape)
            self.costs[method.name] = {"key": key, **measured.as_milliseconds()}
            if self._costs_file is not None:
                write_json(self._costs_file, self.costs)
        costs = RoundCosts.from_milliseconds(self.costs[method.name])
        return AdaptiveShape(method.tree.shape, costs)

    def _possible(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype, or the target's where plain torch computes, which does not mix dtypes; says so."""
        if self.target.kernels == "compiled" or dtype == self.target.dtype:
            return dtype
        print(f"drafts are held in {self.target.dtype}, not {dtype}: only the CPU kernels mix dtypes")
        return self.target.dtype


def rivals(methods: Sequence[MethodSettings], families: Mapping[str, str]) -> list[tuple[str, str]]:
    """(method, other method): what a method has to win against.

    A tree that adapts, or copies, has to win against the same draft with a fixed tree; a hybrid that adapts
    against a hybrid that does not, too; and an EAGLE-3 head's dynamic tree against EAGLE's heads and
    independent models.

    Args:
        families: of the heads' drafts (`Bench.families`).
    """

    def has_to_win(method: MethodSettings, other: MethodSettings) -> bool:
        if isinstance(method, AdaptiveHeadMethod | HybridMethod):
            return _fixes_tree(other, method)
        return (
            isinstance(method, HeadMethod)
            and (families.get(method.draft), method.backend) == ("eagle3", "kernels")
            and method.tree.topk > 1
            and _precedes_eagle3(other, families)
        )

    return [(method.name, other.name) for method in methods for other in methods if has_to_win(method, other)]


def _fixes_tree(other: MethodSettings, method: AdaptiveHeadMethod | HybridMethod) -> bool:
    """Whether it is the method without what the method adds."""
    if isinstance(other, HeadMethod):
        return (other.draft, other.backend) == (method.draft, "kernels")
    if isinstance(other, HybridMethod) and isinstance(method, HybridMethod):
        return method.adaptive and not other.adaptive and other.draft == method.draft
    return False


def _precedes_eagle3(other: MethodSettings, families: Mapping[str, str]) -> bool:
    """Whether it is speculative sampling, or a head of EAGLE or EAGLE-2 computed by the kernels."""
    if isinstance(other, HeadMethod | StaticHeadMethod):
        return (families.get(other.draft), other.backend) == ("eagle", "kernels")
    return isinstance(other, ModelMethod)


def describe_drafting(method: MethodSettings) -> dict[str, int]:
    """What a method drafts, as the reports show it: the tree in SGLang's names, or the chain's length."""
    if isinstance(method, PromptLookupMethod | ModelMethod):
        return {"num_steps": method.num_steps}
    if isinstance(method, StaticHeadMethod):
        return {"static_nodes": method.tree.max_nodes}
    tree = dict(method.tree.model_dump())
    if isinstance(method, AdaptiveHeadMethod) or (isinstance(method, HybridMethod) and method.adaptive):
        tree["adaptive"] = 1
    return {**tree, "copied": method.num_steps} if isinstance(method, HybridMethod) else tree
