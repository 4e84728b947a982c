"""`lln bench --model`: whole models of transformers as people run them, each beside the same model with torch's
attention, in one process and in turns. Encoders: a forward pass and a training step. Decoders also: a prompt read into
a cache, and one token after it."""

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import lln.hf
from lln.hf.attach import ModelAttention
from lln.lab.bench.calls import CheckFailed, describe_failure, describe_plan
from lln.lab.core.errors import Refused, WrongOption, first_line
from lln.lab.core.pretrained import is_here, shorten_name, silence
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import Work, capture, peak_memory, time_calls

TORCH = "sdpa"
ATTENTIONS = (TORCH, "lln", "lln_diag")
GRAPHS = ("graph", "compiled-graph")
MODES = {"cpu": ("eager", "compiled"), "cuda": ("eager", "compiled", *GRAPHS)}
DECODING = ("prefill", "token")
KINDS = ("inference", "training", *DECODING)
LENGTHS = {"cpu": [512, 2048], "cuda": [512, 4096, 16384]}
REPEATS = {"cpu": 5, "cuda": 20}
CHECKED = 2, 300  # sequences and tokens; several times a block, and no multiple of one
MOST_ERROR = 3.0  # times that of torch's attention in the same dtype
# Those sizes with random weights. Roberta's positions begin after the padding id.
ROBERTA = {"vocab_size": 50_265, "type_vocab_size": 1, "initializer_range": 0.05}
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True,
}  # fmt: skip
SIZES: dict[str, tuple[str, dict[str, Any], int]] = {
    "roberta-base": ("RobertaForMaskedLM", ROBERTA, 2),
    "llama-1b": ("LlamaForCausalLM", LLAMA, 1),
}


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    model: str  # a name of SIZES, a folder or a Hub id
    attentions: tuple[str, ...]
    modes: tuple[str, ...]
    kinds: tuple[str, ...]
    shapes: list[tuple[int, int]]  # batch, length
    dtype: torch.dtype
    device: torch.device
    repeats: int
    seed: int


