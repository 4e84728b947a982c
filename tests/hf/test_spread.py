"""Models of transformers over several processes: a training step, a prompt and its cache are those of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers

import lln.hf
from helpers.hf_models import make_config
from helpers.processes import Processes
from helpers.split_heads import compare_loaded, compare_parallel
from helpers.spread_models import attempt_models, compare_generation, compare_sharded, compare_training

TOLERANCE = 1e-10
RUNS: list[tuple[str, tuple[int, ...], str | None, dict[str, Any]]] = [
    ("bert", (20, 27), "right", {"implementation": "lln_diag", "block_size": 8}),
    ("bert", (8, 30, 9), None, {"implementation": "lln", "matching": "entropy", "checkpointed": True}),
    ("roberta", (20, 27), "left", {"implementation": "lln_diag", "block_size": 8, "convolution": 3}),
    ("llama", (8, 30, 9), "left", {"implementation": "lln_diag", "block_size": 8, "statistics": "fixed"}),
    ("llama", (20, 27), None, {"implementation": "lln", "statistics": "fixed", "learnable": "head"}),
    ("gpt2", (20, 27), None, {"implementation": "lln_diag", "block_size": 16, "statistics": "fixed"}),
    ("bert", (20, 27), "left", {"implementation": "lln", "value_convolution": 5}),
]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    made = Processes(4)
    yield made
    made.stop()


@pytest.mark.parametrize(("kind", "lengths", "padding", "options"), RUNS)
def test_a_training_step_is_that_of_one_process(
    processes: Processes, kind: str, lengths: tuple[int, ...], padding: str | None, options: dict[str, Any]
) -> None:
    for found in processes.run(len(lengths), compare_training, kind, lengths, padding, options):
        assert {name: x for name, x in found.items() if not x <= TOLERANCE} == {}


def test_running_statistics_are_those_of_all_ranks(processes: Processes) -> None:
    options = {"implementation": "lln", "statistics": "running"}
    for found in processes.run(4, compare_training, "llama", (8, 30, 5, 9), None, options):
        assert any("running_variance" in name for name in found)
        assert {name: x for name, x in found.items() if not x <= TOLERANCE} == {}


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("own", [{}, {"block_size": 8}, {"value_convolution": 15}], ids=str)
def test_a_prompt_read_by_all_goes_on_with_one(processes: Processes, own: dict[str, Any], padding: str | None) -> None:
    implementation = "lln_diag" if "block_size" in own else "lln"
    options = {"implementation": implementation, "statistics": "fixed", **own}
    for found in processes.run(3, compare_generation, padding, options):
        assert found["same"]
        assert found["state"] <= TOLERANCE
        assert found["length"] == 37 + 6 - 1  # all that was seen


def test_parameters_may_be_sharded_over_the_same_ranks(processes: Processes) -> None:
    for found in processes.run(2, compare_sharded, (20, 27)):
        assert len(found) > 20
        assert {name: x for name, x in found.items() if not x <= TOLERANCE} == {}


@pytest.mark.parametrize(
    ("kind", "beside", "options"),
    [
        ("llama", None, {"implementation": "lln", "statistics": "fixed", "value_convolution": 3}),
        ("llama", "sequence", {"implementation": "lln_diag", "statistics": "fixed", "learnable": "head"}),
        ("bert", "sequence", {"implementation": "lln_diag", "block_size": 8, "matching": "entropy"}),
        ("bert", "fsdp", {"implementation": "lln", "statistics": "running", "value_convolution": 3}),
        ("llama", "fsdp", {"implementation": "lln_diag", "statistics": "fixed", "learnable": "channel"}),
    ],
)
def test_heads_may_lie_on_several_ranks_too(
    processes: Processes, kind: str, beside: str | None, options: dict[str, Any]
) -> None:
    for found in processes.run(4 if beside else 2, compare_parallel, kind, beside, options):
        assert len(found) > 30
        assert {name: x for name, x in found.items() if not x <= TOLERANCE} == {}


def test_a_model_that_transformers_cuts_by_its_plan_is_that_of_one_process(
    processes: Processes, tmp_path: Path
) -> None:
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="this transformers has other plans")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(make_config("llama", num_key_value_heads=4))
    options: dict[str, Any] = {"statistics": "fixed", "learnable": "head", "value_convolution": 3}
    lln.hf.convert(model, "lln_diag", **options).save_pretrained(tmp_path)
    for found in processes.run(4, compare_loaded, str(tmp_path)):
        assert len(found) > 50
        assert {name: x for name, x in found.items() if not x <= TOLERANCE} == {}


def test_models_that_would_see_one_rank_alone_are_refused(processes: Processes) -> None:
    words = {
        "positions": "takes no position_ids, so the tokens of every rank would get the first positions",
        "mixed": "does not run LLN attention, and attention of other kinds would see the tokens of one rank",
        "softmax": "of BertModel does not run LLN attention",
        "labels": "give shift_labels, cut from labels[:, 1:] of the whole sequence",
        "packed": "pass cu_seq_lens_q, offsets in the rows of all ranks",
        "heads": "query and key must have 4 and 2 heads of 8",
        "none": "every rank must hold at least one token for LlamaForCausalLM; the ranks hold [8, 0]",
    }
    for found in processes.run(2, attempt_models):
        assert found.keys() == words.keys()
        for name, message in found.items():
            assert words[name] in message


def test_a_model_that_stays_whole_gets_no_hook() -> None:
    model = lln.hf.convert(transformers.AutoModel.from_config(make_config("bert")), "lln")
    before = [len(part._forward_pre_hooks) for part in model.modules()]
    assert lln.hf.spread(model, None) is model
    assert [len(part._forward_pre_hooks) for part in model.modules()] == before
