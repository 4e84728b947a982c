"""What `lln inspect` looks at: a model of transformers or timm, or a pipeline of diffusers, and what it is shown."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lln.lab.core.errors import Refused, first_line
from lln.lab.core.picture_files import read_picture
from lln.lab.core.pretrained import PIPELINE, is_here, load, load_tokenizer, silence, tell_library
from lln.lab.core.progress import Progress
from lln.lab.inspect.inspection import TEXTS, CannotInspect, inspect_batches
from lln.lab.inspect.inspection import inspect as inspect_texts

STEPS = 3  # of a pipeline: noise, half of it, nearly a picture
CLASSES = 4  # that a pipeline is asked for which makes pictures of classes
DENOISERS = ("transformer", "unet")  # what a pipeline calls the model that attends


@dataclass
class Subject:
    """A model and what it is shown: `called` "text", "picture", "prompt", "class" or "sample", and each by name."""

    model: Any
    called: str
    shown: list[str]
    measure: Callable[[Progress], dict[str, Any]]  # `rows`, `layers` and `tokens`, as of `lln.lab.inspect.inspection`


def find_subject(
    name: str, device: str, texts: Sequence[str], pictures: Sequence[Path], *, max_length: int, batch_size: int,
    seed: int,
) -> Subject:  # fmt: skip
    """Refused for what cannot be loaded, and for texts where there should be pictures. No texts: those that come with
    the package."""
    library = tell_library(name)
    if pictures and (texts or library == "diffusers"):
        raise Refused(
            "--images and --text are for different models; give one of them" if texts else
            f"--images: {name} makes pictures and takes none; describe them with --text"
        )  # fmt: skip
    if library == "diffusers":
        return find_pipeline(name, device, texts, batch_size, seed)
    if library == "timm" and not pictures:
        raise Refused(f"{name} is a model of timm, which sees pictures; name a folder of them with --images")
    if pictures:
        return find_image_model(library, name, device, pictures, batch_size)
    model, tokenizer = load(name, device, load_processor=load_reader)
    given = list(texts or TEXTS)

    def measure(progress: Progress) -> dict[str, Any]:
        return inspect_texts(model, tokenizer, given, max_length=max_length, batch_size=batch_size, progress=progress)

    return Subject(model, "text", given, measure)


def load_reader(model: Any, name: str, options: dict[str, Any]) -> Any:
    """Its tokenizer. Refused for a model that takes pictures."""
    if getattr(model, "main_input_name", "") == "pixel_values":
        raise Refused(f"{name} is a {type(model).__name__}, which sees pictures; name a folder of them with --images")
    return load_tokenizer(model, name, options)


def find_image_model(library: str, name: str, device: str, files: Sequence[Path], size: int) -> Subject:
    if library == "timm":
        model, prepare = load_timm(name, device)
        given_as = "x"
    else:
        model, processor = load(name, device, load_processor=load_image_processor)
        given_as = "pixel_values"

        def prepare(picture: Any) -> torch.Tensor:
            made: torch.Tensor = processor(images=[picture], return_tensors="pt")["pixel_values"][0]
            return made

    def make_batches(progress: Progress) -> Iterator[dict[str, Any]]:
        for first in range(0, len(files), size):
            part = files[first : first + size]
            progress(f"pictures {first + 1} to {first + len(part)}")
            made = [prepare(read_picture(file)) for file in part]
            if len({one.shape for one in made}) > 1:
                raise CannotInspect("its pictures come out in different sizes; inspect them with --batch-size 1")
            yield {given_as: torch.stack(made).to(device)}

    names = [file.name for file in files]
    return Subject(model, "picture", names, lambda progress: inspect_batches(model, make_batches(progress)))


def load_image_processor(model: Any, name: str, options: dict[str, Any]) -> Any:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(name, **options)
    except Exception as error:
        raise Refused(f"{name} has no image processor that can be loaded: {first_line(error)}") from error


def need_library(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise Refused(f"{error.name} is missing; install it with: pip install 'lln-attention[{library}]'") from None


def load_timm(name: str, device: str) -> tuple[Any, Any]:
    """(model, what makes its input of a picture) of a folder that timm saved, or of a Hub id."""
    timm = need_library("timm")
    place = f"local-dir:{Path(name).expanduser()}" if Path(name).expanduser().is_dir() else f"hf-hub:{name}"
    try:
        model = timm.create_model(place, pretrained=True)
        prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    except Exception as error:  # of whichever file it is
        raise Refused(f"{name} holds no model that timm can load: {first_line(error)}") from error
    return model.float().to(device).eval(), prepare


def find_pipeline(name: str, device: str, texts: Sequence[str], size: int, seed: int) -> Subject:
    """The model of a pipeline that attends, given what the pipeline gives it in a few steps from noise to a picture."""
    diffusers = need_library("diffusers")
    import transformers

    here = is_here(name, (PIPELINE,))
    with silence(transformers, bars=not here), silence(diffusers, bars=not here):
        try:
            pipe = diffusers.DiffusionPipeline.from_pretrained(name, local_files_only=here, torch_dtype=torch.float32)
            pipe.to(device)
        except Exception as error:
            raise Refused(f"{name} holds no pipeline that diffusers can load: {first_line(error)}") from error
    pipe.set_progress_bar_config(disable=True)
    model = next((found for part in DENOISERS if isinstance(found := getattr(pipe, part, None), torch.nn.Module)), None)
    if model is None:
        raise Refused(f"{name} ({type(pipe).__name__}) has neither a transformer nor a unet, so nothing can be seen")
    takes = inspect.signature(pipe.__call__).parameters
    if "prompt" not in takes and texts:
        raise Refused(f"--text: {name} ({type(pipe).__name__}) takes no prompt; leave it out")
    called = "prompt" if "prompt" in takes else "class" if "class_labels" in takes else "sample"
    asked: list[Any] = list(texts or TEXTS) if called == "prompt" else list(range(CLASSES))

    def make_batches(progress: Progress) -> Iterator[dict[str, Any]]:
        for first in range(0, len(asked), size):
            part = asked[first : first + size]
            progress(f"{called} {first + 1} to {first + len(part)}")
            wanted: dict[str, dict[str, Any]] = {
                "prompt": {"prompt": part},
                "class": {"class_labels": part},
                "sample": {"batch_size": len(part)},
            }
            given: dict[str, Any] = {"num_inference_steps": STEPS, "output_type": "latent", **wanted[called]}
            given["generator"] = torch.Generator().manual_seed(seed + first)
            try:
                taken = {k: v for k, v in given.items() if k in takes}
                yield from catch_calls(model, functools.partial(pipe, **taken))
            except Exception as error:
                raise CannotInspect(f"its pipeline does not run: {first_line(error)}") from error

    names = asked if called == "prompt" else [f"{called} {number}" for number in asked]
    return Subject(model, called, names, lambda progress: inspect_batches(model, make_batches(progress)))


def catch_calls(model: torch.nn.Module, work: Callable[[], Any]) -> list[dict[str, Any]]:
    """The arguments, by their names, of each call of the model while `work` is done."""
    found: list[dict[str, Any]] = []
    signature = inspect.signature(model.forward)

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(dict(signature.bind(*args, **kwargs).arguments))

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        work()
    finally:
        handle.remove()
    return found
