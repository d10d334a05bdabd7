"""Lossless decoding: the KV cache, draft trees, verification, vanilla decoding and the speculative engine."""
