"""What a sweep measures with: decoders over one target, whose drafts are loaded when first needed."""

from collections.abc import Sequence
from typing import Any

import torch

from eagle3.decoding.generation import Decoder, Generation
from eagle3.decoding.sampling import Sampling
from eagle3.measure.bench import Bench
from eagle3.tuning.space import Configuration


class WithThreads:
    """A decoder that runs with its own number of threads."""

    def __init__(self, decoder: Decoder, threads: int) -> None:
        self.name = decoder.name
        self._decoder, self._threads = decoder, threads

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Generation:
        """See `Decoder.generate`."""
        torch.set_num_threads(self._threads)
        return self._decoder.generate(prompt_ids, max_new_tokens, sampling)


class Workbench:
    """Makes decoders over one target; the drafts are shared between them."""

    def __init__(self, bench: Bench, vary_threads: bool, batch_size: int = 1) -> None:
        """
        Args:
            vary_threads: whether configurations differ in threads; vanilla keeps the current number.
            batch_size: requests that are decoded together, of vanilla too.
        """
        self.target = bench.target
        self._bench, self._vary_threads, self._batch_size = bench, vary_threads, batch_size
        self._threads = torch.get_num_threads()

    def vanilla(self) -> Decoder:
        """The baseline."""
        return self._threaded(self._bench.vanilla(self._batch_size), 0)

    def decoder(self, configuration: Configuration, name: str = "trial") -> Decoder:
        """The decoder of a configuration."""
        decoder = self._bench.tuned(configuration, name, self._batch_size)
        return self._threaded(decoder, configuration.threads)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """See `Bench.evaluate`."""
        return self._bench.evaluate(*arguments, **options)

    def _threaded(self, decoder: Decoder, threads: int) -> Decoder:
        return WithThreads(decoder, threads or self._threads) if self._vary_threads else decoder
