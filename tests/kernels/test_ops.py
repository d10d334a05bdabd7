"""The compiled kernels: right to float32 rounding, and each row as if it were computed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3.decoding.cache import KVCache
from eagle3.kernels import AttentionWeights, Norm, Ops
from eagle3.kernels.compiled_ops import CompiledOps, pack, quantise
from eagle3.kernels.torch_ops import TorchOps

EPSILON = torch.finfo(torch.float32).eps
MASKS = ["causal", "tree", "tree a row", "last slots", "last slots a row"]


@pytest.fixture(scope="module")
def compiled() -> CompiledOps:
    return CompiledOps()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def multiplies_bfloat16(ops: CompiledOps) -> bool:
    """Whether this processor multiplies pairs of bfloat16: then the kernels round activations as well."""
    layer = ops.linear(torch.tensor([[1.0]], dtype=torch.bfloat16))
    return layer(torch.tensor([[1 + 2**-12]])).item() == 1.0


# --- linear ---


def test_packing_puts_16_outputs_and_neighbouring_inputs_side_by_side() -> None:
    weight = torch.arange(18 * 3).reshape(18, 3)
    packed = pack(weight, 2)
    assert packed.shape == (2, 2, 16, 2)
    assert packed[0, 0, 5].tolist() == weight[5, :2].tolist()
    assert packed[1, 1, 1].tolist() == [weight[17, 2], 0]
    assert packed[1, :, 2:].sum() == 0


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 48), (17, 33), (1, 1), (7, 16), (300, 15)])
def test_linear_is_within_rounding_of_float64(
    compiled: CompiledOps, inputs: int, outputs: int, dtype: torch.dtype, bias: bool
) -> None:
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(2, 5, inputs)
    offset = torch.randn(outputs) if bias else None
    result = compiled.linear(weight, offset)(x)
    if dtype == torch.bfloat16 and multiplies_bfloat16(compiled):
        x = x.bfloat16().float()
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    # The classic bound of a sum of K products in any order, with the bias as one more term.
    magnitude = x.double().abs() @ weight.double().abs().T + (0 if offset is None else offset.double().abs())
    assert result.shape == (2, 5, outputs)
    assert result.dtype == torch.float32
    assert bool(((result.double() - exact).abs() <= (inputs + 2) * EPSILON * magnitude).all())


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_linear_keeps_its_weights_and_bias_alive(compiled: CompiledOps, held: torch.dtype) -> None:
    """The kernel is given addresses: the memory behind them must outlive the caller's tensors."""
    x = torch.randn(3, 64).bfloat16().float()  # the kernels may round them to that beside such weights
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


# --- norm and feed-forward ---


@pytest.mark.parametrize("width", [8, 32, 5, 37, 1])
def test_rms_norm_is_within_rounding_of_float64(compiled: CompiledOps, width: int) -> None:
    x, weight = torch.randn(3, 11, width) * 10, torch.randn(width)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = compiled.rms_norm(x, Norm(weight, 1e-5))
    assert bool(((result.double() - exact).abs() <= (width + 8) * EPSILON * exact.abs()).all())


