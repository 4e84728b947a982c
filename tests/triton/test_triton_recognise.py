"""A call like an earlier one is played without a look at it, and nothing else may change by that."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import lln.hf
from helpers.replaying import count_recognised, forget_played
from helpers.tensors import normal
from helpers.triton_cases import DEVICE, MARKS, only_triton
from helpers.untyped import lln_attention as attend
from lln import LLNAttention
from lln.kernels.triton import recognise, tape

pytestmark = [*MARKS, only_triton, pytest.mark.usefixtures("playable")]
LENGTH = 40


def draw(seed: int, *, heads: int = 2, length: int = LENGTH, batch: int = 1, grads: bool = False) -> list[Tensor]:
    shapes = [(batch, length, n, 16) for n in (heads, 1, 1)]
    made = [normal(9 * seed + i, *shape).to(DEVICE, torch.float32).transpose(1, 2) for i, shape in enumerate(shapes)]
    return [t.detach().requires_grad_(grads) for t in made]


def build(**options: Any) -> LLNAttention:
    torch.manual_seed(0)
    return LLNAttention(2, 16, num_key_heads=1, backend="triton", **options).to(DEVICE).eval()


MODULES: dict[str, dict[str, Any]] = {
    "sample": {},
    "sample blocks": {"block_size": 16},
    "running": {"statistics": "running"},
    "numbers": {"statistics": "fixed", "alpha": 1.5, "beta": 1.2},
    "buffers": {"statistics": "fixed", "alpha": torch.tensor([1.5, 1.1]), "beta": torch.tensor([1.2])},
    "learned": {"statistics": "fixed", "learnable": "channel", "block_size": 16},
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_is_recognised_with_all_that_its_factors_come_from(kind: str, masked: bool) -> None:
    module = build(**MODULES[kind])
    mask = (torch.arange(LENGTH, device=DEVICE) > 3)[None] if masked else None
    with torch.no_grad():
        for seed in range(3):
            given = draw(seed)
            found = module(*given, key_mask=mask)
            with forget_played():
                assert torch.equal(found, module(*given, key_mask=mask))
            for t in (*module.parameters(), *module.buffers()):
                if t.is_floating_point():
                    t.mul_(1.1)  # what it reads is read anew
    assert count_recognised() == 1


@pytest.mark.parametrize("kind", ["sample blocks", "numbers"])
def test_gradients_of_a_recognised_call_are_the_same(kind: str) -> None:
    module = build(**MODULES[kind])
    for seed in range(3):
        given = draw(seed, grads=True)
        outer = normal(77, 1, 2, LENGTH, 16).to(DEVICE, torch.float32)
        found = torch.autograd.grad(module(*given), given, outer)
        with forget_played():
            expected = torch.autograd.grad(module(*given), given, outer)
        assert all(map(torch.equal, found, expected))
    assert count_recognised() == 1


def test_a_recognised_call_has_no_second_derivative_and_says_so() -> None:
    for _ in range(2):
        given = draw(0, grads=True)
        out = attend(*given, 1.2, 1.4, backend="triton")
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(out.sum(), given, create_graph=True)


def test_some_inputs_need_no_gradient() -> None:
    for seed in range(3):
        q, k, v = draw(seed)
        k.requires_grad_()
        attend(q, k, v, 1.2, 1.4, backend="triton").sum().backward()
        with forget_played():
            expected = torch.autograd.grad(attend(q, k, v, 1.2, 1.4, backend="triton").sum(), k)[0]
        assert k.grad is not None
        assert torch.equal(k.grad, expected)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [({"is_causal": 1}, "is_causal"), ({"block_size": True}, "block_size"), ({"dropout_p": None}, "dropout_p"),
     ({"alpha": True}, "alpha"), ({"key_mask": torch.ones(1, LENGTH, device=DEVICE)}, "key_mask"),
     ({"mix": [0.5, 0.5]}, "mix"), ({"key": torch.zeros(1, 1, LENGTH, 8, device=DEVICE)}, "key")],
)  # fmt: skip
def test_what_was_refused_is_refused_after_a_call_like_it(wrong: dict[str, Any], match: str) -> None:
    q, k, v = draw(0)
    options: dict[str, Any] = {"query": q, "key": k, "value": v, "alpha": 1.0, "beta": 1.0, "backend": "triton"}
    for _ in range(2):
        attend(**options)
        attend(**options, block_size=16, is_causal=True)
    with pytest.raises((TypeError, ValueError), match=match):
        attend(**options | wrong)


def test_an_option_that_changes_takes_effect() -> None:
    module, given = build(block_size=16), draw(0)
    first = [module(*given) for _ in range(2)][-1]
    module.block_size = 8
    second = [module(*given) for _ in range(2)]
    assert not torch.equal(first, second[0])
    assert torch.equal(second[0], second[1])
    with forget_played():
        assert torch.equal(second[1], module(*given))


def test_dropout_is_drawn_for_each_call_and_repeats_with_the_seed() -> None:
    module, given = build(dropout=0.5).train(), draw(0)
    module(*given)
    torch.manual_seed(1)
    found = [module(*given) for _ in range(2)]
    assert not torch.equal(*found)
    torch.manual_seed(1)
    with forget_played():
        assert all(torch.equal(out, module(*given)) for out in found)
    assert count_recognised() == 1


def test_running_statistics_are_kept_in_training() -> None:
    module = build(statistics="running").train()
    for seed in range(3):
        module(*draw(seed))
    module.eval()
    assert int(module.running_count) == 3
    assert count_recognised() == 0


def test_hooks_and_learned_factors_are_not_passed_by() -> None:
    module = build(**MODULES["learned"])
    for seed in range(2):
        given = draw(seed, grads=True)
        module(*given).sum().backward()
        grad = module.get_parameter("log_alpha").grad
        assert grad is not None
        assert grad.abs().sum() > 0
        module.zero_grad()
    assert count_recognised() == 0


def test_functions_of_torch_func_see_each_step() -> None:
    q, k, v = draw(0)
    for _ in range(2):
        attend(q, k, v, 1.2, 1.4, backend="triton")
    with pytest.raises(RuntimeError, match=r"torch\.func|functorch|setup_context|vmap"):
        torch.func.grad(lambda x: attend(x, k, v, 1.2, 1.4, backend="triton").sum())(q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match=r"forward.mode|jvp|functorch|setup_context"):
            attend(dual, k, v, 1.2, 1.4, backend="triton")


def test_tensors_that_are_the_same_one_are_told_from_others() -> None:
    x, y = draw(0, heads=1)[0], draw(1, heads=1)[0]
    call = functools.partial(attend, alpha=1.2, beta=1.4, backend="triton")
    for given in ((x, x, x), (x, y, x), (x, x, y), (y, x, x), (x, x, x)):
        found = call(*given)
        with forget_played():
            assert torch.equal(found, call(*given))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST", 4)
    for length in range(3, 12):
        q, k, v = draw(0, length=length)
        attend(q, k, v, 1.2, 1.4, backend="triton")
        assert len(recognise.KNOWN) <= 4
        assert len(tape.TAPES) <= 4


def move_to_triton(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, LLNAttention):
            module.backend = "triton"
    return model.to(DEVICE).eval()


def encoder(name: str) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.RobertaConfig(vocab_size=50, max_position_embeddings=60, **shape)
    model = transformers.RobertaModel(config)
    model.set_attn_implementation(name)
    return move_to_triton(model)


def compare_models(model: Any, calls: list[dict[str, Any]]) -> None:
    with torch.no_grad():
        for call in calls:
            found = model(**call).last_hidden_state
            with forget_played():
                assert torch.equal(found, model(**call).last_hidden_state)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [pytest.param("lln", marks=pytest.mark.long), "lln_diag"])
def test_layers_of_an_encoder_are_one_kind_of_call(name: str, masked: bool) -> None:
    model = encoder(name)
    calls: list[dict[str, Any]] = []
    for seed in range(3):
        tokens = torch.randint(2, 50, (2, 30), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        mask = torch.ones_like(tokens)
        mask[1, 25 - seed :] = 0
        calls.append({"input_ids": tokens} | ({"attention_mask": mask} if masked else {}))
    compare_models(model, calls)
    assert count_recognised() == 1


def test_weights_hooks_and_training_of_a_model_are_not_passed_by() -> None:
    model, seen = encoder("lln_diag"), []
    tokens = torch.arange(2, 32, device=DEVICE)[None]
    with torch.no_grad():
        for _ in range(2):
            plain = model(tokens).last_hidden_state
        asked = model(tokens, output_attentions=True)
        assert len(asked.attentions) == 2
        torch.testing.assert_close(asked.last_hidden_state, plain)
        hook: Callable[..., None] = lambda module, args, out: seen.append(out.shape)  # noqa: E731
        handle = model.encoder.layer[0].attention.self.lln.register_forward_hook(hook)
        model(tokens)
        handle.remove()
    assert len(seen) == 1
    model.train()
    torch.manual_seed(0)
    first = model(tokens).last_hidden_state
    assert not torch.equal(first, model(tokens).last_hidden_state)  # dropout


def test_a_causal_model_with_padding_is_recognised() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, **shape))
    model = move_to_triton(lln.hf.convert(model, "lln_diag", statistics="fixed", block_size=8))
    tokens = torch.arange(2, 32, device=DEVICE)[None]
    mask = (torch.arange(30, device=DEVICE) > 4)[None].long()
    compare_models(model, [{"input_ids": tokens, "attention_mask": mask, "use_cache": False}] * 3)
    assert count_recognised() == 1
