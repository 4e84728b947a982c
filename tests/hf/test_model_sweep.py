"""A part of `make test-models`: the tool that looks at every architecture finds what agrees, what is refused, and what
goes wrong."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lln.hf import interface

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def sweep() -> Iterator[Any]:
    sys.path.insert(0, str(TOOLS))
    try:
        import test_models

        yield test_models
    finally:
        sys.path.remove(str(TOOLS))


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("bert", "agrees", None), ("llama", "agrees", None), ("vit", "agrees", None), ("bart", "agrees", None),
        ("modernbert", "agrees", ["in its global layers"]), ("doge", "refused", "DogeAttention of DogeModel adds"),
        ("t5", "refused", "T5Attention of T5Model adds a position_bias"),
        ("resnet", "refused", "ResNetModel has no attention; use it as it is"),
        ("phi4_multimodal_vision", "agrees", None),  # calls itself causal, and is not
    ],
)  # fmt: skip
def test_an_architecture_agrees_or_is_refused(sweep: Any, name: str, outcome: str, words: Any) -> None:
    row = sweep.check_architecture(name)
    for each in sweep.NAMES:
        found = row[each]
        assert found["outcome"] == outcome
        if outcome == "refused":
            assert words in found["reason"]
        else:
            assert found["error"] < 1e-12
            assert found.get("with") == words


@pytest.mark.filterwarnings("ignore:.*the spread of its queries and keys is not known")
def test_a_backbone_with_a_config_of_its_own_is_not_left_to_softmax(sweep: Any) -> None:
    tiny = sweep.make_tiny("maskformer")
    for _ in range(2):  # a refusal leaves the config as it was
        with pytest.raises(ValueError, match="MaskFormerSwinBackbone"):
            tiny.build("lln")
    row = sweep.check_architecture("maskformer")
    assert (row["lln"]["outcome"], row["lln_diag"]["outcome"]) == (
        "refused",
        "agrees",
    )  # convert leaves it, and says so


def test_what_is_wrong_is_found(sweep: Any) -> None:
    """An attention that is off by little, one that goes on to run softmax, and another exception are failures."""
    original = interface.attend

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, weights = original(*args, **kwargs)
        return out * (1 + 1e-5), weights

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise IndexError("out of range")

    for stand_in, words in ((wrong, "is 1e-05 away from eq. (8)"), (broken, "IndexError: out of range")):
        with mock.patch.object(interface, "attend", stand_in):
            row = sweep.check_architecture("bert")
        assert row["lln"]["outcome"] == "failed"
        assert words in row["lln"]["reason"]
    module = torch.nn.Linear(1, 1)
    spy = sweep.Spy(module, False)
    x = torch.zeros(1, 2, 3, 4)
    with spy.look():
        sdpa_attention_forward(module, x, x, x, None)
    assert spy.beside == {"Linear": 1}


def test_a_stopped_sweep_goes_on(sweep: Any) -> None:
    """What is stored stays where the sources and versions are the same, or where single architectures are tried."""
    said = {"torch": "1", "transformers": "2", "commit": "b"}
    held = {"provenance": said | {"commit": "a"}, "code": sweep.hash_code(), "architectures": {"bert": {}}}
    assert sweep.go_on(held, said, False) == held
    assert sweep.go_on(held, said | {"torch": "3"}, True) == held
    for other in (None, held | {"code": "other"}, held | {"provenance": said | {"torch": "3"}}):
        assert sweep.go_on(other, said, False) == held | {"provenance": said, "architectures": {}}
