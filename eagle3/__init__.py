"""EAGLE-3 speculative decoding: train a draft for a target model, decode losslessly, measure the speedup."""
