"""Measurement: the interleaved protocol, its statistics, acceptance, losslessness and the verdict on them."""
