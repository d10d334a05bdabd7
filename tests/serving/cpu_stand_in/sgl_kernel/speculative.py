"""Links of a tree that is given by its mask alone, as n-gram drafts are."""

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask, verified_seq_len, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling,
    batch_size, draft_token_num,
):  # fmt: skip
    """Fill positions, first children and siblings; node i sees node j where j is its ancestor or itself."""
    nodes, shape = draft_token_num, (batch_size, draft_token_num)
    mask = tree_mask.view(-1)[: batch_size * nodes * nodes].view(batch_size, nodes, nodes).bool()
    ancestors = mask & torch.ones(nodes, nodes, dtype=torch.bool).tril(-1)
    index = torch.arange(nodes)
    positions.view(shape).copy_(ancestors.sum(-1) + verified_seq_len.view(-1, 1))
    retrieve_index.view(shape).copy_(torch.arange(batch_size * nodes).view(shape))
    parent = torch.where(ancestors, index, -1).amax(-1)
    child = torch.where(ancestors, index[:, None], nodes).amin(1)
    retrieve_next_token.view(shape).copy_(torch.where(child < nodes, child, -1))
    younger = (parent[:, :, None] == parent[:, None, :]) & (index[:, None] > index[None, :])
    sibling = torch.where(younger, index[:, None], nodes).amin(1)
    retrieve_next_sibling.view(shape).copy_(torch.where((parent >= 0) & (sibling < nodes), sibling, -1))
