"""The head sees what is to be guessed and nothing else, and the loss and its gradients do not notice."""

import copy
import dataclasses
from typing import Any

import pytest
import torch

from lln.lab.core.seeds import draws, stream_key
from lln.lab.data.examples import IGNORE
from lln.lab.data.text import Masking
from lln.lab.recipes import recipe
from lln.lab.train.models import Sizes, build
from lln.lab.train.objective import Guesses, compare_tokens


def build_small(length: int) -> Any:
    config = recipe("mlm", "tiny", "softmax")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, length=length))
    torch.manual_seed(0)
    return build(config, Sizes(vocabulary=50, padding=1)).double().eval()


@pytest.mark.parametrize(("length", "counts"), [(40, [6, 7, 0]), (7, [2, 1, 1]), (3, [1, 0, 1])])
def test_loss_and_gradients_are_those_of_all_tokens(length: int, counts: list[int]) -> None:
    plain = build_small(length)
    ids = torch.randint(5, 50, (len(counts), length), generator=torch.Generator().manual_seed(1))
    labels = torch.full_like(ids, IGNORE)
    for row, count in enumerate(counts):
        places = torch.randperm(length, generator=torch.Generator().manual_seed(row))[:count]
        labels[row, places] = ids[row, places]
    number = sum(counts)
    wanted = compare_tokens(plain(input_ids=ids).logits, labels).sum() / number
    wanted.backward()

    quick = copy.deepcopy(plain)
    quick.zero_grad()
    guesses = Guesses(quick.lm_head, 0.15)
    with guesses.narrow(labels) as chosen:
        out = quick(input_ids=ids)
        assert out.logits.shape[1] == chosen.shape[1] <= min(length, -(-15 * length // 100) + 1)
    batch = {"input_ids": ids, "labels": labels}
    assert guesses.divide_by([batch]) == number
    found = guesses.compute_loss(quick, batch) / guesses.divide_by([batch])
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)  # the loss is float32
    for (name, p), q in zip(plain.named_parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert quick(input_ids=ids).logits.shape[1] == length  # afterwards all is as before


@pytest.mark.parametrize("probability", [0.15, 0.3, 1.0])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 255, 256])
def test_the_places_always_suffice(probability: float, length: int) -> None:
    class Letters:
        mask_id = 3

        def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.arange(50) < 5, torch.arange(5, 50)

    ids = torch.randint(5, 50, (200, length), generator=torch.Generator().manual_seed(0))
    index = torch.arange(200)
    drawn = draws(stream_key("mask", 0), index, torch.zeros_like(index), Masking.count_draws(length))
    _, labels = Masking(probability)(ids, Letters(), drawn)  # type: ignore[arg-type]
    guesses = Guesses(torch.nn.Identity(), probability)
    with guesses.narrow(labels) as chosen:
        assert int((chosen != IGNORE).sum()) == int((labels != IGNORE).sum())
