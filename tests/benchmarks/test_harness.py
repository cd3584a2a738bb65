"""The options of benchmarks, and counting n-grams."""

from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.counting import kneser_ney
from benchmarks.harness import PassThroughOptions, read_options, select
from common.errors import UserError


@dataclass
class SmallOptions:
    sizes: str = "a,b"
    rounds: int = 2
    seconds: float = 0.5


@dataclass
class SmallPassThroughOptions(PassThroughOptions):
    rounds: int = 2


def test_other_arguments_are_passed_on_only_where_runs_take_them():
    options = read_options(["max_steps=3", "rounds=1", "model.n_layer=2"], SmallPassThroughOptions)
    assert options.settings == ["max_steps=3", "model.n_layer=2"] and options.rounds == 1
    with pytest.raises(UserError) as error:
        read_options(["round=3"], SmallOptions)
    assert "round" in str(error.value) and "rounds" in str(error.value)


@pytest.mark.parametrize("argument", ["rounds=1.5", "rounds=many", "seconds=long"])
def test_an_option_that_is_not_a_number_is_refused_by_name(argument):
    with pytest.raises(UserError) as error:
        read_options([argument], SmallOptions)
    assert argument in str(error.value)


def test_an_unknown_choice_is_refused_with_all_choices():
    assert select("sizes", "b,a", {"a": 1, "b": 2, "c": 3}) == {"b": 2, "a": 1}
    with pytest.raises(UserError) as error:
        select("sizes", "a,d", {"a": 1, "b": 2})
    assert "sizes=d" in str(error.value) and "a, b" in str(error.value)


def test_counting_models_give_probabilities_that_sum_to_one():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 4, 200)
    for order in (1, 2, 3):
        losses = [
            kneser_ney(train, np.array([token]), vocab_size=4, max_order=order)[-1]
            for token in range(4)
        ]
        assert np.exp(-np.array(losses)).sum() == pytest.approx(1)
