"""record sees what attention computes, in every kind of model, changes nothing, and leaves nothing behind."""

import json
import math
import sys
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import AttentionInterface

import lln
from helpers.hf_models import ALL, BERT, VOCABULARY, build_model, expect_guess, make_batch, needs_t5, output, tokens
from lln.instruments import Observation, record
from lln.instruments.observation import read_mask


def bits(p: Tensor) -> Tensor:
    """Entropy of each row, independently of the instruments."""
    return -(p.double() * p.double().clamp_min(1e-300).log2()).sum(-1)


def mean_bits(p: Tensor, rows: Tensor | None = None) -> Tensor:
    """[H], of P [B, H, N, M]: the mean over samples of the mean over the rows [B, N] that count."""
    rows = torch.ones(p.shape[0], p.shape[2], dtype=torch.bool) if rows is None else rows
    return (torch.where(rows[:, None], bits(p), 0.0).sum(-1) / rows.sum(1)[:, None]).mean(0)


def column(rec: Any, name: str) -> Tensor:
    """[calls of layers, heads]"""
    rows = rec.rows()
    heads = max(row["head"] for row in rows) + 1
    values = [math.nan if row[name] is None else row[name] for row in rows]
    return torch.tensor(values, dtype=torch.float64).view(-1, heads)


def attentions(result: Any) -> list[Tensor]:
    """All P of a transformers output in the order in which layers run."""
    if getattr(result, "encoder_attentions", None) is None:
        return list(result.attentions)
    both = zip(result.decoder_attentions, result.cross_attentions, strict=True)
    return [*result.encoder_attentions, *(p for pair in both for p in pair)]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "lln", "lln_diag"])
def test_entropy_is_that_of_the_weights_the_model_gives(kind: str, implementation: str) -> None:
    model, x = build_model(kind, implementation), make_batch(kind)
    with torch.no_grad():
        before = output(model, **x)
        with record(model, samples=None) as rec:
            after = output(model, **x)
        weighing = build_model(kind, "eager") if implementation == "sdpa" else model
        p = attentions(weighing(**x, output_attentions=True))
    assert torch.equal(before, after)
    mask = x.get("attention_mask")
    encoder = 0 if mask is None else mask.shape[1]
    rows = [mask.bool() if mask is not None and one.shape[2] == encoder else None for one in p]
    expected = torch.stack([mean_bits(one, which) for one, which in zip(p, rows, strict=True)])
    assert (column(rec, "entropy") - expected).abs().max() < 1e-6  # vit and llama take softmax in float32
    kinds = {row["attention"] for row in rec.rows()}
    assert kinds <= {"softmax" if implementation in ("eager", "sdpa") else implementation, "lln"}


def test_numbers_of_one_head_follow_from_its_weights() -> None:
    model, x = build_model("bert", "eager"), make_batch("bert")
    with torch.no_grad(), record(model, samples=None, keep=True) as rec:
        p = model(**x, output_attentions=True).attentions[1]
    _, _, seen = rec.observations[1]
    assert isinstance(seen, Observation)
    assert seen.layer == "encoder.layer.1.attention.self"
    samples: dict[str, list[float]] = {"spectral_gap": [], "log_variance": [], "sigma_q": [], "max_entropy": []}
    for sample, length in enumerate(x["attention_mask"].sum(1).tolist()):
        own = p[sample, 2, :length, :length]
        samples["spectral_gap"].append(1 - torch.linalg.eigvals(own).abs().sort(descending=True).values[1].item())
        samples["log_variance"].append(own.log().flatten().var().item())
        samples["sigma_q"].append(seen.query[sample, 2, :length].std().item())
        samples["max_entropy"].append(math.log2(length))
    row = rec.rows()[4 + 2]
    assert row["head"] == 2
    for name, values in samples.items():
        assert row[name] == pytest.approx(sum(values) / 3, rel=1e-9)
    scores = torch.stack([(seen.query @ seen.key.transpose(2, 3))[0, 2] * 8**-0.5])
    alone = record(model)
    with torch.no_grad(), alone:
        model(**x)
    assert alone.rows()[6]["temperature"] == pytest.approx(scores.var(correction=0).item() ** -0.5, rel=1e-9)


