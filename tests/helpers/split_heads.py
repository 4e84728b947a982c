"""Attention and models whose heads lie on several ranks, compared with one process. They run in those processes."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import lln
from helpers.shared_calls import draw, make_call
from helpers.tensors import relative_error
from lln.distributed import shard, split_heads, sum_gradients


def be_whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def differ(mine: Tensor, want: Tensor) -> float:
    return float((be_whole(mine) - want).abs().max() / want.abs().max().clamp_min(1e-3))


def make_module(**settings: Any) -> Any:
    torch.manual_seed(0)
    settings = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in settings.items()}
    module = lln.LLNAttention(8, 8, num_key_heads=4, **settings).double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.add_(draw(20 + number, *parameter.shape), alpha=0.3)
    return module


def run_alone(module: Any, *given: Any, **where: Any) -> Any:
    """As one process would, among several."""
    initialized, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        return module(*given, **where)
    finally:
        dist.is_initialized = initialized


def compare_split(mesh: DeviceMesh, rank: int, settings: dict[str, Any]) -> dict[str, float]:
    """Of a training step: the output here, every gradient, buffers, and what a state_dict holds and takes."""
    settings = dict(settings)
    where = {"is_causal": settings.pop("is_causal", False)}
    qkv, _, options = make_call(30, heads=(8, 4), dims=(8, 8), mask=settings.pop("mask", None))
    module = make_module(**settings)
    twin = split_heads(copy.deepcopy(module), mesh)
    weights = draw(9, *qkv[0].shape)
    for t in qkv:
        t.requires_grad_()
    whole = run_alone(module, *qkv, **where, **options)
    whole.mul(weights).sum().backward()
    module.eval()
    heads = [t.detach().chunk(mesh.size(), 1)[rank].requires_grad_() for t in qkv]
    out = twin(*heads, **where, **options)
    out.mul(weights.chunk(mesh.size(), 1)[rank]).sum().backward()
    twin.eval()
    parts = [whole, *(t.grad for t in qkv)]
    found = {
        name: float((mine - want.chunk(mesh.size(), 1)[rank]).abs().max())
        for name, mine, want in zip(("out", "dq", "dk", "dv"), [out, *(t.grad for t in heads)], parts, strict=True)
    }
    for (name, mine), want in zip(twin.named_parameters(), module.parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        found[f"d{name}"] = differ(mine.grad, want.grad)  # type: ignore[arg-type]
    state, kept = twin.state_dict(), module.state_dict()
    assert state.keys() == kept.keys()
    found |= {name: differ(t.double(), kept[name].double()) for name, t in state.items()}
    again = split_heads(make_module(**settings), mesh)
    for source in (kept, state):
        again.load_state_dict(source)
        with torch.no_grad():
            later = again.eval()(*heads, **where, **options)
            found[f"loaded, {len(found)}"] = float((later - twin(*heads, **where, **options)).abs().max())
    return found


def drop_heads(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """What dropout makes of heads that are the same on every rank."""
    module = split_heads(lln.LLNAttention(2, 8, dropout=0.4).double(), mesh)
    q, ones = draw(1, 4, 1, 64, 8), torch.ones(4, 1, 64, 1, dtype=torch.float64)

    def attend() -> Tensor:
        torch.manual_seed(3)
        out: Tensor = module(q, q, ones)
        return out

    first, again, after = attend(), attend(), float(torch.rand(()))
    return {"same": torch.equal(first, again), "rows": first.flatten().tolist(), "after": after}


def attempt_split(mesh: DeviceMesh, rank: int) -> dict[str, str]:
    """What is refused, and in which words."""
    q = draw(1, 1, 4, 6, 8)
    twice = split_heads(lln.LLNAttention(4, 8), mesh)
    tries: dict[str, Any] = {
        "odd": lambda: split_heads(lln.LLNAttention(3, 8), mesh),
        "keys": lambda: split_heads(lln.LLNAttention(4, 8, num_key_heads=1), mesh),
        "twice": lambda: split_heads(twice, mesh),
        "none": lambda: split_heads(nn.Linear(2, 2), mesh),
        "peer": lambda: split_heads(lln.mechanism("nystromformer", num_heads=4, head_dim=8), mesh),
        "joined": lambda: split_heads(lln.MultiheadAttention(32, 4), mesh),
        "whole": lambda: twice(q.float(), q.float(), q.float()),
        "few": lambda: lln.LLNAttention(8, 8)(q.float(), q.float(), q.float()),
    }
    found = {}
    for name, call in tries.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


# Models of transformers.


def cut_by_torch(model: Any, mesh: DeviceMesh) -> None:
    """Attention and feed-forward of a BERT, as torch's own tensor parallelism cuts them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {
        "attention.self.query": ColwiseParallel(), "attention.self.key": ColwiseParallel(),
        "attention.self.value": ColwiseParallel(), "attention.output.dense": RowwiseParallel(),
        "intermediate.dense": ColwiseParallel(), "output.dense": RowwiseParallel(),
    }  # fmt: skip
    for layer in model.bert.encoder.layer:
        parallelize_module(layer, mesh, styles)


