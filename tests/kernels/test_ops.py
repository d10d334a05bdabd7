"""The compiled kernels: right to float32 rounding, and each row as if it were computed alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle3.decoding.cache import KVCache
from eagle3.kernels.ops import CompiledOps, Ops, TorchOps, quantise

EPSILON = torch.finfo(torch.float32).eps
MASKS = ["causal", "tree", "tree a row", "last slots", "last slots a row"]


@pytest.fixture(scope="module")
def compiled() -> CompiledOps:
    return CompiledOps()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- linear ---


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 48), (17, 33), (1, 1), (7, 16), (300, 15)])
def test_linear_is_within_rounding_of_float64(
    compiled: CompiledOps, inputs: int, outputs: int, dtype: torch.dtype, bias: bool
) -> None:
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(2, 5, inputs)
    offset = torch.randn(outputs) if bias else None
    result = compiled.linear(weight, offset)(x)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    # The classic bound of a sum of K products in any order, with the bias as one more term.
    magnitude = x.double().abs() @ weight.double().abs().T + (0 if offset is None else offset.double().abs())
    assert result.shape == (2, 5, outputs)
    assert result.dtype == torch.float32
    assert bool(((result.double() - exact).abs() <= (inputs + 2) * EPSILON * magnitude).all())


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_linear_keeps_its_weights_and_bias_alive(compiled: CompiledOps, held: torch.dtype) -> None:
    """The kernel is given addresses: the memory behind them must outlive the caller's tensors."""
    x = torch.randn(3, 64)
    layers = [
        compiled.linear(torch.full((64, 64), float(i)), torch.full((64,), 0.5), held) for i in range(20)
    ]
    for i, layer in enumerate(layers):
        torch.testing.assert_close(layer(x), i * x.sum(-1, keepdim=True).expand(3, 64) + 0.5)


def test_linear_reads_strided_inputs(compiled: CompiledOps) -> None:
    weight, x = torch.randn(24, 16), torch.randn(4, 32)
    torch.testing.assert_close(compiled.linear(weight)(x[:, ::2]), x[:, ::2] @ weight.T)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 48), (17, 33), (1, 1), (7, 16), (300, 15), (576, 16)])
def test_linear_in_int8_is_that_of_the_rounded_weights(
    compiled: CompiledOps, inputs: int, outputs: int, bias: bool
) -> None:
    weight, x = torch.randn(outputs, inputs), torch.randn(2, 9, inputs)
    offset = torch.randn(outputs) if bias else None
    steps, scales = quantise(weight)
    rounded = steps.double() * scales.double()[:, None]
    exact = x.double() @ rounded.T + (0 if offset is None else offset.double())
    magnitude = x.double().abs() @ rounded.abs().T + (0 if offset is None else offset.double().abs())
    result = compiled.linear(weight, offset, torch.int8)(x)
    assert bool(((result.double() - exact).abs() <= (inputs + 4) * EPSILON * magnitude).all())


def test_rounding_moves_no_weight_by_more_than_half_a_step() -> None:
    weight = torch.cat((torch.randn(5, 40) * torch.logspace(-4, 4, 5)[:, None], torch.zeros(1, 40)))
    steps, scales = quantise(weight)
    assert steps.dtype == torch.int8
    assert steps.abs().amax(dim=1).tolist() == [127] * 5 + [0], (
        "every level is used; a row of zeros stays one"
    )
    assert bool(((steps * scales[:, None] - weight).abs() <= scales[:, None] * 0.5001).all())
    worked, scale = quantise(torch.tensor([[0.5, -1.27, 0.004]]))
    assert worked.tolist() == [[50, -127, 0]]
    assert scale.item() == pytest.approx(0.01)


def test_float16_weights_are_read_as_float32(compiled: CompiledOps) -> None:
    weight, x = torch.randn(24, 16).half(), torch.randn(3, 16)
    torch.testing.assert_close(compiled.linear(weight)(x), x @ weight.float().T)


# --- norm and activation ---


