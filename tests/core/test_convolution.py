"""The convolution of queries, keys and values is its formula written out, wherever it is used."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.nn import functional

import lln
import lln.hf
from helpers.hf_models import build_model, expect_guess, make_batch, output, tokens
from helpers.recorded import assert_instruments_see_p
from helpers.runs import assert_goes_on
from helpers.tensors import make_inputs, relative_error
from helpers.untyped import attention, mechanism, naive_attention
from lln.lab.paper.jobs import configure
from lln.lab.recipes import recipe
from lln.lab.train.config import change
from lln.lab.train.loop import find_decaying
from lln.lab.train.run import train
from lln.nn.convolution import convolve

WIDE = torch.float64
OFFSETS = torch.tensor([0, 5, 5, 12, 13], dtype=torch.int32)


def make_moved(heads: int, key_heads: int, dim: int, width: int, **options: Any) -> lln.LLNAttention:
    """With kernels that are far from zero."""
    made = lln.LLNAttention(heads, dim, num_key_heads=key_heads, convolution=width, dtype=WIDE, **options)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (made.conv_q, made.conv_k, made.conv_v):
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw, dtype=WIDE))
    return made.eval()


def convolve_by_hand(
    x: Tensor, kernel: Tensor, is_causal: bool, mask: Tensor | None = None, offsets: Tensor | None = None
) -> Tensor:
    """Number by number, each token asking its neighbours."""
    batch, heads, length, dim = x.shape
    width = kernel.shape[-1]
    sequence = [0] * length
    for number, start in enumerate([] if offsets is None else offsets.tolist()[:-1]):
        sequence[start:] = [number] * (length - start)
    out = x.clone()
    for b in range(batch):
        for i in range(length):
            for w in range(width):
                j = i + w - (width - 1 if is_causal else (width - 1) // 2)
                if not 0 <= j < length or sequence[i] != sequence[j] or (mask is not None and not mask[b, j]):
                    continue
                for h in range(heads):
                    for c in range(dim):
                        out[b, h, i, c] += kernel[h, c, w].item() * x[b, h, j, c].item()
    return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "width"), [(13, 5), (7, 3), (4, 9), (1, 3), (0, 5)])
def test_it_is_the_formula_written_out(length: int, width: int, is_causal: bool) -> None:
    x = make_inputs(2, 3, 3, length, 4)[0]
    kernel = torch.randn(3, 4, width, dtype=WIDE, generator=torch.Generator().manual_seed(2))
    found = convolve(x, kernel, is_causal=is_causal, mask=None)
    assert found.shape == x.shape
    assert torch.allclose(found, convolve_by_hand(x, kernel, is_causal), rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", ["masked", "packed", "both"])
def test_hidden_tokens_and_other_sequences_reach_nobody(how: str, is_causal: bool) -> None:
    x = make_inputs(1 if how != "masked" else 2, 2, 2, 13, 3)[0]
    kernel = torch.randn(2, 3, 5, dtype=WIDE, generator=torch.Generator().manual_seed(2))
    mask = torch.rand(len(x), 13, generator=torch.Generator().manual_seed(3)) > 0.4 if how != "packed" else None
    offsets = OFFSETS if how != "masked" else None
    found = convolve(x, kernel, is_causal=is_causal, mask=mask, cu_seqlens=offsets)
    assert torch.allclose(found, convolve_by_hand(x, kernel, is_causal, mask, offsets), rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients(is_causal: bool, packed: bool) -> None:
    x, kernel = make_inputs(1, 2, 2, 7, 3)[0], torch.randn(2, 3, 5, dtype=WIDE)
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32) if packed else None
    mask = torch.arange(7)[None] != 2

    def run(x: Tensor, kernel: Tensor) -> Tensor:
        return convolve(x, kernel, is_causal=is_causal, mask=mask, cu_seqlens=offsets)

    given = (x.requires_grad_(), kernel.requires_grad_())
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_rounds_as_little_as_torch(dtype: torch.dtype) -> None:
    """Forward and backward; torch: x + conv1d(x) in the same dtype."""
    draw = torch.Generator().manual_seed(0)
    exact = [torch.randn(shape, generator=draw) for shape in ((2, 4, 96, 8), (4, 8, 5), (2, 4, 96, 8))]
    results = []
    for kind in ("exact", "ours", "torch"):
        wanted = torch.float64 if kind == "exact" else dtype
        x, kernel, g = (t.to(dtype).to(wanted) for t in exact)
        x.requires_grad_()
        kernel.requires_grad_()
        if kind == "torch":
            rows = x.transpose(2, 3).flatten(1, 2)  # [B, H D, N]
            near = functional.conv1d(rows, kernel.flatten(0, 1).unsqueeze(1), padding=2, groups=32)
            out = x + near.unflatten(1, (4, 8)).transpose(2, 3)
        else:
            out = convolve(x, kernel, is_causal=False, mask=None)
        assert out.dtype == wanted
        out.backward(g)
        results.append((out.detach(), x.grad, kernel.grad))
    for want, ours, plain in zip(*results, strict=True):
        assert relative_error(ours, want) <= 2 * relative_error(plain, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("overlap", [False, True])
def test_autocast_and_a_compiled_graph_give_the_same(overlap: bool) -> None:
    q, k, v = (t.float() for t in make_inputs(2, 4, 2, 24, 8))
    module = make_moved(4, 2, 8, 5, block_size=8, overlap=overlap).float()
    mask = torch.arange(24) < torch.tensor([[24], [17]])
    want = module(q, k, v, key_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = module(*(t.bfloat16() for t in (q, k, v)), key_mask=mask)
    assert narrow.dtype == torch.bfloat16
    assert relative_error(narrow, want) < 2e-2
    narrow.sum().backward()
    assert module.conv_q.grad is not None
    assert module.conv_q.grad.dtype == torch.float32
    torch.compiler.reset()
    compiled: Any = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert relative_error(compiled(q, k, v, key_mask=mask), want) < 1e-6


@pytest.mark.parametrize(("heads", "key_heads", "dim", "value_dim"), [(3, 3, 5, 5), (4, 2, 8, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_that_of_the_convolved(
    heads: int, key_heads: int, dim: int, value_dim: int, is_causal: bool
) -> None:
    """alpha and beta are those of the convolved queries and keys, and the blocks use them, too."""
    q, k, v = make_inputs(2, heads, key_heads, 13, dim, value_dim)
    mask = torch.arange(13) < torch.tensor([[13], [9]])
    statistics: Literal["fixed", "sample"] = "fixed" if is_causal else "sample"
    module = make_moved(
        heads, key_heads, dim, 5, statistics=statistics, block_size=4, mix=0.3, value_dim=value_dim, backend="eager"
    )
    plain = lln.LLNAttention(heads, dim, num_key_heads=key_heads, statistics=statistics, backend="eager")
    kernels = module.conv_q, module.conv_k, module.conv_v
    near = [convolve_by_hand(t, kernel.detach(), is_causal, mask) for t, kernel in zip((q, k, v), kernels, strict=True)]
    alpha, beta = plain.coefficients(*near[:2], key_mask=mask, is_causal=is_causal)
    want = naive_attention(*near, alpha, beta, block_size=4, mix=0.3, key_mask=mask, is_causal=is_causal).out
    out = module(q, k, v, key_mask=mask, is_causal=is_causal)
    assert relative_error(out, want) < 1e-12
    found = module.coefficients(q, k, key_mask=mask, is_causal=is_causal)
    assert torch.allclose(found[0], alpha, rtol=1e-12)
    assert torch.allclose(found[1], beta, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("statistics", ["sample", "batch", "running", "fixed"])
def test_it_starts_at_nothing_to_the_last_bit(statistics: Any, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    # As models have them: heads beside each other in memory.
    q, k, v = (torch.randn(2, 9, h, 8, generator=draw).to(dtype).transpose(1, 2) for h in (4, 2, 2))
    options: dict[str, Any] = {"num_key_heads": 2, "statistics": statistics, "block_size": 4, "dtype": dtype}
    near, plain = (lln.LLNAttention(4, 8, **options, convolution=width) for width in (5, None))
    for mask in (None, torch.arange(9) < torch.tensor([[9], [6]])):
        assert torch.equal(near(q, k, v, key_mask=mask), plain(q, k, v, key_mask=mask))


@pytest.mark.parametrize("statistics", ["sample", "fixed"])
def test_padding_packing_and_batch_mates_are_invisible(statistics: Any) -> None:
    module = make_moved(4, 2, 6, 5, statistics=statistics, block_size=4)
    q, k, v = make_inputs(2, 4, 2, 17, 6)
    alone = module(q[:1, :, 3:14], k[:1, :, 3:14], v[:1, :, 3:14])
    mask = torch.zeros(2, 17, dtype=torch.bool)
    mask[0, 3:14], mask[1] = True, True
    for loud in (1.0, 50.0):
        noisy = [t.clone() for t in (q, k, v)]
        for t in noisy:
            t[0, :, :3] *= loud
            t[0, :, 14:] *= loud
            t[1] *= loud
        assert relative_error(module(*noisy, key_mask=mask)[:1, :, 3:14], alone) < 1e-13
    q, k, v = make_inputs(1, 4, 2, 13, 6)
    whole = module(q, k, v, cu_seqlens=OFFSETS)
    for start, end in [(0, 5), (5, 12), (12, 13)]:
        part = module(*(t[:, :, start:end] for t in (q, k, v)))
        assert relative_error(whole[:, :, start:end], part) < 1e-13


def test_causal_attention_does_not_see_the_future() -> None:
    module = make_moved(4, 2, 6, 5, statistics="fixed", block_size=4)
    q, k, v = make_inputs(2, 4, 2, 12, 6)
    whole = module(q, k, v, is_causal=True)
    for length in (1, 3, 7, 11):
        prefix = module(*(t[:, :, :length] for t in (q, k, v)), is_causal=True)
        assert relative_error(whole[:, :, :length], prefix) < 1e-13


def test_running_statistics_are_those_of_the_convolved() -> None:
    module = make_moved(4, 2, 6, 5, statistics="running")
    module.train()
    q, k, v = make_inputs(2, 4, 2, 30, 6)
    module(q, k, v)
    module.eval()
    near = convolve_by_hand(k, module.conv_k.detach(), False)
    want = near.transpose(0, 1).flatten(1).var(1)
    assert torch.allclose(module.running_variance_k.double(), want, rtol=1e-5)


def test_batches_measure_the_convolved_and_data_matching_refuses_them() -> None:
    batch = {"input_ids": tokens(0)}
    model = build_model("llama", "sdpa")
    lln.hf.convert(model, "lln", statistics="running", convolution=5, momentum=1.0, batches=[batch])
    first = next(m.lln for m in model.modules() if hasattr(m, "lln"))
    assert not first.has_moved()
    with torch.no_grad():
        for name in ("conv_q", "conv_k"):
            getattr(first, name).fill_(0.5)
    assert first.has_moved()
    before = first.running_variance_k.clone()
    lln.hf.convert(model, batches=[batch])
    measured = first.running_variance_q.clone(), first.running_variance_k.clone()
    assert (measured[1] / before > 1.5).all()
    model.train()
    model(**batch, use_cache=False)  # with a momentum of 1 its averages are those of this batch
    model.eval()
    assert torch.allclose(first.running_variance_q, measured[0], rtol=1e-4)
    assert torch.allclose(first.running_variance_k, measured[1], rtol=1e-4)
    with pytest.raises(ValueError, match="matching='data': the model's convolution or feature map is trained already"):
        lln.hf.convert(model, matching="data", batches=[batch])


def test_p_and_the_instruments_are_those_of_the_convolved() -> None:
    q, k, v = make_inputs(2, 4, 2, 12, 8)
    module = make_moved(4, 2, 8, 5, block_size=4)
    mask = torch.arange(12) < torch.tensor([[12], [9]])
    p, out = assert_instruments_see_p(module, q, k, v, mask)
    values = convolve_by_hand(v, module.conv_v.detach(), False, mask).repeat_interleave(2, 1)
    assert relative_error(p @ values, out) < 1e-12


@pytest.mark.parametrize("wrong", [4, 1, 0, -3, True, 5.0, "5"])
def test_wrong_widths_are_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"convolution must be an odd int of 3 or more, or None for none; got "):
        lln.LLNAttention(2, 8, convolution=wrong)
    with pytest.raises(ValueError, match="convolution must be an odd int"):
        lln.hf.Options(convolution=wrong)


def test_calls_without_the_neighbours_are_refused_in_one_sentence() -> None:
    q, k, v = make_inputs(2, 2, 2, 6, 4)
    module = make_moved(2, 2, 4, 3, statistics="fixed")
    pair = torch.tensor([0, 6], dtype=torch.int32)
    state = lln.LLNState.empty(2, 2, 4, dtype=WIDE)
    for given in ({"state": state}, {"return_state": True}):
        with pytest.raises(ValueError, match="convolution: a state does not keep the tokens"):
            module(q, k, v, is_causal=True, **given)
    with pytest.raises(ValueError, match="convolution: it runs over one sequence"):
        module(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="convolution: it runs over one sequence"):
        module(q[:1], k[:1], v[:1], cu_seqlens=(pair, pair))
    with pytest.raises(ValueError, match=r"value must have value_dim = 4 channels; got \[2, 2, 6, 3\]"):
        module(q, k, v[..., :3])
    decoder = make_moved(2, 2, 4, 3, statistics="fixed", decoder=True)
    with pytest.raises(ValueError, match="a decoder's attention that is not causal"):
        decoder(q, k, v)
    assert decoder(q, k, v, is_causal=True).shape == q.shape


# In models


def shake(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".conv_" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("kind", ["bert", "llama", "bart"])
def test_models_keep_it_through_saving(kind: str, tmp_path: Path) -> None:
    model, given = build_model(kind), make_batch(kind, 0)
    before = output(model, **given)
    with expect_guess():
        lln.hf.convert(model, convolution=5)
    assert torch.equal(output(model, **given), before)
    assert model.config.lln["convolution"] == 5
    names = [name for name, _ in model.named_parameters() if ".conv_" in name]
    layers = 4 if kind == "bart" else 2  # cross attention has none
    assert len(names) == 3 * layers
    after = output(shake(model), **given)
    assert relative_error(after, before) > 1e-3
    model.save_pretrained(tmp_path)
    with expect_guess():
        again = type(model).from_pretrained(tmp_path, dtype=WIDE)
    assert torch.equal(output(again.eval(), **given), after)
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("lln_diag")
    assert torch.equal(output(model, **given), after)
    with pytest.raises(ValueError, match=r"convolution=3: what .* has learned with a width of 5 would be lost"):
        lln.hf.convert(model, convolution=3)
    assert torch.equal(output(model, **given), after)


def test_a_softmax_checkpoint_begins_with_zeros(tmp_path: Path) -> None:
    build_model("bert", "sdpa").save_pretrained(tmp_path)
    held = tf.AutoConfig.from_pretrained(tmp_path)
    held.lln = {"implementation": "lln", "convolution": 3}
    model = tf.AutoModel.from_pretrained(tmp_path, config=held)
    kernels = [parameter for name, parameter in model.named_parameters() if ".conv_" in name]
    assert len(kernels) == 6
    assert not any(bool(kernel.any()) for kernel in kernels)


def test_a_decoder_writes_without_a_cache_and_refuses_one() -> None:
    model = build_model("llama")
    lln.hf.convert(model, convolution=3, statistics="fixed")
    shake(model)
    ids = tokens(0, 2, 9)
    whole = model(ids, use_cache=False).logits
    assert relative_error(model(ids[:, :5], use_cache=False).logits, whole[:, :5]) < 1e-12
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    written = model.generate(ids, use_cache=False, **options)
    assert written.shape[1] > 9
    with pytest.raises(ValueError, match="convolution: a state does not keep"):
        model.generate(ids, **options)
    with pytest.raises(ValueError, match="the convolution needs earlier tokens that no cache keeps"):
        model.generate(ids, cache_implementation="dynamic", **options)


def test_softmax_with_the_same_convolution() -> None:
    q, k, v = make_inputs(2, 4, 2, 13, 6)
    mask = torch.arange(13) < torch.tensor([[13], [9]])
    module: Any = mechanism("convolved_softmax", num_heads=4, num_key_heads=2, head_dim=6, convolution=3, dtype=WIDE)
    plain = attention("softmax", q, k, v, key_mask=mask)
    assert torch.equal(module(q, k, v, key_mask=mask), plain)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    for is_causal in (False, True):
        near = [
            convolve_by_hand(t, kernel.detach(), is_causal, mask)
            for t, kernel in zip((q, k, v), (module.conv_q, module.conv_k, module.conv_v), strict=True)
        ]
        hidden = ~mask[:, None, None] | (torch.ones(13, 13).triu(1).bool() if is_causal else False)
        scores = (near[0] @ near[1].repeat_interleave(2, 1).mT / 6**0.5).masked_fill(hidden, -torch.inf)
        want = scores.softmax(-1) @ near[2].repeat_interleave(2, 1)
        found = module(q, k, v, key_mask=mask, is_causal=is_causal)
        assert relative_error(found[0], want[0]) < 1e-12
        assert relative_error(found[1, :, :9], want[1, :, :9]) < 1e-12


def test_a_model_runs_softmax_with_it_and_keeps_it(tmp_path: Path) -> None:
    model, given = build_model("bert", "sdpa"), make_batch("bert")
    before = output(model, **given)
    lln.hf.convert(model, "convolved_softmax", convolution=3)
    assert relative_error(output(model, **given), before) < 1e-12
    after = output(shake(model), **given)
    assert relative_error(after, before) > 1e-3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=WIDE).eval()
    assert again.config.lln["mechanisms"] == {"convolved_softmax": {"convolution": 3}}
    assert torch.equal(output(again, **given), after)
    with pytest.raises(TypeError, match="elu has no option 'convolution'"):
        lln.hf.convert(build_model("bert"), "elu", convolution=3)
    with pytest.raises(ValueError, match="convolved_softmax does not support causal attention in models"):
        output(build_model("gpt2", "convolved_softmax"), **make_batch("gpt2"))


# In training

SMALL = {
    "model.layers": "1", "model.width": "32", "model.heads": "2", "model.inner": "32", "data.length": "32",
    "data.vocabulary": "300", "data.evaluation": "12", "optimisation.steps": "6", "optimisation.batch": "4",
    "optimisation.warmup": "1", "log_every": "1", "save_every": "2", "evaluate_every": "6", "record_every": "3",
}  # fmt: skip
# Each with a parameter that only it has.
LEARNED = {
    "lln:convolution=5": "conv_q",
    "lln_diag:convolution=3:overlap=true:block_size=8": "conv_v",
    "softmax:convolution=5": "conv_k",
    "lln_diag:value_convolution=5:block_size=8": "value_taps",
    "softmax:value_convolution=3": "value_taps",
    "lln:statistics=fixed:learnable=head": "log_alpha",
    "lln:statistics=fixed:learnable=channel": "log_beta",
    "lln:statistics=fixed:feature_map=linear": "map_q",
    "lln_diag:mix=ratio:block_size=8": "mix_logit",
}


@pytest.mark.parametrize("attention", LEARNED)
def test_what_closes_the_gap_trains_and_goes_on_where_it_was_stopped(
    attention: str, tmp_path: Path, cache: Path
) -> None:
    """The loop of a CUDA graph, whose steps are those without one."""
    config = configure("mlm", "tiny", attention, 0, SMALL | {"graph": "yes", "precision": "bfloat16"})
    name, *options = attention.split(":")
    assert config.attention.label == ":".join([name, *sorted(options)])
    assert_goes_on(config, tmp_path, cache, stop=5)
    model = tf.AutoModelForMaskedLM.from_pretrained(tmp_path / "whole" / "model")
    fresh: Any = lln.LLNAttention(2, 16, statistics="fixed", learnable="head")
    learned = {n.split(".")[-1]: p for n, p in model.named_parameters() if ".lln." in n or ".lln_peer." in n}
    moved = learned[LEARNED[attention]].detach()
    begin = fresh.log_alpha.detach()[0, 0] if LEARNED[attention].startswith("log_") else torch.zeros(())
    assert float((moved - begin).abs().max()) > 1e-4


def test_gains_do_not_decay_and_weights_do(tmp_path: Path, cache: Path) -> None:
    """With a huge decay and steps too small to learn anything."""
    options = {
        "statistics": "fixed", "learnable": "head", "feature_map": "linear", "convolution": "3", "mix": "ratio",
        "block_size": "8",
    }  # fmt: skip
    changes = {f"attention.options.{name}": value for name, value in options.items()}
    changes |= {"optimisation.decay": "1e6", "optimisation.rate": "1e-7", "record_every": "0", "model.pre_norm": "no"}
    config = change(recipe("mlm", "tiny", "lln_diag"), SMALL | changes)
    train(config, tmp_path, cache_dir=cache)
    model = tf.AutoModelForMaskedLM.from_pretrained(tmp_path / "model")
    held = {".".join(name.split(".")[-2:]): p.detach() for name, p in model.named_parameters()}
    fresh: Any = lln.LLNAttention(2, 16, statistics="fixed", learnable="head")
    assert torch.allclose(held["lln.log_alpha"], fresh.log_alpha, atol=1e-5)
    assert float(held["query.weight"].std()) < 0.8 * model.config.initializer_range
    decaying = {n.split(".")[-1] for n in find_decaying(model) if ".lln." in n}
    assert decaying == {"map_q", "map_k", "conv_q", "conv_k", "conv_v"}


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("lln:overlap=true", "attention.options: overlap goes with lln_diag; got it with lln"),
        ("lln:block_size=8", "attention.options: block_size goes with lln_diag; got it with lln"),
        ("lln:convolution=4", "convolution must be an odd int of 3 or more"),
        ("softmax:convolution=4", "convolution must be an odd int of 3 or more"),
        ("softmax:overlap=true", "attention.options: softmax takes only value_convolution, .*; got overlap"),
    ],
)
def test_wrong_training_options_are_refused(attention: str, message: str, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(configure("mlm", "tiny", attention, 0, SMALL), tmp_path / "run", cache_dir=cache)
