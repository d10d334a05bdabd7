"""The space holds every tree worth measuring and no other, and every one can be chosen."""

import optuna
import pytest

from eagle3.decoding.tree import TreeShape
from eagle3.tuning.space import Configuration, Space
from tests.tuning.fakes import SPACE

TWO_OF_ALL = Space(
    ("eagle3", "eagle"), 3, 3, 8, ("bfloat16", "float32"), (0, 1), ("kernels", "torch"), (0.0, 0.1)
)


def constructible(num_steps: int, topk: int, num_draft_tokens: int) -> bool:
    try:
        TreeShape(num_steps, topk, num_draft_tokens)
    except ValueError:
        return False
    return True


def test_space_is_the_decoders_trees_that_can_keep_every_level() -> None:
    brute = {
        (steps, topk, tokens)
        for steps in range(1, 6)
        for topk in range(1, 5)
        for tokens in range(2, 17)
        if constructible(steps, topk, tokens) and tokens > steps
    }
    trees = [tuple(item.tree.values()) for item in SPACE.configurations()]
    assert len(trees) == len(set(trees))
    assert set(trees) == brute
    assert all(SPACE.contains(item) for item in SPACE.configurations())


@pytest.mark.parametrize("always_fill", [False, True])
@pytest.mark.parametrize("space", [SPACE, TWO_OF_ALL])
def test_every_configuration_can_be_enqueued(space: Space, always_fill: bool) -> None:
    for configuration in space.configurations():
        trial = optuna.trial.FixedTrial(space.parameters(configuration, always_fill))
        assert space.suggest(trial, always_fill) == configuration  # type: ignore[arg-type]


def test_sampled_configurations_are_feasible() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(200):
        trial = study.ask()
        configuration = SPACE.suggest(trial)
        TreeShape(**configuration.tree)
        assert SPACE.contains(configuration)
        # A chain's budget follows from its length: there is nothing to sample.
        assert ("fill" in trial.params) == (configuration.topk > 1)


def test_known_trees_outside_the_space_are_left_out() -> None:
    assert {item.num_draft_tokens for item in SPACE.known().values()} == {4, 8}
    large = Space(("eagle3",), 8, 10, 64, ("bfloat16",), (0,))
    assert len(large.known()) == 4


def test_options_of_all_kinds_are_combined() -> None:
    trees = 32 * len({tuple(item.tree.values()) for item in TWO_OF_ALL.configurations()})
    assert len(set(TWO_OF_ALL.configurations())) == trees
    labels = {TWO_OF_ALL.label(item) for item in TWO_OF_ALL.configurations()}
    assert len(labels) == trees


def test_grid_derives_chains_and_drops_what_is_no_tree() -> None:
    found = SPACE.grid([1, 2], [1, 2], [4, 8])
    # 2/2/8 has more than the 7 nodes of two levels of two; 1/2/4 more than 3.
    assert [tuple(item.tree.values()) for item in found] == [(1, 1, 2), (2, 1, 3), (2, 2, 4)]


def test_label_shows_only_what_varies() -> None:
    assert SPACE.label(Configuration("eagle3", 3, 1, 4, "bfloat16", 0)) == "3/1/4"
    varied = Configuration("eagle", 3, 1, 4, "float32", 1, "torch", 0.1)
    assert TWO_OF_ALL.label(varied) == "eagle 3/1/4 float32 1 threads torch confidence 0.1"
