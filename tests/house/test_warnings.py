"""Warnings of ours stop a test; those that other packages add in a new version do not."""

import warnings

import pytest


def warn_from(module: str, category: type[Warning] = UserWarning, text: str = "something") -> None:
    warnings.warn_explicit(text, category, f"{module}.py", 1, module=module)


@pytest.mark.parametrize("module", ["lln", "lln.hf.hooks", "helpers.tensors", "test_warnings"])
def test_a_warning_of_ours_is_an_error(module: str) -> None:
    with pytest.raises(UserWarning):
        warn_from(module)


def test_an_old_path_of_ours_is_an_error_whoever_takes_it() -> None:
    with pytest.raises(DeprecationWarning):
        warn_from("transformers.models", DeprecationWarning, "lln.training is now lln.lab.train")


@pytest.mark.parametrize(("module", "category"), [("torch.backends.cuda", UserWarning), ("lln", FutureWarning)])
def test_a_warning_of_others_is_not(module: str, category: type[Warning]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warn_from(module, category)
    assert len(seen) == 1
