"""The draft tree as SGLang lays it out: first children (next_token) and siblings, in order of value."""

import torch

FULL_MASK, QLEN_ONLY = 0, 1  # of sglang.srt.speculative: the whole context in the mask, or the tree alone


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, seq_lens, tree_mask, positions, retrieve_index, retrieve_next_token,
    retrieve_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    """Fill mask, positions and links of every request's tree.

    selected_index[b][i] is the place of node i + 1 among all candidates; its parent is candidate
    parent_list[b][place // topk], and the root where place // topk is 0.
    """
    batch, nodes, filled = seq_lens.numel(), draft_token_num, 0
    shape = (batch, nodes)
    for request in range(batch):
        tree = _Tree(parent_list[request].tolist(), selected_index[request].tolist(), nodes, topk, depth)
        length = int(seq_lens[request])
        retrieve_index.view(shape)[request] = torch.arange(request * nodes, (request + 1) * nodes)
        retrieve_next_token.view(shape)[request] = torch.tensor(tree.first_child)
        retrieve_next_sibling.view(shape)[request] = torch.tensor(tree.sibling)
        positions.view(shape)[request] = torch.tensor(tree.depths) + length
        mask = torch.tensor(tree.mask)
        if int(tree_mask_mode) == QLEN_ONLY:
            size, width = nodes * nodes, nodes
        elif int(tree_mask_mode) == FULL_MASK:
            size, width = nodes * (length + nodes), length + nodes
        else:
            raise NotImplementedError(f"tree mask mode {tree_mask_mode} is not in the CPU stand-in")
        tree_mask.view(-1)[filled : filled + size].view(nodes, width)[:, width - nodes :] = mask
        filled += size


class _Tree:
    """One request's tree from its selected candidates."""

    def __init__(self, parents, selected, nodes, topk, depth):
        place = {}
        for index, candidate in enumerate(selected):
            place.setdefault(candidate, index + 1)
        parent = [0] * nodes
        for node in range(1, nodes):
            group = selected[node - 1] // topk
            # A candidate whose parent was not selected hangs on nothing (None): it can never be accepted.
            parent[node] = 0 if group == 0 else place.get(parents[group])
        self.first_child, self.sibling = [-1] * nodes, [-1] * nodes
        for node in range(nodes - 1, 0, -1):
            if parent[node] is not None:
                self.sibling[node] = self.first_child[parent[node]]
                self.first_child[parent[node]] = node
        self.mask = [[False] * nodes for _ in range(nodes)]
        self.depths = [0] * nodes
        for node in range(nodes):
            self.mask[node][0] = True
            at = node
            while at and self.depths[node] < depth:
                self.mask[node][at] = True
                self.depths[node] += 1
                if parent[at] is None:
                    break
                at = parent[at]


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
    retrive_next_sibling, target_predict,
):  # fmt: skip
    """Walk down each tree while a child is the target's choice; fill what was accepted and the bonus token.

    The spelling of the arguments is SGLang's, which passes them by name.
    """
    batch, nodes = candidates.shape
    tokens, rows, children, siblings = (
        part.reshape(batch, nodes).tolist()
        for part in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    )
    chosen = target_predict.reshape(-1).tolist()
    for request in range(batch):
        node, path = 0, [rows[request][0]]
        while len(path) < accept_index.shape[1]:
            child = children[request][node]
            while child != -1 and tokens[request][child] != chosen[path[-1]]:
                child = siblings[request][child]
            if child == -1:
                break
            predicts[path[-1]] = chosen[path[-1]]
            node = child
            path.append(rows[request][child])
        accept_index[request, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[request] = len(path) - 1
        predicts[path[-1]] = chosen[path[-1]]
    return predicts, accept_index, accept_token_num
