"""One token after a state as one kernel: what the eager step gives, in new memory and over the old."""

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import lln.hf
from helpers.tensors import normal, relative_error
from helpers.triton_cases import DEVICE, MARKS, only_triton
from helpers.untyped import lln_attention
from lln import LLNAttention, LLNState
from lln.kernels.triton import step, tape

pytestmark = [*MARKS, only_triton]
TOKENS = 21


def list_tensors(state: LLNState) -> list[Tensor]:
    return [t for name, t in vars(state).items() if isinstance(t, Tensor) and name != "beta"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "masked"), [*itertools.product((None, 1, 7, 16), (False, True))])
def test_steps_are_those_of_plain_torch(block_size: int | None, masked: bool, dtype: torch.dtype) -> None:
    q, k, v = (normal(i, 2, h, TOKENS, d).to(DEVICE, dtype) for i, h, d in ((0, 6, 20), (1, 2, 20), (2, 2, 9)))
    mask = torch.ones(2, TOKENS, dtype=torch.bool, device=DEVICE)
    if masked:
        mask[0, :5] = mask[1, 12] = mask[0, 13] = False
    alpha, beta = normal(3, 6, 20).abs().to(DEVICE), normal(4, 2, 20).abs().to(DEVICE)
    options: dict[str, Any] = {"is_causal": True, "block_size": block_size, "return_state": True}
    if block_size is not None:
        options["mix"] = (0.7, normal(5, 6, 9).to(DEVICE))
    states = {
        b: LLNState.empty(2, 2, 20, 9, block_size=block_size, dtype=dtype, device=DEVICE) for b in ("eager", "triton")
    }
    for t in range(TOKENS):
        rows = [x[:, :, t : t + 1] for x in (q, k, v)]
        outs: dict[str, Any] = {}
        for backend, state in states.items():
            outs[backend], states[backend] = lln_attention(
                *rows,
                alpha,
                beta,
                state=state,
                backend=backend,
                key_mask=mask[:, t : t + 1] if masked else None,
                **options,
            )
        assert relative_error(outs["triton"], outs["eager"]) < (1e-5 if dtype == torch.float32 else 1e-2)
        for found, expected in zip(list_tensors(states["triton"]), list_tensors(states["eager"]), strict=True):
            assert found.dtype == expected.dtype
            if not found.is_floating_point() or found.dtype == torch.bfloat16:
                assert torch.equal(found, expected)
            else:
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_over_the_old_state_is_a_step_into_new_memory() -> None:
    q, k, v = (normal(i, 3, h, TOKENS, 16).float().to(DEVICE) for i, h in ((0, 4), (1, 2), (2, 2)))
    new = LLNState.empty(3, 2, 16, block_size=6, device=DEVICE)
    old = copy.deepcopy(new)
    one, half = torch.full((1, 1, 1), 1.3, device=DEVICE), torch.full((1, 1, 1), 0.5, device=DEVICE)
    ticket = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    length = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for t in range(TOKENS):
        rows = [x[:, :, t : t + 1] for x in (q, k, v)]

        def make_step(state: LLNState, rows: list[Tensor] = rows) -> step.Step:
            held: Any = [
                getattr(state, n) for n in ("log_sum", "mean_value", "count", "block_key", "block_value", "block_mask")
            ]
            made: Any = step.Step
            return made(*rows, one, one, half, half, None, *held)

        out, *made = step.take_step(make_step(new), 0.25)
        blocks: list[Any] = made[2:]
        new = LLNState(made[0], made[1], None, *blocks)
        again = step.take_step_in_place(make_step(old), ticket, length, 0.25, step.GIVEN, 1.0)
        assert torch.equal(out, again)
        assert all(map(torch.equal, list_tensors(new), list_tensors(old)))
        assert not ticket.any()
    assert int(length) == TOKENS


def writer(name: str, statistics: str, **options: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **shape))
    blocks: dict[str, Any] = {"block_size": 4} if name == "lln_diag" else {}
    return lln.hf.convert(model.eval(), name, statistics=statistics, **blocks, **options).eval().to(DEVICE)


def use(model: Any, backend: Any) -> Any:
    for module in model.modules():
        if isinstance(module, LLNAttention):
            module.backend = backend
    return model


def write(model: Any, **options: Any) -> Any:
    tokens = torch.randint(2, 50, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    given = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(
        tokens, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **given, **options
    )  # fmt: skip


@pytest.mark.usefixtures("playable")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("statistics", ["fixed", "running"])
@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_generation_is_that_of_the_eager_back_end(name: str, statistics: str, cache: str | None) -> None:
    model = writer(name, statistics)
    expected = write(use(model, "eager"))
    found = write(use(model, "triton"), cache_implementation=cache, disable_compile=True)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # One kind of step for all layers and positions: no length compiles or records anything of its own.
    assert sum(isinstance(key, tuple) and key[0] == "step in place" for key in tape.TAPES) == 1


@pytest.mark.parametrize("options", [{"learnable": "head"}, {"mix": "ratio"}])
def test_generation_with_what_is_kept_among_the_weights(options: dict[str, Any]) -> None:
    model = writer("lln_diag", "fixed", **options)
    expected, found = write(use(model, "eager")), write(use(model, "triton"))
    for a, b in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_beams_reorder_states_that_are_written_over() -> None:
    model = writer("lln_diag", "fixed")
    expected, found = (write(use(model, b), num_beams=3) for b in ("eager", "triton"))
    assert torch.equal(found.sequences, expected.sequences)


def test_a_copy_of_a_cache_stays_as_it_was() -> None:
    model, tokens = use(writer("lln_diag", "fixed"), "triton"), torch.arange(2, 12, device=DEVICE)[None]
    cache = lln.hf.LLNCache()
    with torch.no_grad():
        model(tokens, past_key_values=cache)
        model(tokens[:, :1], past_key_values=cache)
        kept = copy.deepcopy(cache)
        first = model(tokens[:, 1:2], past_key_values=cache).logits
        model(tokens[:, 2:3], past_key_values=cache)
        again = model(tokens[:, 1:2], past_key_values=kept).logits
    assert torch.equal(first, again)
    assert kept.get_seq_length() == 12


def test_a_chunk_may_follow_a_step_and_gradients_make_new_states() -> None:
    model, tokens = use(writer("lln_diag", "fixed"), "triton"), torch.arange(2, 22, device=DEVICE)[None]
    expected = model(tokens).logits
    cache, outs = lln.hf.LLNCache(), []
    for begin, end in ((0, 6), (6, 7), (7, 8), (8, 13), (13, 14), (14, 20)):
        context = torch.no_grad() if end - begin == 1 else torch.enable_grad()
        with context:
            outs.append(model(tokens[:, begin:end], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_a_compiled_step_is_one_graph(name: str) -> None:
    """Also where the kernel takes it: transformers' own layers would be compiled one by one around a break."""
    model = use(writer(name, "fixed"), "triton")
    tokens = torch.arange(2, 11, device=DEVICE)[None]
    caches = [lln.hf.LLNCache(2, static=True) for _ in range(2)]
    with torch.inference_mode():
        for cache in caches:
            model(tokens, past_key_values=cache)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for place in range(9, 14):
            given = {"position_ids": torch.full((1, 1), place, device=DEVICE)}
            expected = model(tokens[:, :1], past_key_values=caches[0], **given).logits
            found = compiled(tokens[:, :1], past_key_values=caches[1], **given).logits
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
