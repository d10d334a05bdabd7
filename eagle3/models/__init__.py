"""The target, the drafts and the checkpoint format between training and decoding."""