@pytest.mark.parametrize("width", [8, 32, 5, 37, 1])
def test_rms_norm_is_within_rounding_of_float64(compiled: CompiledOps, width: int) -> None:
    x, weight = torch.randn(3, 11, width) * 10, torch.randn(width)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = compiled.rms_norm(x, weight, 1e-5)
    assert bool(((result.double() - exact).abs() <= (width + 8) * EPSILON * exact.abs()).all())


@pytest.mark.parametrize("width", [8, 64, 5, 37, 1])
def test_swiglu_is_within_rounding_of_float64(compiled: CompiledOps, width: int) -> None:
    """Also where the width is no multiple of the vector length: a store beyond a row hits its neighbour."""
    x = torch.randn(9, 2 * width) * 4
    gate, up = x.double().chunk(2, dim=-1)
    exact = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(compiled.swiglu(x).double(), exact, rtol=2e-6, atol=1e-9)


def test_swiglu_of_extreme_gates(compiled: CompiledOps) -> None:
    """silu(-100) is zero, not -100: an exponential that overflows its exponent bits says otherwise."""
    gates = torch.tensor([-1e4, -200.0, -100.0, -89.0, -88.0, -87.0, 0.0, 88.0, 100.0, 1e4, -3.0, 3.0])
    x = torch.cat((gates, torch.ones(len(gates))))[None]
    exact = (gates.double() * torch.sigmoid(gates.double()))[None]
    torch.testing.assert_close(compiled.swiglu(x).double(), exact, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_visible(compiled: CompiledOps, bad: float) -> None:
    """A NaN that a kernel turned into a number would hide a broken model."""
    x = torch.ones(2, 16)
    x[1, 3] = bad
    assert not compiled.swiglu(x)[1].isfinite().all()
    assert not compiled.rms_norm(x, torch.ones(16), 1e-5)[1].isfinite().all()
    assert not compiled.linear(torch.ones(4, 16))(x)[1].isfinite().all()
    assert compiled.linear(torch.ones(4, 16))(x)[0].isfinite().all()


# --- attention ---


def attention_case(
    lengths: list[int], count: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 16
) -> tuple[KVCache, Tensor, Tensor, Tensor]:
    """A cache filled to `lengths`, and qkv, cos and sin of `count` new tokens a row."""
    cache = KVCache(2, len(lengths), kv_heads, max(lengths) + count + 3, head_dim, torch.float32, "cpu")
    cache.keys.normal_()
    cache.values.normal_()
    cache.lengths = list(lengths)
    qkv = torch.randn(len(lengths), count, (heads + 2 * kv_heads) * head_dim)
    angles = torch.randn(len(lengths), count, head_dim // 2).repeat(1, 1, 2)
    return cache, qkv, angles.cos(), angles.sin()


def tree_mask(kind: str, lengths: list[int], count: int) -> Tensor | None:
    """Random ancestors for each token, itself always among them; "last slots" over some slots in use too."""
    if kind == "causal":
        return None
    earlier = min(3, *lengths, 99) if kind.startswith("last") else 0
    shape = (len(lengths), count, earlier + count) if kind.endswith("a row") else (count, earlier + count)
    own = torch.eye(count, dtype=torch.bool)
    mask = torch.rand(shape) < 0.5
    mask[..., earlier:] = mask[..., earlier:].tril() | own
    return mask


def copy_of(cache: KVCache) -> KVCache:
    _, batch, kv_heads, capacity, head_dim = cache.keys.shape
    other = KVCache(2, batch, kv_heads, capacity, head_dim, torch.float32, "cpu")
    other.keys.copy_(cache.keys)
    other.values.copy_(cache.values)
    other.lengths = list(cache.lengths)
    return other


def reference_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: KVCache,
    layer: int,
    mask: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
    heads: int,
) -> Tensor:
    """Attention in float64, one token and head after the other."""
    batch, count, _ = qkv.shape
    kv_heads, head_dim = cache.keys.shape[2], cache.keys.shape[4]
    half = head_dim // 2

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None or norms is None:
            return x
        return x / (x.square().mean() + norms[2]).sqrt() * weight.double()

    def rotated(x: Tensor, b: int, t: int) -> Tensor:
        turned = torch.cat((-x[half:], x[:half]))
        return x * cos[b, t].double() + turned * sin[b, t].double()

    split = qkv.double().view(batch, count, heads + 2 * kv_heads, head_dim)
    out = torch.zeros(batch, count, heads, head_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            past = cache.lengths[b]
            keys = [cache.keys[layer, b, kv, j].double() for j in range(past)]
            values = [cache.values[layer, b, kv, j].double() for j in range(past)]
            for t in range(count):
                key = normed(split[b, t, heads + kv], norms[1] if norms else None)
                keys.append(rotated(key, b, t))
                values.append(split[b, t, heads + kv_heads + kv])
            for t in range(count):
                query = rotated(normed(split[b, t, h], norms[0] if norms else None), b, t)
                rows = mask if mask is None or mask.dim() == 2 else mask[b]
                total = past + count
                if rows is None:
                    seen = list(range(past + t + 1))
                else:
                    first = total - rows.shape[1]  # the slot of the mask's first column
                    seen = [j for j in range(total) if j < first or bool(rows[t, j - first])]
                scores = torch.stack([query @ keys[j] for j in seen]) * head_dim**-0.5
                out[b, t, h] = scores.softmax(0) @ torch.stack([values[j] for j in seen])
    return out.view(batch, count, heads * head_dim)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "q and k norms"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("lengths", "count", "heads", "kv_heads", "head_dim"),
    [
        ([0], 5, 4, 2, 16),
        ([13], 1, 4, 2, 16),
        ([13], 6, 4, 4, 8),
        ([9, 9], 3, 6, 2, 40),
        ([4, 0, 17], 5, 4, 1, 16),
        ([3, 8], 4, 4, 2, 12),
        ([3, 8], 4, 2, 2, 6),
    ],
)
@pytest.mark.parametrize("name", ["compiled", "torch"])
def test_attention_equals_a_float64_loop(
    name: str,
    lengths: list[int],
    count: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kind: str,
    normed: bool,
) -> None:
    ops: Ops = CompiledOps() if name == "compiled" else TorchOps()
    cache, qkv, cos, sin = attention_case(lengths, count, heads, kv_heads, head_dim)
    mask = tree_mask(kind, lengths, count)
    norms = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5, 1e-6) if normed else None
    exact = reference_attention(qkv, cos, sin, copy_of(cache), 1, mask, norms, heads)
    result = ops.attention(qkv, cos, sin, cache, 1, mask, norms, heads)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=2e-6)
    assert cache.lengths == lengths  # the caller advances, once a forward


