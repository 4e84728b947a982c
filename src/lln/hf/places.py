"""The places that a transformers model has for tokens or patches, kind by kind, and how each kind is made longer."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

LEARNED = ("repeat", "interpolate")  # what `method` may be, the default first
ROTARY = ("yarn", "linear")
PROPORTIONAL = ("linear", "yarn", "llama3", "proportional")  # ways to rotate that one factor scales
LIMIT = "max_position_embeddings"
TABLES = (
    "position_embeddings", "position_embedding", "positional_embedding", "embed_positions", "positions_embed",
    "pos_embed", "pos_emb", "wpe",
)  # fmt: skip
IDS = ("position_ids", "token_type_ids")  # buffers that are as long as the table beside them
CLOSE = 0.01  # to a table of sines, in half precision too; what is learned is never as near
Change = Callable[[], None]


class Places(ABC):
    """One kind of places in a model, and the config that says how many."""

    def __init__(self, model: PreTrainedModel, path: str, module: Any, config: Any) -> None:
        self.model, self.path, self.module, self.config = model, path.removeprefix("."), module, config
        self.count: int = getattr(config, LIMIT)

    @abstractmethod
    def plan(self, length: int, method: str | None) -> tuple[dict[str, Any], Change]:
        """The config's new values, and what changes the module. Whatever is refused is refused here, with a ValueError
        and before anything has changed."""

    def check_method(self, method: str | None, known: tuple[str, ...], what: str) -> None:
        if method not in (None, *known):
            way = f"must be {' or '.join(map(repr, known))}" if known else "must be left out"
            raise ValueError(f"method {way} for {what} of {type(self.model).__name__}; got {method!r}.")


class Table(Places):
    """Rows of an nn.Embedding, learned or sines. The first few may be no token's: padding's, or left free."""

    def __init__(self, model: PreTrainedModel, path: str, module: nn.Embedding, config: Any, holder: Any) -> None:
        super().__init__(model, path, module, config)
        self.holder = holder
        spare = module.num_embeddings - self.count  # rows that the config does not count
        ids = getattr(holder, "position_ids", None)
        if isinstance(offset := getattr(module, "offset", None), int):
            self.first = offset
        elif module.padding_idx is not None and getattr(holder, "padding_idx", None) is not None:
            self.first = module.padding_idx + 1  # RoBERTa and its kin count from behind the padding's
        elif isinstance(ids, Tensor):
            self.first = module.num_embeddings - ids.shape[-1]  # some (Nystromformer) begin behind rows of no token's
        else:
            self.first = 0
        self.count = module.num_embeddings - self.first
        self.told = spare in (0, self.first)

    def plan(self, length: int, method: str | None) -> tuple[dict[str, Any], Change]:
        weight, more = self.module.weight, length - self.count
        self.check_others()
        sines = None if weight.is_meta else continue_sines(weight, len(weight) + more)
        if sines is None:
            self.check_method(method, LEARNED, "the learned positions")
            rows = lengthen(weight.detach()[self.first :], length, method or LEARNED[0])
            rows = torch.cat([weight.detach()[: self.first], rows])
        else:
            self.check_method(method, (), "the sinusoidal positions")
            rows = torch.cat([weight.detach(), sines[len(weight) :].to(weight)])
        table = nn.Parameter(rows, requires_grad=weight.requires_grad)

        def change() -> None:
            replace_parameter(self.model, weight, table)
            lengthen_ids(self.holder, len(weight), more)
            self.module.num_embeddings = len(rows)

        return {LIMIT: getattr(self.config, LIMIT) + more}, change

    def check_others(self) -> None:
        """ValueError where the config does not tell the table's length (LED has two), or something else has it, too:
        GPT-Neo's masks, DeBERTa's relative positions."""
        rows, name = self.module.num_embeddings, type(self.model).__name__
        if not self.told:
            raise ValueError(
                f"length: {self.path} of {name} has {rows} rows, which config.{LIMIT}={getattr(self.config, LIMIT)} "
                "does not tell, so a saved model would not fit; extend this model by what its own class offers."
            )
        distances = {rows, 2 * rows - 1, 2 * rows, 2 * rows + 1}
        others = [
            path for path, own in self.model.named_parameters() if is_relative(path) and distances & set(own.shape)
        ] + [
            path
            for path, own in self.model.named_buffers()
            if own.ndim > 1 and (own.shape[-1] == rows != own.numel() or own.shape[-2] == rows)
        ]
        if others:
            raise ValueError(
                f"length: {name} cannot have more places: {others[0]} is as long as its positions, and there is no "
                "known way to extend it; use a model with learned or rotary positions alone."
            )


class Sines(Places):
    """A buffer of sines in every attention module, by which queries and keys are turned (GPT-J)."""

    def __init__(self, model: PreTrainedModel, path: str, module: nn.Module, config: Any, name: str) -> None:
        super().__init__(model, path, module, config)
        self.name = name
        self.count = len(getattr(module, name))

    def plan(self, length: int, method: str | None) -> tuple[dict[str, Any], Change]:
        self.check_method(method, (), "the sinusoidal positions")
        held = getattr(self.module, self.name)
        # The model's own function, so that a loaded model has the very same numbers.
        compute = getattr(sys.modules[type(self.module).__module__], "create_sinusoidal_positions", None)
        if compute is None:
            raise ValueError(
                f"length: {self.path}.{self.name} of {type(self.model).__name__} follows no known formula; extend this "
                "model by what its own class offers."
            )
        sines = compute(length, held.shape[1])
        rows = torch.cat([held, sines[len(held) :].to(held)])
        return {LIMIT: length}, lambda: setattr(self.module, self.name, rows)


class Formula(Places):
    """Sines that a module computes anew for whatever length comes: there is nothing to change but the config."""

    def plan(self, length: int, method: str | None) -> tuple[dict[str, Any], Change]:
        self.check_method(method, (), "the sinusoidal positions")
        return {LIMIT: length}, lambda: None


class Rotation(Places):
    """A rotary module, made again from a config whose frequencies are scaled."""

    def plan(self, length: int, method: str | None) -> tuple[dict[str, Any], Change]:
        self.check_method(method, ROTARY, "the rotary positions")
        given = self.config.rope_parameters
        if any(isinstance(value, dict) for value in given.values()):
            # Rotations are relative, so a window never sees a distance that is new to it: its layers stay.
            scaled = {
                kind: self.scale(own, length, method) if own and "sliding" not in kind else own
                for kind, own in given.items()
            }
        else:
            scaled = self.scale(given, length, method)
        values: dict[str, Any] = {"rope_parameters": scaled, LIMIT: length}
        trial = copy.deepcopy(self.config)
        for name, value in values.items():
            setattr(trial, name, copy.deepcopy(value))
        fresh = self.build(trial)

        def change() -> None:
            for name, value in vars(fresh).items():
                if not name.startswith("_") and name not in ("config", "training"):
                    setattr(self.module, name, value)
            for name, buffer in fresh.named_buffers(recurse=False):
                # In float32, as transformers makes them for every dtype: half a million places need the digits.
                setattr(self.module, name, buffer.to(getattr(self.module, name).device))

        return values, change

    def scale(self, own: dict[str, Any], length: int, method: str | None) -> dict[str, Any]:
        """rope_parameters whose rotation goes `length` / `count` times as far."""
        kind, ratio = own.get("rope_type", "default"), length / self.count
        if kind == "default":
            chosen = method or ROTARY[0]
            origin = {"original_max_position_embeddings": self.count} if chosen == "yarn" else {}
            return {**own, "rope_type": chosen, "factor": ratio, **origin}
        name = type(self.model).__name__
        if kind not in PROPORTIONAL or own.get("mscale_all_dim"):
            remedy = (
                "it follows the length of each input by itself, and takes longer ones as it is"
                if kind == "dynamic"
                else "set config.rope_parameters to values that were found for it"
            )
            raise ValueError(f"length: the rotary positions of {name} are {kind!r}, which no factor extends; {remedy}.")
        if method not in (None, kind):
            raise ValueError(
                f"method: the rotary positions of {name} are scaled by {kind!r} already; leave method out to scale "
                f"them further, got {method!r}."
            )
        return {**own, "factor": float(own.get("factor") or 1) * ratio}

    def build(self, config: Any) -> Any:
        kind = type(self.module)
        wanted = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
        if wanted == ["config"] and is_valid(config):
            fresh = kind(config)
            if read_shapes(fresh) == read_shapes(self.module):
                return fresh
        raise ValueError(
            f"length: the rotary positions of {type(self.model).__name__} cannot be made again with scaled "
            "frequencies; try another method, or load the model with rope_parameters of your own in its config."
        )


class Grid:
    """A table of patch positions, [1, spare + patches, dim] or rows of an nn.Embedding. The spare ones come first: the
    class token's and the distillation token's."""

    def __init__(self, model: PreTrainedModel, weight: nn.Parameter, config: Any, holder: Any) -> None:
        self.model, self.weight, self.config, self.holder = model, weight, config, holder
        self.size, self.patch = read_pair(config.image_size), read_pair(config.patch_size)
        self.shape = self.size[0] // self.patch[0], self.size[1] // self.patch[1]
        self.spare = weight.shape[-2] - math.prod(self.shape)

    def plan(self, size: tuple[int, int]) -> tuple[dict[str, Any], Change]:
        """The same as of `Places`, for pictures of that height and width."""
        name = type(self.model).__name__
        if any(side % patch for side, patch in zip(size, self.patch, strict=True)):
            raise ValueError(f"image_size must be a multiple of {name}'s patch_size {self.patch}; got {size}.")
        if size[0] != size[1] and not self.takes_oblong():
            raise ValueError(f"image_size must be a square for {name}, which knows no other; got {size}.")
        shape = size[0] // self.patch[0], size[1] // self.patch[1]
        old, patches = self.weight.detach(), math.prod(shape)
        self.check_others()
        rows = torch.cat([old[..., : self.spare, :], resample(old[..., self.spare :, :], self.shape, shape)], -2)
        table = nn.Parameter(rows, requires_grad=self.weight.requires_grad)
        new = {"num_patches": patches, "num_positions": rows.shape[-2], "grid_size": shape, "patch_shape": shape}

        def change() -> None:
            replace_parameter(self.model, self.weight, table)
            lengthen_ids(self.holder, old.shape[-2], rows.shape[-2] - old.shape[-2])
            for module in (self.holder, *self.holder.children()):
                if hasattr(module, "image_size"):
                    module.image_size = keep_kind(module.image_size, size)
                if isinstance(module, nn.Embedding):
                    module.num_embeddings = len(module.weight)
                for known, value in new.items():
                    if hasattr(module, known):
                        setattr(module, known, value)

        return {"image_size": keep_kind(self.config.image_size, size)}, change

    def takes_oblong(self) -> bool:
        """Whether pictures may be other than square: some (CLIP) keep one number, others (DINOv2) resample the table at
        every call and take it for a square then."""
        sizes = [m.image_size for m in (self.holder, *self.holder.children()) if hasattr(m, "image_size")]
        asked = "interpolate_pos_encoding" in inspect.signature(self.holder.forward).parameters
        return asked and not any(isinstance(size, int) for size in sizes)

    def check_others(self) -> None:
        """ValueError where something else is as large as the grid: BEiT's relative positions, a decoder's table."""
        sizes = {math.prod(self.shape), self.weight.shape[-2]}
        for path, tensor in name_tensors(self.model):
            beside = "relative_position" in path or ("pos" in path and bool(sizes & set(tensor.shape)))
            if beside and tensor is not self.weight and not path.endswith(IDS):
                raise ValueError(
                    f"image_size: {type(self.model).__name__} cannot have more places: {path} belongs to the grid of "
                    "its patches, and there is no known way to extend it; use a model with one table of positions."
                )


def walk(model: PreTrainedModel) -> Iterator[tuple[str, Any, Any]]:
    """(path, module, config) of every module, with the config of the nearest module around it that has one."""
    configs: dict[str, Any] = {"": model.config}
    for path, module in model.named_modules():
        own = getattr(module, "config", None)
        configs[path] = own if isinstance(own, PreTrainedConfig) else configs[path.rpartition(".")[0]]
        yield path, module, configs[path]


def find_places(model: PreTrainedModel) -> Iterator[Places]:
    """Whatever of the model limits how many tokens it takes."""
    for path, module, config in walk(model):
        if not isinstance(getattr(config, LIMIT, None), int) or has_patches(module):
            continue
        for name, child in module.named_children():
            if computes_sines(child):
                yield Formula(model, f"{path}.{name}", child, config)
            elif isinstance(child, nn.Embedding) and name in TABLES:
                yield Table(model, f"{path}.{name}", child, config, module)
        for name, _ in module.named_buffers(recurse=False):
            if name in TABLES:
                yield Sines(model, path, module, config, name)
        rotates = hasattr(module, "rope_type") and isinstance(getattr(config, "rope_parameters", None), dict)
        if rotates and not getattr(config, "alibi", False):  # Falcon may have both, and uses one
            yield Rotation(model, path, module, config)


def find_grids(model: PreTrainedModel) -> Iterator[Grid]:
    for _, module, config in walk(model):
        if not has_patches(module) or not hasattr(config, "image_size") or not hasattr(config, "patch_size"):
            continue
        for name in TABLES:
            held = getattr(module, name, None)
            weight = held.weight if isinstance(held, nn.Embedding) else held
            if isinstance(weight, nn.Parameter):
                grid = Grid(model, weight, config, module)
                if 0 <= grid.spare <= 2:  # else it is for more than one picture's patches
                    yield grid


def has_patches(module: nn.Module) -> bool:
    return any("patch" in name for name, _ in module.named_children())


def computes_sines(module: nn.Module) -> bool:
    """Whether it makes positions for whatever length comes: from a table that it makes anew, or from none."""
    if hasattr(module, "make_weights") or hasattr(module, "make_weight"):
        return True
    return "Sinusoid" in type(module).__name__ and not any(True for _ in module.parameters())


def name_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def is_relative(path: str) -> bool:
    """Whether a parameter, by its name, is of relative positions."""
    return any(part.startswith(("rel_", "relative_", "distance_")) for part in path.split(".")[-2:])


def is_valid(config: Any) -> bool:
    """Whether a model with this config could be loaded: some (Phi-3) know only a way of their own to scale."""
    try:
        type(config).from_dict(config.to_dict())
    except (ValueError, KeyError, StrictDataclassError):
        return False
    return True


def read_shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: buffer.shape for name, buffer in module.named_buffers(recurse=False)}


def lengthen(rows: Tensor, length: int, method: str) -> Tensor:
    """[places, dim] -> [length, dim]"""
    if method == "repeat":
        return rows[torch.arange(length, device=rows.device) % len(rows)]
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32)).T[None]
    return nn.functional.interpolate(wide, size=length, mode="linear", align_corners=True)[0].T.to(rows.dtype)


def resample(rows: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Patch positions [..., patches, dim] of one grid for another."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32)).reshape(1, *old, -1).permute(0, 3, 1, 2)
    found = nn.functional.interpolate(wide, size=new, mode="bicubic", align_corners=False)
    return found.permute(0, 2, 3, 1).reshape(*rows.shape[:-2], -1, rows.shape[-1]).to(rows.dtype)


def continue_sines(table: Tensor, rows: int) -> Tensor | None:
    """The sines and cosines that the table begins, beside each other or in halves; None where it holds others."""
    dim = table.shape[1]
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device=table.device) / dim
    angles = torch.arange(rows, dtype=torch.float64, device=table.device)[:, None] / 10000**steps
    sin, cos = angles.sin(), angles.cos()
    for whole in (torch.cat([sin, cos[:, : dim // 2]], 1), torch.stack([sin, cos], 2).flatten(1)[:, :dim]):
        if torch.allclose(whole[: len(table)], table.detach().to(whole), rtol=0, atol=CLOSE):
            return whole
    return None


def lengthen_ids(holder: nn.Module, rows: int, more: int) -> None:
    """Make the buffers of positions and token types beside a table that had so many rows longer."""
    for name, buffer in holder.named_buffers(recurse=False):
        if name in IDS:
            count = buffer.shape[-1] + more
            first = rows - buffer.shape[-1]  # some (Nystromformer) begin behind the rows that are no token's
            ids = torch.arange(first, first + count, dtype=buffer.dtype, device=buffer.device)
            setattr(holder, name, (ids if name == "position_ids" else torch.zeros_like(ids)).expand(1, -1))


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Wherever it is held: tied weights stay tied."""
    holders = [(m, name) for m in model.modules() for name, own in m.named_parameters(recurse=False) if own is old]
    for module, name in holders:
        setattr(module, name, new)


def read_pair(size: int | Iterable[int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def keep_kind(held: int | Iterable[int], size: tuple[int, int]) -> int | list[int] | tuple[int, int]:
    """The size as a number where that is how it was held and can be."""
    if isinstance(held, int) and size[0] == size[1]:
        return size[0]
    return list(size) if isinstance(held, list) else size
