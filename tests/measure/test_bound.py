"""The bound: weights are counted once, tied or not."""

import pytest

from eagle3.measure.bound import measure_bound
from eagle3.models.target import Target
from tests.tiny import tiny_llama, tiny_tokenizer

# Per layer: q and o 32 x 32, k and v 16 x 32, gate, up and down 64 x 32.
LAYER = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_forward(tied: bool) -> None:
    target = Target(tiny_llama(layers=8, tied=tied), tiny_tokenizer())
    bound = measure_bound(target)
    weights = 8 * LAYER + 320 * 32
    assert bound["weights_mb"] == pytest.approx(weights * 4 / 1e6)
    assert bound["read_ms"] == pytest.approx(bound["weights_mb"] / bound["bandwidth_gb_s"])
    assert bound["arithmetic_ms_per_token"] == pytest.approx(
        2 * weights / (bound["arithmetic_gflop_s"] * 1e6)
    )