@pytest.mark.parametrize("kind", MASKS)
def test_attention_of_both_implementations_appends_the_same_keys_and_values(
    compiled: CompiledOps, kind: str
) -> None:
    cache, qkv, cos, sin = attention_case([4, 0, 17], 5)
    other, mask = copy_of(cache), tree_mask(kind, [4, 0, 17], 5)
    compiled.attention(qkv, cos, sin, cache, 1, mask, None, 4)
    TorchOps().attention(qkv, cos, sin, other, 1, mask, None, 4)
    torch.testing.assert_close(cache.keys, other.keys, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache.values, other.values, rtol=0, atol=0)


def test_attention_with_large_scores_does_not_overflow(compiled: CompiledOps) -> None:
    cache, qkv, cos, sin = attention_case([12], 3)
    qkv = qkv * 100
    exact = reference_attention(qkv, cos, sin, copy_of(cache), 0, None, None, 4)
    result = compiled.attention(qkv, cos, sin, cache, 0, None, None, 4)
    torch.testing.assert_close(result.double(), exact, rtol=1e-3, atol=1e-3)


def test_attention_beyond_the_capacity_is_refused_before_anything_is_written(compiled: CompiledOps) -> None:
    cache, qkv, cos, sin = attention_case([12, 3], 4)
    cache.lengths = [cache.capacity - 3, 3]
    before = cache.keys.clone()
    with pytest.raises(ValueError, match="slots needed"):
        compiled.attention(qkv, cos, sin, cache, 0, None, None, 4)
    assert torch.equal(cache.keys, before)


