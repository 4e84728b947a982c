"""Models of transformers whose tokens lie on several ranks, compared with one process. They run in those processes."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import lln.hf
from helpers.hf_models import make_config
from helpers.tensors import relative_error
from lln.distributed import sum_gradients

CLASSES = {
    "bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"
}  # fmt: skip


def make_model(kind: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = make_config(kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # alpha and beta of a decoder are a guess, and here that is all one
        model = getattr(transformers, CLASSES[kind])(config).double()
        return lln.hf.convert(model, **options)


def draw_tokens(length: int, padding: str | None) -> tuple[Tensor, Tensor | None]:
    tokens = torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(1))
    if padding is None:
        return tokens, None
    at = torch.arange(length)
    mask = at >= torch.tensor([[0], [9]]) if padding == "left" else at < torch.tensor([[length], [length - 12]])
    return torch.where(mask, tokens, 0), mask.long()


def compare_training(
    mesh: DeviceMesh, rank: int, kind: str, lengths: tuple[int, ...], padding: str | None, options: dict[str, Any]
) -> dict[str, float]:
    """Of a training step: the logits here, every gradient, and the weights after it."""
    options = dict(options)
    checkpointed = options.pop("checkpointed", False)
    model = make_model(kind, **options)
    twin = copy.deepcopy(model)
    tokens, mask = draw_tokens(sum(lengths), padding)
    targets = tokens.roll(-1, 1)
    shown = torch.ones_like(tokens) if mask is None else mask
    seen = {} if mask is None else {"attention_mask": mask}

    def lose(logits: Tensor, columns: slice) -> Tensor:
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, columns].flatten(), reduction="none")
        return (losses * shown[:, columns].flatten()).sum() / shown.sum()

    initialized, torch.distributed.is_initialized = torch.distributed.is_initialized, lambda: False  # this one is alone
    try:
        logits = model(tokens, **seen).logits
        lose(logits, slice(None)).backward()
        model.eval()
    finally:
        torch.distributed.is_initialized = initialized
    begin = sum(lengths[:rank])
    columns = slice(begin, begin + lengths[rank])
    lln.hf.spread(twin, mesh)
    if checkpointed:
        twin.gradient_checkpointing_enable()
    mine = twin(tokens[:, columns], **{name: t[:, columns] for name, t in seen.items()}).logits
    lose(mine, columns).backward()
    sum_gradients(twin.parameters(), mesh)
    twin.eval()
    where = shown[:, columns].bool()
    found = {"logits": relative_error(mine.detach()[where], logits.detach()[:, columns][where])}
    for (name, one), other in zip(twin.named_parameters(), model.parameters(), strict=True):
        if other.grad is not None:
            assert one.grad is not None
            found[name] = float((one.grad - other.grad).abs().max())
    for (name, one), other in zip(twin.named_buffers(), model.buffers(), strict=True):
        found[name] = float((one.double() - other.double()).abs().max())
    return found


def compare_generation(mesh: DeviceMesh, rank: int, padding: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """A prompt that all ranks read together, and what one makes of it then."""
    model = make_model("llama", **options).eval()
    prompt, mask = draw_tokens(37, padding)
    seen = {} if mask is None else {"attention_mask": mask}
    ask: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(prompt, **seen, **ask)
    before = {} if mask is None else {"attention_mask": mask[:, :-1]}
    cache = lln.hf.prefill(model, prompt[:, :-1], mesh, **before)
    with torch.no_grad():
        whole, places = lln.hf.LLNCache(), {}
        if mask is not None:
            places["position_ids"] = (mask[:, :-1].cumsum(-1) - 1).clamp_min(0)  # as generate counts
        model(prompt[:, :-1], **before, **places, past_key_values=whole, use_cache=True)
    states = [
        relative_error(mine.state.mean_value, other.state.mean_value)
        for mine, other in zip(cache.layers, whole.layers, strict=True)
    ]
    made = model.generate(prompt, **seen, past_key_values=cache, **ask)
    return {"same": torch.equal(made, expected), "length": cache.get_seq_length(), "state": max(states)}


def compare_sharded(mesh: DeviceMesh, rank: int, lengths: tuple[int, ...]) -> dict[str, float]:
    """FSDP2 over the same ranks: their gradients are averaged, so each loss is taken as often as there are ranks."""
    from torch.distributed.fsdp import fully_shard

    model = make_model("bert", implementation="lln_diag", block_size=8)
    twin = copy.deepcopy(model)
    tokens, _ = draw_tokens(sum(lengths), None)
    begin = sum(lengths[:rank])
    logits = model(tokens).logits
    logits.square().mean().backward()
    for layer in twin.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(twin, mesh=mesh)
    lln.hf.spread(twin, mesh)
    mine = twin(tokens[:, begin : begin + lengths[rank]]).logits
    (mine.square().sum() / logits.numel() * mesh.size()).backward()
    found = {}
    for (name, one), other in zip(twin.named_parameters(), model.parameters(), strict=True):
        if other.grad is not None:
            found[name] = float((one.grad.full_tensor() - other.grad).abs().max())
    return found


def attempt_models(mesh: DeviceMesh, rank: int) -> dict[str, str]:
    """What is refused, and in which words."""
    import transformers

    bart = lln.hf.convert(transformers.BartModel(make_config("bart")), "lln", statistics="fixed")
    mixed = lln.hf.convert(transformers.LlamaModel(make_config("llama")), "lln", statistics="fixed", layers=[1])
    llama = make_model("llama", implementation="lln", statistics="fixed")
    tokens = draw_tokens(8, None)[0]
    split = copy.deepcopy(llama)
    for layer in split.model.layers:  # half of the heads here, as tensor parallelism leaves them
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(layer.self_attn, name)
            linear.weight = nn.Parameter(linear.weight[: linear.weight.shape[0] // 2])
    tries = {
        "positions": lambda: lln.hf.spread(bart, mesh),
        "mixed": lambda: lln.hf.spread(mixed, mesh),
        "softmax": lambda: lln.hf.spread(transformers.BertModel(make_config("bert")), mesh),
        "labels": lambda: lln.hf.spread(llama, mesh)(tokens, labels=tokens),
        "packed": lambda: lln.hf.spread(llama, mesh)(tokens[:1], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])),
        "heads": lambda: split(tokens),
        "none": lambda: lln.hf.spread(llama, mesh)(tokens[:, : 8 * (rank == 0)]),
    }
    found = {}
    for name, call in tries.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found