def cut_by_plan(model: Any, mesh: DeviceMesh) -> None:
    """By the plan that transformers has for a Llama, in torch's styles."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {name: how for name, how in model.config.base_model_tp_plan.items() if how in styles}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= {name.split(".")[-1] for name in plan}
    parallelize_module(model.model, mesh, {name: styles[how]() for name, how in plan.items()})


def compare_parallel(
    mesh: DeviceMesh, rank: int, kind: str, beside: str | None, options: dict[str, Any]
) -> dict[str, float]:
    """A training step of a model whose heads lie on two ranks; beside that sequences lie on two ("sequence"), or the
    rows of the batch, with weights sharded among them ("fsdp")."""
    import lln.hf
    from helpers.spread_models import draw_tokens, make_model

    model = make_model(kind, **options)
    twin = copy.deepcopy(model)
    tokens, _ = draw_tokens(24, None)
    heads, others = mesh, None
    if beside is not None:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("others", "heads"))
        heads, others = both["heads"], both["others"]
    logits = run_alone(model, tokens).logits
    logits.square().mean().backward()
    model.eval()
    (cut_by_torch if kind == "bert" else cut_by_plan)(twin, heads)
    split_heads(twin, heads)
    dim, count = (0, 1) if others is None else (1, 1) if beside == "sequence" else (0, 2)
    if beside == "sequence":
        lln.hf.spread(twin, others)
    elif beside == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in twin.bert.encoder.layer if kind == "bert" else twin.model.layers:
            fully_shard(layer, mesh=others)
        fully_shard(twin, mesh=others)
    mine = twin(tokens if others is None else shard(tokens, others, dim)).logits
    # FSDP takes the mean over ranks.
    (mine.square().sum() * (count / logits.numel())).backward()
    if beside == "sequence" and others is not None:
        sum_gradients(twin.parameters(), others)
    twin.eval()
    want = logits if others is None else shard(logits, others, dim)
    found = {"logits": relative_error(mine.detach(), want.detach())}
    for (name, one), other in zip(twin.named_parameters(), model.parameters(), strict=True):
        if other.grad is not None:
            found[name] = differ(one.grad, other.grad)
    kept = model.state_dict()
    for name, t in twin.state_dict().items():
        found[f"state {name}"] = differ(t.double(), kept[name].double())
    return found


def compare_loaded(mesh: DeviceMesh, rank: int, folder: str) -> dict[str, float]:
    """A model that transformers itself cuts while it loads it, by its own plan, and what is saved of it."""
    import transformers

    import lln.hf
    from helpers.spread_models import draw_tokens

    distributed: Any = transformers.distributed
    plan = distributed.DistributedConfig(tp_plan="auto", tp_size=mesh.size())
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    twin = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=plan)
    split_heads(twin, mesh)
    tokens, _ = draw_tokens(20, None)
    mine, want = twin(tokens).logits, model(tokens).logits
    mine.square().mean().backward()
    want.square().mean().backward()
    found = {"logits": differ(mine, want)}
    for (name, one), other in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        found[name] = differ(one.grad, other[1].grad)
    ask: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = [each.generate(tokens, past_key_values=lln.hf.LLNCache(), **ask) for each in (twin, model)]
    found["generated"] = float((made[0] - made[1]).abs().max())
    whole = twin.gather_sharded_state_dict_for_save(twin, twin.state_dict(), plan)  # as save_pretrained does
    for name, t in model.state_dict().items():
        found[f"saved {name}"] = differ(whole[name], t)
    return found