# --- row independence: bit for bit ---


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 13, 16])
def test_rows_of_linear_are_bitwise_those_of_single_rows(
    compiled: CompiledOps, rows: int, held: torch.dtype
) -> None:
    layer = compiled.linear(torch.randn(77, 131), torch.randn(77), held)
    x = torch.randn(rows, 131)
    single = torch.cat([layer(x[i : i + 1]) for i in range(rows)])
    assert torch.equal(layer(x), single)


ROWWISE: dict[str, Callable[[CompiledOps, Tensor], Tensor]] = {
    "rms_norm": lambda ops, x: ops.rms_norm(x, torch.linspace(0.5, 2, x.shape[-1]), 1e-5),
    "swiglu": lambda ops, x: ops.swiglu(x),
}


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("width", [64, 38])
def test_rows_of_norm_and_activation_are_bitwise_those_of_single_rows(
    compiled: CompiledOps, name: str, width: int
) -> None:
    x = torch.randn(16, width)
    single = torch.cat([ROWWISE[name](compiled, x[i : i + 1]) for i in range(len(x))])
    assert torch.equal(ROWWISE[name](compiled, x), single)


def test_16_tokens_of_attention_are_bitwise_16_single_steps(compiled: CompiledOps) -> None:
    cache, qkv, cos, sin = attention_case([9], 16)
    stepwise = copy_of(cache)
    together = compiled.attention(qkv, cos, sin, cache, 0, None, None, 4)
    for t in range(16):
        x, cos_t, sin_t = (part[:, t : t + 1].contiguous() for part in (qkv, cos, sin))
        alone = compiled.attention(x, cos_t, sin_t, stepwise, 0, None, None, 4)
        stepwise.advance(1)
        assert torch.equal(alone[:, 0], together[:, t])
    assert torch.equal(stepwise.keys, cache.keys)


def test_a_tree_node_is_bitwise_its_own_path_decoded_alone(compiled: CompiledOps) -> None:
    """What makes speculative decoding exact: siblings beside a node change nothing about it."""
    cache, qkv, cos, sin = attention_case([9], 6)
    parents = [-1, 0, 0, 1, 1, 2]
    mask = torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    before = copy_of(cache)
    together = compiled.attention(qkv, cos, sin, cache, 0, mask, None, 4)
    for node in range(6):
        path = mask[node].nonzero().flatten()
        x, cos_p, sin_p = (part[:, path].contiguous() for part in (qkv, cos, sin))
        alone = compiled.attention(x, cos_p, sin_p, copy_of(before), 0, None, None, 4)
        assert torch.equal(alone[0, -1], together[0, node])


@pytest.mark.parametrize("kind", MASKS)
def test_8_rows_of_attention_are_bitwise_8_single_rows(compiled: CompiledOps, kind: str) -> None:
    lengths = [3, 30, 7, 7, 2, 16, 15, 23]
    cache, qkv, cos, sin = attention_case(lengths, 4)
    mask, before = tree_mask(kind, lengths, 4), copy_of(cache)
    together = compiled.attention(qkv, cos, sin, cache, 1, mask, None, 4)
    for row in range(8):
        one = slice(row, row + 1)
        own_mask = mask if mask is None or mask.dim() == 2 else mask[one]
        alone = compiled.attention(
            qkv[one], cos[one], sin[one], before.rows(row, row + 1), 1, own_mask, None, 4
        )
        assert torch.equal(alone[0], together[row])


def test_unused_slots_do_not_enter(compiled: CompiledOps) -> None:
    """Slots behind a row's length hold what rejected drafts left there."""
    cache, qkv, cos, sin = attention_case([5, 11], 3)
    other = copy_of(cache)
    for row, length in enumerate(cache.lengths):
        other.keys[:, row, :, length:] = 1e9
        other.values[:, row, :, length:] = -1e9
    assert torch.equal(
        compiled.attention(qkv, cos, sin, cache, 0, None, None, 4),
        compiled.attention(qkv, cos, sin, other, 0, None, None, 4),
    )
