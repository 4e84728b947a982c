"""`lln plan`: bytes are those that real runs send, and estimates follow what they are said to follow."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.command import run_command
from helpers.processes import Processes
from helpers.shared_calls import count_traffic
from lln.lab.bench.card_times import read_pieces
from lln.lab.bench.cluster import (
    ATTENTIONS,
    CARDS,
    SHAPES,
    Cluster,
    Job,
    Shape,
    count_layer,
    count_memory,
    count_sent,
    estimate,
    find_longest,
    plan_cluster,
)  # fmt: skip
from lln.lab.core.errors import Refused

CLUSTER = Cluster(CARDS["h200"], cards=8)
TOLD = 16  # two numbers that ranks tell each other where there are blocks


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    made = Processes(3)
    yield made
    made.stop()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("length", [39, 64])
def test_bytes_are_those_that_real_runs_send(
    processes: Processes, length: int, count: int, block_size: int | None, is_causal: bool
) -> None:
    settings = {"is_causal": is_causal, "block_size": block_size, "heads": (4, 2), "dims": (4, 6)}
    found = processes.run(count, count_traffic, length, settings)
    given: dict[str, Any] = {"heads": 2, "dim": 4, "value_dim": 6, "is_causal": is_causal, "block_size": block_size}
    for rank, (forward, backward, _) in enumerate(found):
        told = TOLD if block_size is not None else 0
        assert forward == count_sent([length] * count, rank, **given) + told
        assert backward == count_sent([length] * count, rank, **given, backward=True)


def test_states_do_not_grow_with_the_length_and_keys_do() -> None:
    shape = SHAPES["llama-8b"]
    short, long = Job(2**17), Job(2**23)
    for name in ("lln", "lln_diag"):
        assert count_layer(name, shape, short, 8) == count_layer(name, shape, long, 8)
    assert count_layer("softmax", shape, long, 8) == 64 * count_layer("softmax", shape, short, 8)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("training", [True, False])
def test_the_longest_that_fits_just_fits(name: str, training: bool) -> None:
    shape, job = SHAPES["bert-large"], Job(4096, training=training)
    longest = find_longest(name, shape, job, CLUSTER)
    for more, fits in ((0, True), (1024 * CLUSTER.cards, False)):
        memory = count_memory(name, shape, dataclasses.replace(job, length=longest + more), CLUSTER.cards)
        assert (memory <= CLUSTER.card.memory) == fits
    none = dataclasses.replace(CLUSTER, card=dataclasses.replace(CLUSTER.card, memory=1e6))
    assert find_longest(name, shape, job, none) == 0


def test_softmax_takes_quadratic_time_and_lln_linear_time() -> None:
    def seconds(name: str, length: int) -> float:
        found: float = estimate(name, SHAPES["bert-base"], Job(length), CLUSTER)["attention_seconds"]
        return found

    assert seconds("softmax", 2**20) == pytest.approx(16 * seconds("softmax", 2**18))
    assert seconds("lln", 2**20) == pytest.approx(4 * seconds("lln", 2**18))


def test_the_shape_of_a_model_is_that_of_its_config() -> None:
    transformers = pytest.importorskip("transformers")
    assert Shape.read(transformers.BertConfig()) == SHAPES["bert-base"]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=96, vocab_size=50, tie_word_embeddings=False)
    shape = Shape.read(config)
    model = transformers.LlamaForCausalLM(config)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) - norms


@pytest.mark.parametrize(("kind", "gated"), [("Bert", False), ("Llama", True)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_kept_for_the_backward_is_what_real_layers_keep(kind: str, gated: bool, checkpointing: bool) -> None:
    transformers = pytest.importorskip("transformers")
    import lln.hf

    rows, width, kept = 512, 128, []
    for layers in (1, 2):
        sizes = {"hidden_size": width, "num_attention_heads": 4, "intermediate_size": 3 * width, "vocab_size": 50}
        config = getattr(transformers, f"{kind}Config")(**sizes, num_hidden_layers=layers, use_cache=False)
        own: dict[str, Any] = {"statistics": "fixed"} if gated else {}
        model = lln.hf.convert(getattr(transformers, f"{kind}Model")(config), "lln", **own).bfloat16().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        kept.append(count_kept(model, torch.randint(1, 50, (1, rows))))
    shape = dataclasses.replace(Shape.read(config), gated=gated)
    expected = Job(rows, checkpointing=checkpointing).count_kept(shape) * rows * width * 2
    assert kept[1] - kept[0] == pytest.approx(expected, rel=0.05)


def count_kept(model: Any, tokens: torch.Tensor) -> int:
    """Bytes that a backward needs beside the weights."""
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            held[t.untyped_storage().data_ptr()] = t  # so that its memory goes to nobody else
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(tokens)
    assert out.last_hidden_state.requires_grad
    return sum(t.untyped_storage().nbytes() for t in held.values())


MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-15-h200" / "million" / "bench.json"


def test_times_are_those_that_were_measured_on_one_card() -> None:
    pieces = read_pieces(MEASURED, causal=False)
    stored = json.loads(MEASURED.read_text())["rows"]
    job, alone = Job(2**20, checkpointing=False), dataclasses.replace(CLUSTER, cards=1)
    for name, shown in (("lln", "LLN"), ("lln_diag", "LLN+Diag")):
        [training] = [r["device_ms"]["training"] for r in stored if (r["attention"], r["length"]) == (shown, 2**20)]
        found = estimate(name, SHAPES["bert-base"], job, alone, pieces)["attention_seconds"]
        assert found == pytest.approx(12 * 1e-3 * training["median"])
        many = estimate(name, SHAPES["bert-base"], dataclasses.replace(job, length=2**26), replace_cards(64), pieces)
        assert many["attention_seconds"] == pytest.approx(found)  # a million tokens each
    with pytest.raises(Refused, match="heads of 64 channels, and the model's have 128"):
        plan_cluster(SHAPES["llama-8b"], job, CLUSTER, pieces)
    with pytest.raises(Refused, match="has no causal LLN"):
        read_pieces(MEASURED, causal=True)


def replace_cards(count: int) -> Cluster:
    return dataclasses.replace(CLUSTER, cards=count)


def test_the_command_shows_every_attention_and_what_it_assumes() -> None:
    shown = run_command("plan", "bert-base", "--length", 2**20, "--cards", 16)
    assert shown.exit_code == 0, shown.output
    for words in ("softmax, ring attention", "LLN+Diag", "1,048,576 tokens over 16 x h200", "Assumed: "):
        assert words in shown.stdout
    found = json.loads(run_command("plan", "llama-1b", "--json", "--inference", "--card", "a100").stdout)
    assert [each["attention"] for each in found["attentions"]] == list(ATTENTIONS)
    assert found["cluster"]["card"]["memory"] == CARDS["a100"].memory


def test_what_cannot_be_planned_is_said(tmp_path: Path) -> None:
    tries = {
        ("--card", "abacus"): "must be one of a100, h100, h200, rtx4090; got 'abacus'",
        (str(tmp_path),): "is neither of bert-base",
        ("--pieces", str(tmp_path)): "is not the bench.json that `lln bench --out` stores",
        ("--network", "-1"): "--network",
    }
    for arguments, words in tries.items():
        answer = run_command("plan", *arguments)
        assert answer.exit_code == 2
        assert words in " ".join(answer.stderr.replace("│", " ").split())
