"""Import paths of the last release work in every form, warn once each, and give what is in the new place."""

import importlib
import json

import pytest

from helpers.command import run_python
from lln._moved import MOVED, find_new

# What the last release (commit 523d99b) said can be imported, in its documentation and the docstrings of its rooms, and
# what its modules of one purpose are for.
NAMES = {
    "lln.attention": "lln_attention Backend Coefficient CuSeqlens Mix",
    "lln.cli": "app main",
    "lln.convolution": "Convolve convolve",
    "lln.curves": "s2_for_entropy s2_for_variance",
    "lln.feature_map": "map_features",
    "lln.mechanisms": "Mechanism attention attention_matrix mechanism mechanisms",
    "lln.mechanisms.based": "based",
    "lln.mechanisms.bigbird": "bigbird",
    "lln.mechanisms.block_diagonal": "block_diagonal",
    "lln.mechanisms.calls": "attention attention_matrix",
    "lln.mechanisms.convolved_softmax": "ConvolvedSoftmax",
    "lln.mechanisms.cosformer": "cosformer",
    "lln.mechanisms.flash": "Flash",
    "lln.mechanisms.hedgehog": "Hedgehog",
    "lln.mechanisms.linformer": "Linformer",
    "lln.mechanisms.lln_attention": "lln",
    "lln.mechanisms.longformer": "longformer",
    "lln.mechanisms.mixers": "Mixer",
    "lln.mechanisms.modules": "AttentionModule mechanism",
    "lln.mechanisms.nystromformer": "Nystromformer nystromformer",
    "lln.mechanisms.performer": "Performer performer",
    "lln.mechanisms.random_features": "RandomFeatures",
    "lln.mechanisms.reformer": "reformer",
    "lln.mechanisms.registry": "Mechanism REGISTRY mechanisms register",
    "lln.mechanisms.rfa": "RFA rfa",
    "lln.mechanisms.skyformer": "skyformer",
    "lln.mechanisms.softmax": "softmax",
    "lln.mechanisms.tnn": "TNN",
    "lln.mechanisms.transformer_ls": "TransformerLS",
    "lln.moments": "Matching match_data match_moments",
    "lln.multihead": "MultiheadAttention",
    "lln.nn": "LLNAttention",
    "lln.options": "check_options",
    "lln.overlap": "overlapping_attention",
    "lln.recipes": "NAMES PRESETS RECIPES recipe",
    "lln.recipes.glue": "mini paper tiny",
    "lln.recipes.image": "mini paper tiny",
    "lln.recipes.lra": "mini paper tiny",
    "lln.recipes.mlm": "mini paper tiny",
    "lln.recipes.needles": "mini tiny",
    "lln.training.config": "Attention Config Data Model Optimisation change",
    "lln.training.errors": "DataError",
    "lln.training.examples": "Examples Pad Sequences Stream",
    "lln.training.glue": "load_glue",
    "lln.training.images": "Images load_images",
    "lln.training.listops": "load_listops",
    "lln.training.lra": "load_byte_text load_pixels load_retrieval",
    "lln.training.masking": "Masking",
    "lln.training.models": "build",
    "lln.training.needles": "Needles load_needles",
    "lln.training.pathfinder": "load_pathfinder",
    "lln.training.recording": "Recording",
    "lln.training.run": "train",
    "lln.training.runs": "Run",
    "lln.training.sources": "Rows read",
    "lln.training.tasks": "TaskData load",
    "lln.training.text": "PackedText load_text",
    "lln.training.tokenizer": "TextTokenizer load_tokenizer train_tokenizer",
    "lln.weights": "dense_weights",
}

ALL_FORMS = """
import importlib, sys, types, warnings
import lln
from lln._moved import FUNCTIONS, MOVED, Room, find_new

warnings.simplefilter("ignore")


def run_afresh(statement):  # as in a process that has imported nothing by an old path
    for old in MOVED:
        sys.modules.pop(old, None)
        top = old.split(".")[1]
        if isinstance(vars(lln).get(top), types.ModuleType):
            del vars(lln)[top]
    vars(lln.mechanisms).clear()
    names = {"sys": sys}
    exec(statement, names)
    return names["got"]


def is_new(got, old, new):
    if isinstance(got, Room):  # it keeps its old name, so that its modules are found by theirs
        return got is sys.modules[old] and all(getattr(got, n) is getattr(new, n) for n in getattr(new, "__all__", ()))
    return got is new and new.__spec__.name == MOVED[old]


for old in MOVED:
    room, _, last = old.rpartition(".")
    new = importlib.import_module(find_new(old)[0])
    assert is_new(run_afresh(f"import {old}; got = sys.modules['{old}']"), old, new), old
    for statement in (f"import {old} as got", f"from {room} import {last} as got"):
        got = run_afresh(statement)
        if room == "lln" and last in FUNCTIONS:  # in the last release, too, these forms gave the function
            assert got is getattr(lln.peers, last), (statement, got)
        else:
            assert is_new(got, old, new), (statement, got)
    name = next(n for n in (*getattr(new, "__all__", ()), *vars(new)) if n[0] != "_" or n == "__doc__")
    assert run_afresh(f"from {old} import {name} as got") == getattr(new, name), (old, name)
    print(old)
"""


def test_every_form_of_import_gives_what_is_in_the_new_place() -> None:
    assert run_python(ALL_FORMS).split() == list(MOVED)


def test_every_name_is_found_by_its_old_path_with_one_warning() -> None:
    code = f"""
import warnings
for module, names in {json.dumps(NAMES)}.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in names.split():
            exec(f"from {{module}} import {{name}}")
    print(module, *[str(w.message).split()[0] for w in caught])
"""
    said = {module: warned for module, *warned in map(str.split, run_python(code).splitlines())}
    assert said == {module: [] if module == "lln.nn" else [module] for module in NAMES}  # lln.nn is where it was


def test_it_warns_once_for_a_path_names_the_new_place_and_shows_who_imported() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from lln.training.glue import load_glue
    from lln.training import glue, trainer
    from lln.training.trainer import Loop
    import lln.mechanisms.lln_attention as log_normal
    from lln.moments import match_data
    from lln.recipes import recipe
    import lln.recipes
    lln.recipes.recipe
print(*[f"{w.filename} {w.category.__name__}: {w.message}" for w in caught], sep="\\n")
"""
    new_places = {
        "lln.training.glue": "lln.lab.data.labelled",
        "lln.training.trainer": "lln.lab.train.loop",
        "lln.mechanisms.lln_attention": "lln.peers.log_normal",
        "lln.moments": "lln.matching.moments and lln.matching.data",
        "lln.recipes": "lln.lab.recipes",
    }
    end = "the old name works in this release and not in the next."
    assert run_python(code, "-W", "error").splitlines() == [
        f"<string> DeprecationWarning: {old} is now {new}; {end}" for old, new in new_places.items()
    ]


def test_functions_are_not_hidden_by_modules_of_their_name() -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
import lln, torch
from lln.attention import lln_attention
from lln.mechanisms.registry import Mechanism
import lln.peers.registry as registry
assert callable(lln.attention) and callable(lln.mechanisms)
assert lln_attention is lln.lln_attention and Mechanism is registry.Mechanism
q = torch.randn(1, 1, 4, 8)
print(tuple(lln.attention("elu", q, q, q).shape))
"""
    assert run_python(code, "-W", "error") == "(1, 1, 4, 8)\n"


def test_what_never_was_is_not_found() -> None:
    assert find_new("lln.hf") == []
    with pytest.raises(ModuleNotFoundError, match=r"lln\.training\.nonsense"):
        importlib.import_module("lln.training.nonsense")