def test_causal_and_cross_attention_say_what_they_have() -> None:
    with torch.no_grad(), record(build_model("bart", "sdpa"), samples=None) as rec:
        rec.model(**make_batch("bart"))
    for row in rec.rows():
        assert (row["spectral_gap"] is None) == ("encoder_attn" in row["layer"])
        assert row["alpha"] is row["beta"] is None
    causal = [row for row in rec.rows() if row["layer"] == "decoder.layers.0.self_attn"]
    assert causal[0]["max_entropy"] == pytest.approx(sum(math.log2(n) for n in range(1, 10)) / 9)


def test_alpha_and_beta_are_those_in_use() -> None:
    model, x = build_model("bert", "lln_diag"), make_batch("bert")
    lln.hf.convert(model, statistics="fixed", alpha=torch.tensor([1.0, 2.0, 3.0, 4.0]), beta=1.5)
    with torch.no_grad(), record(model) as rec:
        model(**x)
    assert column(rec, "alpha").tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2
    assert column(rec, "beta").tolist() == [[1.5] * 4] * 2


def test_running_statistics_are_those_that_the_step_used_and_stay_as_they_would_be() -> None:
    torch.manual_seed(0)
    layers = [lln.LLNAttention(2, 8, statistics="running") for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    with record(layers[0]) as rec:
        for step in range(3):
            q, k, v = torch.randn(3, 2, 2, 9, 8) * (step + 1)
            assert torch.equal(layers[0](q, k, v), layers[1](q, k, v))
            alpha, _ = layers[1].coefficients(q, k)
            assert [row["alpha"] for row in rec.rows()[-2:]] == pytest.approx(alpha.flatten().tolist())
    for name, buffer in layers[1].named_buffers():
        assert torch.equal(buffer, layers[0].get_buffer(name))


@pytest.mark.parametrize("implementation", ["sdpa", "lln_diag"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_is_the_same_to_the_bit_and_recomputation_is_not_recorded(
    implementation: str, reentrant: bool | None
) -> None:
    def train(watched: bool) -> tuple[list[Tensor], Any]:
        model = build_model("bert", implementation, tf.AutoModelForMaskedLM).float().train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(1)
        rec = record(model, every=2)
        if watched:
            rec.__enter__()
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            x = tokens(step)
            loss = model(input_ids=x, labels=x).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        rec.__exit__()
        return [p.detach() for p in model.parameters()], rec

    (plain, _), (watched, rec) = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [(row["step"], row["call"]) for row in rec.rows()] == [(0, 0)] * 8 + [(2, 0)] * 8


def test_nothing_is_left_behind_also_when_an_exception_passes() -> None:
    model, x = build_model("bert", "sdpa"), make_batch("bert")
    before, forwards = AttentionInterface.get_interface, [m.forward for m in model.modules()]
    rec = record(model)

    def interrupt() -> None:
        with rec:
            assert AttentionInterface.get_interface is not before
            model(**x)
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        interrupt()
    assert AttentionInterface.get_interface is before
    assert [m.forward for m in model.modules()] == forwards
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    count = len(rec.rows())
    model(**x)
    assert len(rec.rows()) == count == 8


def test_other_models_are_not_seen_and_recorders_do_not_disturb_each_other() -> None:
    one, two, x = build_model("bert", "sdpa"), build_model("bert", "sdpa"), make_batch("bert")
    first, second = record(one), record(two)
    plain = AttentionInterface.get_interface
    with torch.no_grad():
        first.__enter__()
        second.__enter__()
        one(**x)
        first.__exit__()  # not the last one in
        two(**x)
        one(**x)
        second.__exit__()
    assert len(first.rows()) == len(second.rows()) == 8
    assert AttentionInterface.get_interface is plain


def test_shared_layers_are_told_apart_by_their_call() -> None:
    model = build_model("albert", "sdpa")
    with torch.no_grad(), record(model) as rec:
        model(**make_batch("albert"))
    assert len({row["layer"] for row in rec.rows()}) == 1
    assert [row["call"] for row in rec.rows()] == [0] * 4 + [1] * 4


@needs_t5
def test_biases_of_positions_are_part_of_the_weights() -> None:
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    for implementation in ("eager", "sdpa"):
        config = tf.T5Config(**shape, decoder_start_token_id=0)
        model = tf.AutoModel.from_config(config, attn_implementation=implementation).double().eval()
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.data = torch.randn(parameter.shape).double()
        x = make_batch("bart")
        with torch.no_grad(), record(model, samples=None) as rec:
            model(**x)
        with torch.no_grad():
            model.set_attn_implementation("eager")
            p = attentions(model(**x, output_attentions=True))
        rows = [x["attention_mask"].bool()] * 2 + [None] * 4
        expected = torch.stack([mean_bits(one, which) for one, which in zip(p, rows, strict=True)])
        assert (column(rec, "entropy") - expected).abs().max() < 1e-6
        gaps = column(rec, "spectral_gap")
        assert gaps[:2].isfinite().all()
        first = p[0][0, 0]
        own = torch.linalg.eigvals(first).abs().sort(descending=True).values[1].item()
        if implementation == "eager":
            alone = record(model)
            with torch.no_grad(), alone:
                model(**x)
            assert alone.rows()[0]["spectral_gap"] == pytest.approx(1 - own, abs=1e-6)


def test_packed_rows_and_windows_count_as_the_mask_has_them() -> None:
    model = build_model("llama", "sdpa")
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    x = {"input_ids": tokens(0, 1, 12), "position_ids": positions, "use_cache": False}
    with torch.no_grad(), record(model) as rec:
        model(**x)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        p = model(**x, output_attentions=True).attentions
    assert p[0][0, 0, 7, :5].abs().max() == 0
    assert (column(rec, "entropy") - torch.stack([mean_bits(one) for one in p])).abs().max() < 1e-6
    assert column(rec, "spectral_gap").abs().max() < 1e-6  # two sequences never mix


def test_packed_lln_sequences_are_measured_one_by_one() -> None:
    torch.manual_seed(0)
    layer = lln.LLNAttention(2, 8)
    parts = [torch.randn(3, 1, 2, n, 8) for n in (5, 9)]
    q, k, v = torch.cat(parts, 3)
    with record(layer, samples=None) as rec:
        layer(q, k, v, cu_seqlens=torch.tensor([0, 5, 14], dtype=torch.int32))
    with record(layer, samples=None) as alone:
        for part in parts:
            layer(*part)
    assert [row["call"] for row in rec.rows()] == [0, 0, 1, 1]
    for one, other in zip(rec.rows(), alone.rows(), strict=True):
        for name in ("entropy", "alpha", "beta", "spectral_gap", "sigma_k"):
            assert one[name] == pytest.approx(other[name], rel=1e-6)


def test_generation_with_a_growing_cache_shows_each_new_row() -> None:
    model = build_model("llama", "sdpa")
    with record(model) as rec:
        model.generate(tokens(0, 1, 7), max_new_tokens=3, do_sample=False, pad_token_id=0)
    steps = sorted({row["step"] for row in rec.rows()})
    assert steps == [0, 1, 2]
    last = [row for row in rec.rows() if row["step"] == 2]
    assert all(row["max_entropy"] == pytest.approx(math.log2(9)) and row["spectral_gap"] is None for row in last)


def make_encoder(torch_layers: int, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 20, **options)
    return nn.TransformerEncoder(layer, torch_layers, enable_nested_tensor=options.get("batch_first", False)).eval()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_encoders_keep_their_fused_path(norm_first: bool, grad: bool) -> None:
    model = make_encoder(2, batch_first=True, norm_first=norm_first)
    x, padding = torch.randn(3, 7, 16), torch.arange(7) >= torch.tensor([[7], [4], [6]])
    with torch.set_grad_enabled(grad):
        before = model(x, src_key_padding_mask=padding)
        with record(model, samples=None) as rec:
            after = model(x, src_key_padding_mask=padding)
    assert torch.equal(before, after)
    assert [row["layer"] for row in rec.rows()[::4]] == ["layers.0.self_attn", "layers.1.self_attn"]
    # The first layer from its weights; rows of padding do not count.
    first = model.layers[0]
    h = first.norm1(x) if norm_first else x
    _, p = first.self_attn(h, h, h, padding, average_attn_weights=False)
    assert (column(rec, "entropy")[0] - mean_bits(p, ~padding)).abs().max() < 1e-5
    assert column(rec, "spectral_gap").isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"kdim": 12, "vdim": 10},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
    ],
)
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "float", "heads"])
def test_torch_multihead_attention(options: dict[str, Any], masks: str) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, dtype=torch.float64, **options)
    shape = (3, 6) if model.batch_first else (6, 3)
    query, key, value = (torch.randn(*shape, d).double() for d in (16, model.kdim, model.vdim))
    one_sequence = model.kdim == 16
    if one_sequence:
        key = value = query
    given: dict[str, Any] = {}
    if masks == "padding":
        given["key_padding_mask"] = torch.arange(6) >= torch.tensor([[6], [4], [5]])
    if masks == "causal":
        given["attn_mask"] = torch.ones(6, 6, dtype=torch.bool).triu(1)
    if masks == "float":
        given["attn_mask"] = torch.randn(6, 6).double()
    if masks == "heads":
        given["attn_mask"] = torch.rand(12, 6, 6) > 0.7
        given["attn_mask"][..., 0] = False
    with record(model, samples=None) as rec:
        _, p = model(query, key, value, average_attn_weights=False, **given)
    rows = ~given["key_padding_mask"] if masks == "padding" and p.shape[-1] == 6 and one_sequence else None
    assert (column(rec, "entropy")[0] - mean_bits(p, rows)).abs().max() < 1e-9
    square = one_sequence and p.shape[-1] == 6
    assert bool(column(rec, "spectral_gap").isfinite().all()) == square


