"""What fits into a card: the settings that are tried, and calls on cards that are made up."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from helpers.tensors import relative_error
from helpers.triton_cases import GPU, MARKS, Case, check, evaluate
from helpers.untyped import lln_attention
from lln.kernels import eager
from lln.kernels.call import FIELDS
from lln.kernels.triton import fit, op, plan, survey
from lln.kernels.triton.fit import DoesNotFit, Needs
from lln.kernels.triton.forward import Launch
from lln.kernels.triton.plan import Card, Settings
from lln.lab.cli import info

pytestmark = MARKS

KIB = 1024
SMALL = Card("small", shared=99 * KIB, shared_all=100 * KIB, registers=2**16, threads=1536)
KNOWN = dataclasses.replace(SMALL, measured=True)


def takes(shared: dict[tuple[int, bool], int]) -> tuple[list[Any], Callable[[Settings, bool], Needs]]:
    """(what was looked at; a kernel that takes so many KiB with so many stages and keys read again or not)"""
    seen: list[Any] = []

    def look(settings: Settings, again: bool) -> Needs:
        seen.append((settings.stages, again))
        return Needs(shared[settings.stages, again] * KIB, 128)

    return seen, look


def test_stages_are_given_up_before_keys_are_read_again() -> None:
    seen, look = takes({(3, False): 200, (2, False): 150, (1, False): 98, (1, True): 50})
    assert fit.fit(look, Settings(4, 3), KNOWN, again=False) == (Settings(4, 1, programs=1), False)
    assert seen == [(3, False), (2, False), (1, False)]
    seen, look = takes({(3, False): 200, (2, False): 150, (1, False): 100, (1, True): 50})
    assert fit.fit(look, Settings(4, 3), KNOWN, again=False) == (Settings(4, 1, programs=1), True)
    assert seen[-1] == (1, True)


def test_what_fits_as_measured_is_left_alone() -> None:
    seen, look = takes({(3, False): 99})
    assert fit.fit(look, Settings(4, 3, 168), KNOWN) == (Settings(4, 3, 168, programs=1), False)
    assert seen == [(3, False)]


def test_programs_are_those_that_a_multiprocessor_has_room_for() -> None:
    _, look = takes({(3, False): 64, (2, False): 40, (1, False): 20})
    assert fit.fit(look, Settings(4, 3), SMALL) == (Settings(4, 2, programs=2), False)  # two share 100 KiB
    seen, look = takes({(3, False): 120, (2, False): 90, (1, False): 60, (1, True): 20})
    most_stages = Settings(4, 2, programs=1)  # since no two can share
    assert fit.fit(look, Settings(4, 3), SMALL, again=False) == (most_stages, False)
    assert (1, True) not in seen


@pytest.mark.parametrize(
    ("needs", "warps", "programs"),
    [
        (Needs(0), 4, 12),  # threads
        (Needs(20 * KIB), 4, 4),  # shared memory, of which each program takes one KiB more
        (Needs(24 * KIB), 4, 4),  # to the last byte
        (Needs(0, 250), 4, 2),  # registers, handed out by eights
        (Needs(0, 255), 8, 1),
        (Needs(99 * KIB), 4, 1),
        (Needs(0, 0, 256), 4, 2),  # tensor memory
    ],
)
def test_room_of_a_multiprocessor(needs: Needs, warps: int, programs: int) -> None:
    assert fit.count_programs(needs, warps, SMALL) == programs


def test_what_fits_nowhere_says_why() -> None:
    _, look = takes({(2, False): 150, (1, False): 120, (1, True): 110})
    with pytest.raises(DoesNotFit, match="needs 110 KiB of shared memory, and there are 99"):
        fit.fit(look, Settings(4, 2), SMALL, again=False)

    def fails(settings: Settings, again: bool) -> Needs:
        raise DoesNotFit("does not compile")

    with pytest.raises(DoesNotFit, match="does not compile"):
        fit.fit(fails, Settings(4, 2), SMALL)
    with pytest.raises(DoesNotFit, match="tensor memory"):
        fit.fit(lambda settings, again: Needs(0, 0, 1024), Settings(4, 2), SMALL)


@pytest.mark.parametrize(
    ("count", "sequences", "programs", "merged", "splits"),
    [  # where a kernel was quickest on an H200, of one to eight works a sequence, or 11 to 66 where it is alone
        (64, 192, 3, True, 2),  # fold: one wave. Three works would be a wave and a half, and take as long as two
        (64, 192, 2, True, 4),  # read_backward: three full waves of sixteen tiles, and not one of 64, less than full
        (64, 192, 2, False, 4),  # fold_backward
        (8, 384, 3, True, 1),  # fold of 512 tokens
        (8, 384, 2, True, 1),  # read_backward: to put two works together takes longer than they save
        (8, 384, 2, False, 2),  # fold_backward
        (256, 12, 2, True, 22),
        (256, 12, 4, False, 44),
        (1, 5000, 2, True, 1),
    ],
)
def test_works_fill_waves(count: int, sequences: int, programs: int, merged: bool, splits: int) -> None:
    assert plan.choose_splits(count, sequences, 132 * programs, merged) == splits


@pytest.mark.parametrize(
    ("width", "dim", "dtype", "parts"),
    [
        (128, 128, torch.bfloat16, [128, 64, 32]),
        (300, 64, torch.bfloat16, [128, 64, 32]),
        (16, 64, torch.float32, [32]),
        (80, 64, torch.float32, [64, 32]),
        (256, 256, torch.float32, [16]),
    ],
)
def test_parts_of_the_values(width: int, dim: int, dtype: torch.dtype, parts: list[int]) -> None:
    assert list(fit.list_parts(width, dim, dtype)) == parts


Look = Callable[[Any, Sequence[Any], Settings], Needs]


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[Look], None]:
    """The kernels run where they run, and are told of another card."""

    def tell(look: Look) -> None:
        monkeypatch.setattr(fit, "FITS", {})
        monkeypatch.setattr(plan, "find_card", lambda device: SMALL)
        monkeypatch.setattr(fit, "compile_and_look", look)

    return tell


def read_value(kernel: Any, args: Sequence[Any], name: str) -> Any:
    return dict(zip(kernel.arg_names, args, strict=True)).get(name)


pretended = pytest.mark.skipif(GPU, reason="a card that is there is asked itself")
CASES = [
    Case((70, 70), value_dim=100, group=2, block_size=16, mask="left", alpha="[H]", mix="[H, D]"),
    Case((70, 70), value_dim=100, is_causal=True, block_size=16, mask="holes", beta="[H, D]", mix="[H]"),
    Case((70, 70), value_dim=70, state=True, return_state=True, is_causal=True, block_size=16),
    Case((30, 40), value_dim=70, state=True, return_state=True, packed=True),
]


@pretended
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_by_parts_of_the_values(case: Case, on_card: Callable[[Look], None]) -> None:
    """Output, states and every gradient, also where the two passes are cut differently."""

    def look(kernel: Any, args: Sequence[Any], settings: Settings) -> Needs:
        channels = read_value(kernel, args, "BE")
        most = 32 if "backward" in kernel.fn.__name__ or "keys" in kernel.fn.__name__ else 64
        return Needs(200 * KIB if channels > most else 40 * KIB, 128)

    on_card(look)
    check(case)
    parts = {(key[-1] == "forward", found.part) for key, found in fit.FITS.items() if isinstance(found, fit.Fit)}  # type: ignore[index]
    assert {(True, 64), (False, 32)} <= parts


@pretended
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_read_again(group: int, is_causal: bool, on_card: Callable[[Look], None]) -> None:
    """Give what they give elsewhere."""
    size = 50 if is_causal else 100
    case = Case(
        (210, 210), group=group, is_causal=is_causal, block_size=size, mask="left", alpha="[H]", mix="[H]",
        dtype=torch.bfloat16,
    )  # fmt: skip
    elsewhere = evaluate(case)
    assert relative_error(elsewhere["d query"], evaluate(case, "eager", wide=True)["d query"]) <= 5e-3
    on_card(
        lambda kernel, args, settings: Needs(98 * KIB if read_value(kernel, args, "AGAIN") in (None, True) else 2**20)
    )
    found = evaluate(case)
    kernel = "causal_keys" if is_causal else "fold_backward"
    assert any(isinstance(f, fit.Fit) and f.again.get(kernel) for f in fit.FITS.values())
    assert found.keys() == elsewhere.keys() >= {"out", "d query", "d key", "d value", "d mix"}
    assert all(relative_error(found[name], elsewhere[name]) <= 2e-3 for name in found)


@pretended
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("backward_alone", [False, True])
def test_eager_where_nothing_fits(block_size: int | None, backward_alone: bool, on_card: Any, monkeypatch: Any) -> None:
    """Also where the backward pass alone does not fit; without gradients, that does not matter."""

    def look(kernel: Any, args: Sequence[Any], settings: Settings) -> Needs:
        if not backward_alone or "backward" in kernel.fn.__name__:
            raise DoesNotFit("does not compile")
        return Needs(KIB)

    case = Case((40, 40), block_size=block_size)
    eager = evaluate(case, "eager")
    on_card(look)
    launched: list[Any] = []
    launch = Launch.launch
    monkeypatch.setattr(Launch, "launch", lambda self, *a, **k: launched.append(self.fit) or launch(self, *a, **k))
    found = evaluate(case)
    assert launched
    assert all(isinstance(held, fit.Rehearsal) for held in launched)
    assert all(torch.equal(found[name], eager[name]) for name in eager)
    launched.clear()
    with torch.no_grad():
        q = torch.randn(1, 2, 40, 16)
        given: Any = dict.fromkeys(FIELDS)
        given |= {"query": q, "key": q, "value": q, "alpha": torch.ones(1, 1, 1), "beta": torch.ones(1, 1, 1)}
        given |= {"is_causal": False, "scale": 1.0, "dropout_p": 0.0}
        if backward_alone:
            op.apply(*given.values())
            assert any(not isinstance(held, fit.Rehearsal) for held in launched)
        else:
            with pytest.raises(DoesNotFit, match="fold_kernel does not compile"):
                op.apply(*given.values())


@pretended
def test_a_kind_of_call_is_rehearsed_once(on_card: Callable[[Look], None]) -> None:
    looked: list[str] = []

    def look(kernel: Any, args: Sequence[Any], settings: Settings) -> Needs:
        looked.append(kernel.fn.__name__)
        return Needs(40 * KIB, 128)

    on_card(look)
    for length in (70, 71, 75):
        evaluate(Case((length,), is_causal=True))
    count = len(looked)
    evaluate(Case((77,), is_causal=True))
    assert len(looked) == count
    evaluate(Case((128,), is_causal=True))  # whole tiles: kernels without masks
    assert len(looked) > count


@pretended
@pretended
def test_a_mix_by_the_evidence_whose_backward_does_not_fit_never_begins(
    on_card: Callable[[Look], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_card(lambda kernel, args, settings: Needs((200 if "join_backward" in kernel.fn.__name__ else 20) * KIB, 128))
    q, k, v = (torch.randn(1, 1, 8, 8, requires_grad=True) for _ in range(3))
    ran: list[Any] = []
    attend = eager.attend
    monkeypatch.setattr(eager, "attend", lambda call: [ran.append(call), attend(call)][1])
    options: dict[str, Any] = {"beta": 1.3, "read": "evidence", "mix": "evidence", "block_size": 4}
    with torch.no_grad():
        there = lln_attention(q, k, v, backend="triton", **options)
    assert ran == []
    out = lln_attention(q, k, v, backend="triton", **options)
    assert len(ran) == 1
    assert relative_error(there, out.detach()) <= 1e-5
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pretended
def test_a_machine_is_asked_what_runs_where(on_card: Callable[[Look], None]) -> None:
    def look(kernel: Any, args: Sequence[Any], settings: Settings) -> Needs:
        wide = read_value(kernel, args, "WIDE") and read_value(kernel, args, "D") == 128
        if wide and (kernel.fn.__name__ == "causal_keys_kernel" or read_value(kernel, args, "BS")):
            return Needs(200 * KIB)
        channels = read_value(kernel, args, "BE") or 0
        return Needs(120 * KIB if channels > 64 else 40 * KIB, 128)

    on_card(look)
    found = {(a.dtype, a.dim, a.mode): a for a in survey.survey(torch.device("cpu"))}
    assert len(found) == 6 * (len(survey.MODES) + len(survey.EVIDENCE))
    assert found["bfloat16", 64, "LLN"].runs == "kernels"
    assert found["bfloat16", 128, "LLN+Diag, causal"].parts == (64, 64)
    assert found["float32", 128, "LLN"].runs == "kernels"
    assert found["float32", 128, "LLN+Diag"].runs == "kernels, blocks eager"
    assert found["float32", 128, "LLN, causal"].runs == "eager"
    reason = "causal_keys_kernel needs 200 KiB of shared memory, and there are 99"
    assert found["float32", 128, "LLN, causal"].reason == reason
    assert found["bfloat16", 64, "evidence, directions, causal"].runs == "kernels"
    told = [dataclasses.asdict(answer) for answer in found.values()]
    asked = {"device": "cuda:0", "card": "small", "shared memory": SMALL.shared, "settings": "measured", "kinds": told}
    head, table, *reasons = info.show_calls(asked)
    assert "cuda:0 small, 99 KiB" in head
    assert table.row_count == len(survey.MODES) + len(survey.EVIDENCE)
    assert any(reason in text and "float32 128 LLN, causal" in text for text in reasons)