def plan_model(
    *, model: str, device: torch.device, seed: int = 0, lengths: list[int] | None = None, batch: int | None = None,
    tokens: int | None = None, dtype: str | None = None, only: str | None = None, modes: str | None = None,
    kinds: str | None = None, repeats: int | None = None, quick: bool = False, baseline: bool = True, **refused: Any,
) -> ModelPlan:  # fmt: skip
    """A wrong option is answered by its name; refused: those of `lln bench` that concern single calls. Not baseline:
    without torch's attention, where that is too slow or too large."""
    if given := [name for name, value in refused.items() if value]:
        raise WrongOption(f"--{given[0]}", "concerns single calls of attention; leave it out beside --model")
    if batch is not None and tokens is not None:
        raise WrongOption("--tokens", "already sets the batch at each length; leave out --batch or --tokens")
    usual = LENGTHS[device.type][: 1 if quick else None]
    shapes = [(max(1, tokens // n) if tokens else batch or 1, n) for n in lengths or usual]
    known = MODES[device.type]
    chosen = {"--only": parse_names("--only", only, ATTENTIONS), "--modes": parse_names("--modes", modes, known)}
    attentions = tuple(dict.fromkeys((TORCH, *chosen["--only"])))  # what the others are compared with
    attentions = attentions if baseline else attentions[1:]
    return ModelPlan(
        model=model,
        attentions=attentions,
        modes=chosen["--modes"] if modes else known[:1] if quick else known,
        kinds=parse_names("--kinds", kinds, KINDS),
        shapes=shapes,
        dtype=getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32")),
        device=device,
        repeats=repeats or (5 if quick else REPEATS[device.type]),
        seed=seed,
    )


def parse_names(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    wanted = [part.strip() for part in text.split(",")] if text else list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise WrongOption(option, f"must be among {', '.join(known)} with commas between; got {unknown[0]!r}")
    return tuple(wanted)


def build_model(plan: ModelPlan, attention: str) -> Any:
    """In eval. Raises Refused."""
    longest = max(length for _, length in plan.shapes)
    torch.manual_seed(plan.seed)
    if plan.model in SIZES:
        kind, sizes, more = SIZES[plan.model]
        config = getattr(transformers, kind).config_class(**sizes, max_position_embeddings=longest + more)
        with plan.device:  # a large model starts much sooner where its random numbers are drawn on the GPU
            model = getattr(transformers, kind)(config)
    else:
        here = is_here(plan.model)
        with silence(transformers, bars=not here):
            try:
                named = transformers.AutoConfig.from_pretrained(plan.model, local_files_only=here).architectures or [""]
                found = getattr(transformers, named[0], transformers.AutoModel)
                model = found.from_pretrained(plan.model, local_files_only=here)
            except Exception as error:  # whatever is wrong with a file, transformers has an exception of its own for it
                raise Refused(f"{plan.model} holds no model that transformers can load: {first_line(error)}") from error
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise Refused(f"{type(model).__name__} does not take tokens alone; name an encoder or a decoder of text")
    model = model.to(plan.device, plan.dtype).eval()
    if attention == TORCH:
        model.set_attn_implementation(TORCH)
    else:  # the spread of a decoder's queries and keys does not change what a call costs
        lln.hf.convert(model, attention, statistics="fixed" if model.can_generate() else None)
    return model


def draw_tokens(plan: ModelPlan, model: Any, batch: int, length: int) -> Tensor:
    most = model.config.get_text_config().vocab_size
    return torch.randint(min(5, most - 1), most, (batch, length), device=plan.device)


def measure_model(
    plan: ModelPlan, *, store: Callable[[dict[str, Any]], None] = ignore, progress: Progress = ignore
) -> dict[str, Any]:
    """The result, ready for JSON. `store` gets it as it grows: what a killed run had measured is not lost."""
    models = {name: build_model(plan, name) for name in plan.attentions}
    progress("check")
    result: dict[str, Any] = {
        "what": "time of a transformers model with each attention, milliseconds, and peak extra memory of a call",
        "settings": describe_plan(plan) | {"model": shorten_name(plan.model)},
        "provenance": provenance(plan.seed, plan.device) | {"transformers": transformers.__version__},
        "errors": check_models(plan, models),
        "finished": False,
        "rows": [],
    }
    decodes = next(iter(models.values())).can_generate()
    kinds = [kind for kind in plan.kinds if decodes or kind not in DECODING]
    for (batch, length), mode, kind in itertools.product(plan.shapes, plan.modes, kinds):
        progress(f"{kind}, {mode}: {batch} x {length:,}")
        if kind == "training" and mode in GRAPHS:  # an optimiser's step in a graph is what `lln train` has
            continue
        result["rows"].append(measure_row(plan, models, batch, length, mode, kind))
        store(result)
    result["finished"] = True
    store(result)
    return result


def measure_row(plan: ModelPlan, models: dict[str, Any], batch: int, length: int, mode: str, kind: str) -> Any:
    row: dict[str, Any] = {"kind": kind, "mode": mode, "batch": batch, "length": length}
    works, row["bytes"], row["failed"] = {}, {}, {}
    kept = []  # a graph reads the tensors of its work, and does not hold them
    with choose_torch_backends(kind), contextlib.ExitStack() as stack:
        for name, model in models.items():
            model.config._attn_implementation_internal = name  # where `fill_cache` has put another
            try:
                work = make_work(plan, model, draw_tokens(plan, model, batch, length), mode, kind, stack)
                kept.append(work)
                row["bytes"][name] = peak_memory(work, plan.device)
                works[name] = prepare_mode(work, mode, plan.device)
            except Exception as error:  # out of memory, what cannot be captured: a result, and no reason to stop
                row["failed"][name] = describe_failure(error)
        times = time_calls(works, repeats=plan.repeats, device=plan.device, warmup=3)
    row["times"] = {name: dataclasses.asdict(timing) for name, timing in times.items()}
    base = times.get(TORCH)
    row["ratios"] = {} if base is None else {name: timing.median / base.median for name, timing in times.items()}
    torch.compiler.reset()
    gc.collect()
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def choose_torch_backends(kind: str) -> Any:
    """cuDNN builds a plan for each new length, which takes many times a token."""
    if kind != "token":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def make_work(plan: ModelPlan, model: Any, tokens: Tensor, mode: str, kind: str, stack: contextlib.ExitStack) -> Work:
    decodes = model.can_generate()
    # An encoder's head, over a vocabulary, is for training it; what it is used for are its hidden states.
    body = model if decodes or kind == "training" else model.base_model
    call = torch.compile(body) if mode.startswith("compiled") else body
    if kind == "training":
        return stack.enter_context(prepare_training(model, call, tokens))
    given = {"use_cache": False, "logits_to_keep": 1} if decodes else {}
    stack.enter_context(torch.inference_mode())
    if kind == "inference":
        if mode in GRAPHS and model.config._attn_implementation == TORCH:
            model.config._attn_implementation_internal = UNMASKED
        return functools.partial(call, tokens, **given)
    batch, length = tokens.shape
    if kind == "prefill":
        return lambda: call(tokens, past_key_values=make_cache(model, mode, length + 1), logits_to_keep=1)
    cache, token = fill_cache(model, tokens, mode, length + plan.repeats + OTHER_CALLS), tokens[:, :1]
    places = torch.full((batch, 1), length, device=plan.device)
    return functools.partial(call, token, past_key_values=cache, position_ids=places)


@contextlib.contextmanager
def prepare_training(model: Any, call: Any, tokens: Tensor) -> Iterator[Work]:
    """A step of AdamW; afterwards the model is as it was."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    rate, fused = 1e-4, tokens.is_cuda
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, fused=fused)
    model.train()

    def step() -> None:
        out = call(tokens, labels=tokens) if has_head(model) else call(tokens)
        loss = out.loss if has_head(model) else out.last_hidden_state.float().square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    try:
        yield step
    finally:
        model.load_state_dict(before)
        model.eval()


def has_head(model: Any) -> bool:
    return type(model).__name__.endswith(("LM", "LMHeadModel", "PreTraining"))


def prepare_mode(work: Work, mode: str, device: torch.device) -> Work:
    if mode not in GRAPHS:
        return work
    graph = capture(work, device)
    if graph is None:
        raise RuntimeError("no CUDA graph of it could be captured")
    return graph.replay


def is_static(mode: str) -> bool:
    """Whether memory must stay where it is."""
    return mode != "eager"


def make_cache(model: Any, mode: str, places: int) -> Any:
    config = model.config.get_text_config(decoder=True)
    if model.config._attn_implementation != TORCH:
        return lln.hf.LLNCache(config.num_hidden_layers, static=True) if is_static(mode) else lln.hf.LLNCache()
    if is_static(mode):
        return transformers.StaticCache(config=config, max_cache_len=places)
    return transformers.DynamicCache()


PIECE = 8192  # tokens of a prompt that are read at once
OTHER_CALLS = 16  # of a step, at most, beside those that are timed: each takes a place of torch's static cache


def fill_cache(model: Any, tokens: Tensor, mode: str, places: int) -> Any:
    """With a prompt in it; torch's with random keys and values, which are read alike and there sooner. torch's static
    cache has a place for each call that follows, and is read without a mask, which is torch's attention at its best:
    transformers by itself would hand it one, and repeat the heads."""
    batch, length = tokens.shape
    cache = make_cache(model, mode, places)
    if model.config._attn_implementation != TORCH:
        for part in tokens.split(PIECE, 1):
            model(part, past_key_values=cache, logits_to_keep=1)
        return cache
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(batch, heads, length, dim, dtype=model.dtype, device=tokens.device)
        cache.update(keys, keys.flip(2), layer)
    if is_static(mode):
        model.config._attn_implementation_internal = UNMASKED
    return cache


UNMASKED = "lln_bench_unmasked"


def attend_unmasked(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
    """Where a graph is captured transformers cannot see that a mask hides nothing, and hands on one that keeps torch
    from its fast kernels."""
    causal = bool(getattr(module, "is_causal", False)) and query.shape[2] > 1
    out = scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True, is_causal=causal)
    return out.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register(UNMASKED, attend_unmasked)
transformers.AttentionMaskInterface.register(UNMASKED, lambda *args, **kwargs: None)


@torch.no_grad()
def check_models(plan: ModelPlan, models: dict[str, Any]) -> dict[str, float]:
    """Relative errors of the last hidden states against the same weights in a wider dtype with plain PyTorch.
    CheckFailed where one is much larger than that of torch's attention: no time is reported for a wrong result."""
    batch, length = CHECKED
    wide = torch.float64 if plan.dtype == torch.float32 else torch.float32
    errors = {}
    for name, model in models.items():
        body = model.base_model
        tokens = draw_tokens(plan, model, batch, min(length, max(n for _, n in plan.shapes)))
        found = body(tokens).last_hidden_state.double()
        own = [module for module in body.modules() if isinstance(module, ModelAttention)]
        backends = [module.backend for module in own]
        for module in own:
            module.backend = "eager"
        expected = body.to(wide)(tokens).last_hidden_state.double()
        body.to(plan.dtype)
        for module, backend in zip(own, backends, strict=True):
            module.backend = backend
        errors[name] = float((found - expected).norm() / expected.norm())
    most = MOST_ERROR * max(errors.get(TORCH, 0.0), torch.finfo(plan.dtype).eps * len(list(body.modules())) ** 0.5)
    for name, error in errors.items():
        if not error <= most:
            raise CheckFailed(
                f"{name}: hidden states are off by {error:.1e} from {wide}, and {most:.1e} is allowed. "
                "Nothing was timed."
            )
    return errors
