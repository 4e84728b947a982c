"""The rate of `lln.hf.distill` and `fine_tune`, step by step, and that a learner that goes on takes the same steps."""

import pytest
import torch
from torch import nn

from lln.hf.distillation import WARMUP, Learner, choose


def list_rates(steps: int, done: int = 0) -> list[float]:
    """What Adam is given at each step that is left."""
    weight = nn.Parameter(torch.ones(1))
    learner = Learner({"weight": weight}, {"weight": 2.0}, steps)
    learner.done, found = done, []
    while learner.done < steps:
        weight.grad = torch.ones(1)
        learner.step(1.0)
        found.append(learner.adam.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("steps", [1, 5, 10, 40])
def test_the_rate_rises_for_ten_steps_while_it_falls_to_nothing(steps: int) -> None:
    wanted = []
    for number in range(1, steps + 1):
        share = number / 10 if number < 10 else 1.0
        wanted.append(2.0 * share * (steps - number + 1) / steps)
    assert WARMUP == 10
    assert list_rates(steps) == pytest.approx(wanted, rel=1e-12)


def test_each_parameter_has_its_own_rate() -> None:
    """However they are grouped: the same as with an Adam for each."""
    rates = {"a": 0.1, "b": 0.02, "c": 0.1}

    def go(names: str) -> dict[str, torch.Tensor]:
        weights = {name: nn.Parameter(torch.linspace(-1.0, 1.0, 3)) for name in names}
        learner = Learner(weights, rates, 20)
        while learner.done < learner.steps:
            for weight in weights.values():
                weight.grad = (weight.detach() - 3.0) * (1.0 + learner.done)
            learner.step(1.0)
        return {name: weight.detach() for name, weight in weights.items()}

    together = go("abc")
    assert all(torch.equal(together[name], go(name)[name]) for name in rates)
    assert not torch.equal(together["a"], together["b"])


def test_a_learner_that_goes_on_has_the_rates_that_were_left() -> None:
    assert list_rates(40, done=4) == list_rates(40)[4:]


def test_a_learner_that_goes_on_takes_the_same_steps() -> None:
    def make(steps: int = 30) -> tuple[nn.Parameter, Learner]:
        weight = nn.Parameter(torch.linspace(-1.0, 1.0, 5))
        return weight, Learner({"weight": weight}, {"weight": 0.1}, steps)

    def go(weight: nn.Parameter, learner: Learner, until: int) -> None:
        while learner.done < until:
            weight.grad = (weight.detach() - 3.0) * choose([1.0, 2.0, 3.0], learner.done, seed=1)
            learner.step(1.0)

    whole, one = make()
    go(whole, one, 30)
    first, begun = make()
    go(first, begun, 17)
    held = {name: t.clone() for name, t in begun.state().items()}
    rest, again = make()
    again.load(held, begun.done)
    go(rest, again, 30)
    assert torch.equal(rest, whole)
    untouched, third = make()
    third.load(held, begun.done)  # what was loaded belongs to nobody, and begins another one alike
    go(untouched, third, 30)
    assert torch.equal(untouched, whole)