def test_lln_multihead_attention_and_unbatched_inputs() -> None:
    torch.manual_seed(0)
    for model in (lln.MultiheadAttention(16, 2, matching="entropy"), nn.MultiheadAttention(16, 2)):
        x = torch.randn(9, 16)
        with record(model) as rec:
            _, p = model(x, x, x, average_attn_weights=False)
        assert (column(rec, "entropy")[0] - mean_bits(p[None])).abs().max() < 1e-5
        assert rec.rows()[0]["layer"] == "MultiheadAttention"
        other = torch.randn(9, 16)
        with record(model) as rec:
            model(x, other, other)
        assert rec.rows()[0]["spectral_gap"] is None  # another sequence, though of the same length


def test_learned_mixes_are_measured() -> None:
    torch.manual_seed(0)
    for mix in ("ratio", "scales"):
        layer = lln.LLNAttention(2, 8, block_size=4, mix=mix)
        with record(layer) as rec, torch.no_grad():
            q, k, v = torch.randn(3, 2, 2, 11, 8)
            layer(q, k, v)
            alpha, beta = layer.coefficients(q, k)
        p = lln.instruments.lln_map(q[:1], k[:1], alpha[:1], beta[:1], 4, mix=0.5)
        assert column(rec, "entropy")[0].tolist() == pytest.approx(lln.instruments.entropy(p)[0].tolist(), rel=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_models_that_ignore_the_interface_are_run_once_more_and_verified(training: bool) -> None:
    torch.manual_seed(0)
    shape = {k: v for k, v in BERT.items() if k != "pad_token_id"}
    model = tf.MPNetModel(tf.MPNetConfig(**shape)).train(training)
    model.encoder.relative_attention_bias.weight.data = 3 * torch.randn(32, 4)
    x = make_batch("bert")
    with torch.no_grad():
        torch.manual_seed(1)
        before = model(**x)[0]
        torch.manual_seed(1)
        with record(model, samples=None) as rec:
            after = model(**x)[0]
    assert torch.equal(before, after)
    assert all(m.training == training for m in model.modules())
    assert [row["layer"] for row in rec.rows()[::4]] == [f"encoder.layer.{i}.attention.attn" for i in range(2)]
    if not training:
        with torch.no_grad():
            p = model(**x, output_attentions=True).attentions
        expected = torch.stack([mean_bits(one, x["attention_mask"].bool()) for one in p])
        assert (column(rec, "entropy") - expected).abs().max() < 1e-5


class Own(nn.Module):
    """Attention as many write it."""

    def __init__(self, causal: bool, rotated: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.n_head, self.causal, self.rotated = 4, causal, rotated

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.rotated:
            q = q.roll(1, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return result


def test_a_module_of_ones_own_is_read_by_the_names_of_its_layers_or_refused() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9, 16)
    for causal in (False, True):
        with record(Own(causal)) as rec:
            rec.model(x)
        largest = sum(math.log2(n) for n in range(1, 10)) / 9 if causal else math.log2(9)
        assert rec.rows()[0]["max_entropy"] == pytest.approx(largest)
    with record(Own(False, rotated=True)) as rec, pytest.raises(ValueError, match="is not what it computes") as problem:
        rec.model(x)
    assert "\n" not in str(problem.value)


def test_half_precision_and_autocast() -> None:
    model, x = build_model("bert", "sdpa").bfloat16(), make_batch("bert")
    with torch.no_grad(), record(model) as rec:
        model(**x)
    model = model.float()
    with torch.no_grad(), record(model) as exact:
        model(**x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), record(model) as mixed:
        model(**x)
    for other in (rec, mixed):
        assert (column(other, "entropy") - column(exact, "entropy")).abs().max() < 0.05


def test_numbers_that_are_not_finite_are_none_and_training_goes_on() -> None:
    model, x = build_model("bert", "sdpa"), make_batch("bert")
    model.encoder.layer[1].attention.self.query.weight.data[:8] = torch.nan
    with torch.no_grad(), record(model) as rec:
        model(**x)
    assert rec.rows()[0]["entropy"] is not None
    assert rec.rows()[4]["entropy"] is None
    json.dumps(rec.rows(), allow_nan=False)


def test_the_table_has_a_row_for_each_step_layer_and_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build_model("bert", "sdpa"), make_batch("bert")
    with torch.no_grad(), record(model, every=3, instruments=("entropy",)) as rec:
        for _ in range(7):
            model(**x)
    table = rec.table()
    assert table.groupby(["step", "layer", "head"]).size().tolist() == [1] * (3 * 2 * 4)
    assert sorted(set(table["step"])) == [0, 3, 6]
    assert table["entropy"].notna().all()
    assert table["alpha"].isna().all()
    assert table["spectral_gap"].isna().all()
    assert table.dtypes["alpha"] == "float64"
    rec.clear()
    rec.step = 9
    with torch.no_grad(), rec:
        model(**x)
    assert {row["step"] for row in rec.rows()} == {9}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lln-attention\[instruments\]'"):
        rec.table()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be a positive int; got 0"),
        ({"samples": 0}, "samples must be a positive int; got 0"),
        ({"instruments": ("energy",)}, "instruments must be some of sigma_q, .*; got 'energy'"),
        ({"instruments": "entropy"}, "instruments must be some of"),
        ({"model": 3}, "model must be a torch.nn.Module; got int"),
        ({"model": nn.Linear(2, 2)}, "no attention of Linear can be observed"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    given = {"model": nn.MultiheadAttention(4, 2)} | arguments
    with pytest.raises((ValueError, TypeError), match=message) as problem, record(**given):
        pass
    assert "\n" not in str(problem.value)


def test_what_cannot_be_read_is_refused_in_one_sentence() -> None:
    model, x = build_model("bert", "sdpa"), make_batch("bert")
    AttentionInterface.register("other", lambda *args, **kwargs: (args[1].transpose(1, 2), None))
    model.config._attn_implementation_internal = "other"
    with record(model), pytest.raises(ValueError, match="'other', which is not known to be softmax or LLN"):
        model(**x)
    layer = lln.LLNAttention(2, 8, statistics="fixed")
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    _, state = layer(q, k, v, is_causal=True, return_state=True)
    with record(layer), pytest.raises(ValueError, match="continues from a state"):
        layer(q, k, v, is_causal=True, state=state)
    compiled: Any = torch.compile(layer, backend="eager")
    with pytest.raises(ValueError, match="a compiled model cannot be observed"), record(compiled):
        pass
    with pytest.raises(RuntimeError, match="already active"), record(layer) as rec, rec:
        pass


def test_masks_of_every_form_say_the_same() -> None:
    shown = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    lowest = torch.finfo(torch.float32).min
    for mask, is_causal in (
        (shown, False),
        (shown.int(), False),
        (shown[:, None, None], False),
        (shown[:, None, None].expand(2, 1, 5, 5), False),
        (torch.where(shown[:, None, None], 0.0, lowest), False),
        (torch.where(shown[:, None, None], 0.0, -torch.inf), False),
        (shown[:, None, None] & causal, True),
        (torch.where(shown[:, None, None] & causal, 0.0, lowest), True),
        (shown[:, None, None] & shown[:, None, :, None], False),  # padded rows see nothing
    ):
        found = read_mask(mask, 5, 5, True, False)
        assert found.is_causal == is_causal
        assert found.bias is None
        assert found.key_mask is not None
        assert torch.equal(found.key_mask, shown)
    assert read_mask(torch.ones(2, 5), 5, 5, True, True).key_mask is None
    window = causal & ~causal.tril(-3)
    bias = read_mask(window[None, None], 5, 5, True, False).bias
    assert bias is not None
    assert torch.equal(bias == 0, window[None, None])
    later = torch.ones(2, 5, dtype=torch.bool).tril(3)  # two queries after three cached keys
    assert read_mask(later[None, None], 2, 5, True, False).is_causal
    with pytest.raises(ValueError, match="2 or 4 dimensions"):
        read_mask(torch.ones(5), 5, 5, True, False)


def test_a_decoder_that_was_not_converted_is_recorded_with_its_guess() -> None:
    with expect_guess():
        model = tf.GPT2Model(
            tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2)
        )
        model.set_attn_implementation("lln")
    with torch.no_grad(), record(model) as rec:
        model(input_ids=tokens(0, 1, 9))
    assert column(rec, "alpha")[0].tolist() == pytest.approx([2.135477] * 4, abs=1e-5)


def test_statistics_of_a_batch_are_recorded() -> None:
    """One alpha and one beta for all samples and heads."""
    layer = lln.LLNAttention(2, 8, statistics="batch", block_size=4).eval()
    q, k, v = (torch.randn(3, 2, 10, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    alpha, beta = (float(c) for c in layer.coefficients(q, k))
    with record(layer) as recorder:
        layer(q, k, v)
    rows = recorder.rows()
    assert len(rows) == 2
    assert [(row["alpha"], row["beta"]) for row in rows] == [pytest.approx((alpha, beta), rel=1e-6)] * 2
    assert all(0 < row["entropy"] < row["max_entropy"] for row in rows)