def feed_forward(ops: Ops, gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) * ups of equal shapes [M, I], by the feed-forward half of a layer.

    Row m of the input is 1 at dimension m and 0 elsewhere. The norm's weight makes a 1 of it again, so that
    the columns of the gate and up weights are `gates` and `ups`. `down` writes to other dimensions.
    """
    count, width = gates.shape
    size = count + width
    x = torch.zeros(count, size)
    x[:, :count] = torch.eye(count)
    gate_up = torch.zeros(2 * width, size)
    gate_up[:width, :count], gate_up[width:, :count] = gates.T, ups.T
    down = torch.zeros(size, width)
    down[count:] = torch.eye(width)
    norm = Norm(torch.full((size,), size**-0.5), 0.0)
    result = ops.feed_forward(norm, ops.linear(gate_up), ops.linear(down))(x)
    assert torch.equal(result[:, :count], x[:, :count])
    return result[:, count:]


@pytest.mark.parametrize("name", ["compiled", "torch"])
@pytest.mark.parametrize("width", [8, 64, 5, 37, 1])
def test_feed_forward_is_within_rounding_of_float64(name: str, width: int) -> None:
    """Also where the width is no multiple of the vector length: a store beyond a row hits its neighbour."""
    ops: Ops = CompiledOps() if name == "compiled" else TorchOps()
    gates, ups = torch.randn(2, 9, width) * 4
    exact = gates.double() * torch.sigmoid(gates.double()) * ups
    torch.testing.assert_close(feed_forward(ops, gates, ups).double(), exact, rtol=2e-6, atol=1e-9)


def test_feed_forward_of_extreme_gates(compiled: CompiledOps) -> None:
    """silu(-100) is zero, not -100: an exponential that overflows its exponent bits says otherwise."""
    gates = torch.tensor([-1e4, -200.0, -100.0, -89.0, -88.0, -87.0, 0.0, 88.0, 100.0, 1e4, -3.0, 3.0])[None]
    exact = gates.double() * torch.sigmoid(gates.double())
    result = feed_forward(compiled, gates, torch.ones_like(gates))
    torch.testing.assert_close(result.double(), exact, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_visible(compiled: CompiledOps, bad: float) -> None:
    """A NaN that a kernel turned into a number would hide a broken model."""
    x = torch.ones(2, 16)
    x[1, 3] = bad
    norm = Norm(torch.ones(16), 1e-5)
    layer = compiled.feed_forward(
        norm, compiled.linear(torch.ones(8, 16)), compiled.linear(torch.ones(16, 4))
    )
    assert not layer(x)[1].isfinite().all()
    assert layer(x)[0].isfinite().all()
    assert not compiled.rms_norm(x, norm)[1].isfinite().all()
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


def attention(
    ops: Ops,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: KVCache,
    layer: int,
    mask: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
    heads: int,
) -> Tensor:
    """Attention alone: the half of a layer whose projections hand on what they are given."""
    kv_heads, head_dim = cache.keys.shape[2], cache.keys.shape[4]
    weights = AttentionWeights(
        ops.linear(torch.eye(qkv.shape[-1])),
        ops.linear(torch.eye(heads * head_dim)),
        heads,
        kv_heads,
        head_dim,
        query_norm=None if norms is None else Norm(norms[0], norms[2]),
        key_norm=None if norms is None else Norm(norms[1], norms[2]),
    )
    residual = torch.zeros(*qkv.shape[:2], heads * head_dim)
    return ops.attention(weights)(qkv, residual, (cos, sin), cache, layer, mask)


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
    result = attention(ops, qkv, cos, sin, cache, 1, mask, norms, heads)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=2e-6)
    assert cache.lengths == lengths  # the caller advances, once a forward


@pytest.mark.parametrize("kind", MASKS)
def test_attention_of_both_implementations_appends_the_same_keys_and_values(
    compiled: CompiledOps, kind: str
) -> None:
    cache, qkv, cos, sin = attention_case([4, 0, 17], 5)
    other, mask = copy_of(cache), tree_mask(kind, [4, 0, 17], 5)
    attention(compiled, qkv, cos, sin, cache, 1, mask, None, 4)
    attention(TorchOps(), qkv, cos, sin, other, 1, mask, None, 4)
    torch.testing.assert_close(cache.keys, other.keys, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache.values, other.values, rtol=0, atol=0)


def test_attention_with_large_scores_does_not_overflow(compiled: CompiledOps) -> None:
    cache, qkv, cos, sin = attention_case([12], 3)
    qkv = qkv * 100
    exact = reference_attention(qkv, cos, sin, copy_of(cache), 0, None, None, 4)
    result = attention(compiled, qkv, cos, sin, cache, 0, None, None, 4)
    torch.testing.assert_close(result.double(), exact, rtol=1e-3, atol=1e-3)


def test_attention_beyond_the_capacity_is_refused_before_anything_is_written(compiled: CompiledOps) -> None:
    cache, qkv, cos, sin = attention_case([12, 3], 4)
    cache.lengths = [cache.capacity - 3, 3]
    before = cache.keys.clone()
    with pytest.raises(ValueError, match="slots needed"):
        attention(compiled, qkv, cos, sin, cache, 0, None, None, 4)
    assert torch.equal(cache.keys, before)


# --- row independence: bit for bit ---


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 12, 13, 16, 25])
def test_rows_of_linear_are_bitwise_those_of_single_rows(
    compiled: CompiledOps, rows: int, held: torch.dtype
) -> None:
    layer = compiled.linear(torch.randn(77, 131), torch.randn(77), held)
    x = torch.randn(rows, 131)
    single = torch.cat([layer(x[i : i + 1]) for i in range(rows)])
    assert torch.equal(layer(x), single)


def test_norm_and_feed_forward_of_a_row_are_bitwise_those_of_the_row_alone(compiled: CompiledOps) -> None:
    x, norm = torch.randn(16, 38), Norm(torch.linspace(0.5, 2, 38), 1e-5)
    layer = compiled.feed_forward(
        norm, compiled.linear(torch.randn(2 * 21, 38)), compiled.linear(torch.randn(38, 21))
    )
    rows = [x[i : i + 1] for i in range(len(x))]
    assert torch.equal(layer(x), torch.cat([layer(row) for row in rows]))
    normed = torch.cat([compiled.rms_norm(row, norm) for row in rows])
    assert torch.equal(compiled.rms_norm(x, norm), normed)


def test_a_layer_is_bitwise_its_parts_one_after_the_other(compiled: CompiledOps) -> None:
    """Input norm, projections, attention and residual in one call, against a call for each."""
    cache, _, cos, sin = attention_case([9, 4], 5)
    stepwise = copy_of(cache)
    qkv = compiled.linear(torch.randn(8 * 16, 40), torch.randn(8 * 16))
    output = compiled.linear(torch.randn(24, 64))
    norm = Norm(torch.rand(40) + 0.5, 1e-5)
    x, residual = torch.randn(2, 5, 40), torch.randn(2, 5, 24)
    whole = compiled.attention(AttentionWeights(qkv, output, 4, 2, 16, norm=norm))
    projected = qkv(compiled.rms_norm(x, norm))
    attended = attention(compiled, projected, cos, sin, stepwise, 1, None, None, 4)
    assert torch.equal(whole(x, residual, (cos, sin), cache, 1, None), residual + output(attended))
    assert torch.equal(cache.keys, stepwise.keys)


def test_16_tokens_of_attention_are_bitwise_16_single_steps(compiled: CompiledOps) -> None:
    cache, qkv, cos, sin = attention_case([9], 16)
    stepwise = copy_of(cache)
    together = attention(compiled, qkv, cos, sin, cache, 0, None, None, 4)
    for t in range(16):
        x, cos_t, sin_t = (part[:, t : t + 1].contiguous() for part in (qkv, cos, sin))
        alone = attention(compiled, x, cos_t, sin_t, stepwise, 0, None, None, 4)
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
    together = attention(compiled, qkv, cos, sin, cache, 0, mask, None, 4)
    for node in range(6):
        path = mask[node].nonzero().flatten()
        x, cos_p, sin_p = (part[:, path].contiguous() for part in (qkv, cos, sin))
        alone = attention(compiled, x, cos_p, sin_p, copy_of(before), 0, None, None, 4)
        assert torch.equal(alone[0, -1], together[0, node])


@pytest.mark.parametrize("kind", MASKS)
def test_8_rows_of_attention_are_bitwise_8_single_rows(compiled: CompiledOps, kind: str) -> None:
    lengths = [3, 30, 7, 7, 2, 16, 15, 23]
    cache, qkv, cos, sin = attention_case(lengths, 4)
    mask, before = tree_mask(kind, lengths, 4), copy_of(cache)
    together = attention(compiled, qkv, cos, sin, cache, 1, mask, None, 4)
    for row in range(8):
        one = slice(row, row + 1)
        own_mask = mask if mask is None or mask.dim() == 2 else mask[one]
        alone = attention(
            compiled, qkv[one], cos[one], sin[one], before.rows(row, row + 1), 1, own_mask, None, 4
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
        attention(compiled, qkv, cos, sin, cache, 0, None, None, 4),
        attention(compiled, qkv, cos, sin, other, 0, None, None, 4),
    )
