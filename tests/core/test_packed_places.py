"""Where a position of packed sequences belongs, and between which points of a curve a value lies."""

import pytest
import torch

from lln.kernels.carry import owners
from lln.matching.curves import find_interval, pick


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[3, 2], [0, 3], [3, 0], [0, 0, 4, 0, 2, 0], [1], [5, 1, 1]])
def test_each_position_has_the_owner_that_repeats_it(lengths: list[int], dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, *lengths], dtype=dtype).cumsum(0).to(dtype)
    expected = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    assert torch.equal(owners(torch.arange(sum(lengths)), offsets), expected)


def test_an_interval_is_the_one_that_bucketize_finds() -> None:
    x = torch.tensor([-2.0, -0.5, 0.0, 0.25, 3.0], dtype=torch.float64)
    at = torch.cat([x, x - 1e-9, x + 1e-9, torch.linspace(-4, 5, 91, dtype=torch.float64)])
    assert torch.equal(find_interval(x, at), torch.bucketize(at, x[1:-1]))
    assert int(find_interval(x, at[3])) == int(torch.bucketize(at[3], x[1:-1]))
    both = torch.stack([x, 2 * x])
    i = find_interval(x, at.reshape(2, -1))
    assert torch.equal(pick(both, i), both[:, i])
    assert torch.equal(pick(x, i[0, 0]), x[i[0, 0]])
