"""A pretrained model, and what makes its inputs, by the name a user gives, or one sentence about why not."""

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lln.files import hash_file
from lln.lab.core.errors import Refused, first_line

CONFIG, PIPELINE = "config.json", "model_index.json"  # of a model, and of a pipeline of diffusers
PATIENCE = 10.0  # seconds that the Hub has to answer whether it has a model


def load_tokenizer(model: Any, name: str, options: dict[str, Any]) -> Any:
    """What makes a model's inputs of text. options: where transformers may look for it."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:
        why = first_line(error)
        if why.endswith(" one of"):  # transformers' sentence, whose end is a list of its own ways to make one
            why = "transformers finds no tokenizer.json or vocabulary that it knows"
        remedy = "the tokenizer of the model, saved beside its weights, is needed to give it text"
        raise Refused(f"{name} has no tokenizer that can be loaded: {why}; {remedy}") from error
    # Without files transformers makes one that knows no word.
    if not callable(tokenizer) or len(tokenizer) <= len(getattr(tokenizer, "all_special_ids", ())):
        raise Refused(f"{name} has no tokenizer (tokenizer.json or a vocabulary), so it cannot be given text")
    return tokenizer


def load(
    name: str,
    device: str = "cpu",
    *,
    headed: bool = False,
    load_processor: Callable[[Any, str, dict[str, Any]], Any] = load_tokenizer,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a local folder or a Hub id, in float32 and eval; `headed`: with the head that was saved.
    load_processor: loads something else in the tokenizer's place, of the model, its name and where to look for it.

    A folder is read without any use of the network. A Hub id is asked for once: transformers by itself would go on to
    ask for half a minute where there is no network. What is in the local cache serves then.

    Raises:
        Refused."""
    import transformers

    here = is_here(name)
    options: dict[str, Any] = {"local_files_only": here, "trust_remote_code": False}
    with silence(transformers, bars=not here):  # a download may take minutes
        try:
            kind = transformers.AutoModel
            if headed:
                named = transformers.AutoConfig.from_pretrained(name, **options).architectures or [""]
                kind = getattr(transformers, named[0], kind)
            model, about = kind.from_pretrained(name, dtype=torch.float32, output_loading_info=True, **options)
        except Exception as error:  # whatever is wrong with a file, transformers has an exception of its own for it
            raise Refused(f"{name} holds no model that transformers can load: {first_line(error)}") from error
        missing, there = len(about["missing_keys"]), len(model.state_dict())
        if 2 * missing > there:
            raise Refused(f"the weights in {name} do not fit its config: {missing} of {there} are missing")
        if (damaged := find_not_finite(model)) is not None:
            raise Refused(f"the weights in {name} are not finite: {damaged} holds NaN or infinity")
        processor = load_processor(model, name, options)
    return model.to(device).eval(), processor


def find_not_finite(model: Any) -> str | None:
    """The first of a model's weights in which there is NaN or infinity: nothing that is measured on it would be a
    number."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            return str(name)
    return None


def is_here(name: str, kept: Sequence[str] = (CONFIG,)) -> bool:
    """Whether the model is on this machine, else it is on the Hub; Refused for neither. kept: a file by which one can
    be known."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in kept):
            raise Refused(f"the folder {name} holds no config.json, so no model of transformers")
        return True
    if path.exists():
        raise Refused(f"{name} is a file; name the folder that a model was saved to, or a Hub id")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise Refused(f"there is no folder {name}, and it is no Hub id (like google-bert/bert-base-uncased)")
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    cached = any(isinstance(try_to_load_from_cache(name, file), (str, os.PathLike)) for file in kept)
    problem = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            HfApi().model_info(name, timeout=PATIENCE)
            return False
        except GatedRepoError:
            raise Refused(f"{name} is gated: accept its terms on the Hub and log in with `hf auth login`") from None
        except RepositoryNotFoundError:
            raise Refused(f"there is no folder {name} and no public model of that name on the Hub") from None
        except Exception as error:  # of whichever library makes the request
            problem = f"the Hub does not answer ({first_line(error)})"
    if not cached:
        raise Refused(f"there is no folder {name}, it is not in the local cache, and {problem}")
    return True


def tell_library(name: str) -> str:
    """Which library a model of that name is for: "transformers", "timm", or "diffusers" where it is a pipeline of that.
    Refused where there is none, and for a part of a pipeline."""
    if not is_here(name, (CONFIG, PIPELINE)) and not Path(name).expanduser().is_dir():
        from huggingface_hub import HfApi

        info = HfApi().model_info(name, timeout=PATIENCE)
        if any(file.rfilename == PIPELINE for file in info.siblings or ()):
            return "diffusers"
        return "timm" if info.library_name == "timm" else "transformers"
    if find_file(name, PIPELINE) is not None:
        return "diffusers"
    file = find_file(name, CONFIG)
    try:
        held = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
    except (OSError, ValueError):  # transformers will say what is wrong with it
        held = {}
    if "_diffusers_version" in held:
        raise Refused(
            f"{name} is one part of a diffusers pipeline ({held.get('_class_name')}), and by itself it does not say "
            f"what it is given; name the folder of the pipeline, which has a {PIPELINE}"
        )
    return "timm" if "architecture" in held and "model_type" not in held else "transformers"


def find_file(name: str, file: str) -> Path | None:
    """In the folder of that name, or in the local cache of the Hub."""
    if (folder := Path(name).expanduser()).is_dir():
        return folder / file if (folder / file).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, (str, os.PathLike)) else None


def find_snapshot(name: str) -> Path | None:
    """The folder of the local cache that a Hub id was loaded from; None: it was not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, (str, os.PathLike)) else None


def identify(name: str) -> dict[str, str]:
    """What tells another model in the same folder: its config and its weights, to the last bit. Nothing of a folder
    without a config."""
    path = Path(name).expanduser()
    if not (path / CONFIG).is_file():
        return {}
    digest = hashlib.sha256((path / CONFIG).read_bytes())
    for file in sorted(path.iterdir()):
        if file.suffix in (".safetensors", ".bin"):
            digest.update(f"{file.name} {hash_file(file)}".encode())
    return {"weights": digest.hexdigest()[:16]}


def shorten_name(name: str) -> str:
    """Where a machine keeps its files is nobody's business; the last two parts of a path tell models apart."""
    path = Path(name).expanduser()
    return "/".join(path.resolve().parts[-2:]) if path.is_dir() else name


@contextlib.contextmanager
def silence(transformers: Any, bars: bool) -> Iterator[None]:
    """Without the notes that loading writes, and unless bars without its progress bars."""
    logging = transformers.utils.logging
    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
