"""What a conversion looks at and learns from: passages of text or pictures. All that differs between the two is asked
for here and said in a file for each; the stages of a conversion do not care."""

import abc
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from lln.lab.convert.conversion_plan import ConversionPlan
from lln.lab.convert.given import TAKEN
from lln.lab.core.errors import Refused

Batch = Mapping[str, Any]


IN_PYTHON = "lln.hf.convert, lln.hf.fit and lln.hf.distill convert it in Python, on batches of all that it takes"


class Material(abc.ABC):
    called: str  # what several of them are called: passages, pictures
    given_as: str  # the argument of the model, of those in TAKEN
    processor: Any  # what makes a model's inputs of it, as `load` gave it; saved beside the converted model
    changed = False  # whether it makes larger inputs now than it did

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """The same for the same material, wherever it lies."""

    @abc.abstractmethod
    def load_processor(self, model: PreTrainedModel, name: str, options: dict[str, Any]) -> Any:
        """For `lln.lab.core.pretrained.load`: the processor of the checkpoint `name`."""

    @abc.abstractmethod
    def prepare(self, model: PreTrainedModel, plan: ConversionPlan) -> Sequence[Any]:
        """All passages or pictures, each in a form that `make_batches` takes. Where larger ones than the model has
        places for are asked for, it gets them."""

    @abc.abstractmethod
    def enlarge(self, model: PreTrainedModel) -> PreTrainedModel:
        """Give the softmax model, loaded again, as many places."""

    @abc.abstractmethod
    def make_batches(self, model: PreTrainedModel, some: Sequence[Any], size: int) -> Sequence[Batch]:
        """`size` of them at a time, in their order."""

    @abc.abstractmethod
    def describe_size(self) -> dict[str, Any]:
        """How large one of them is, for the report."""

    @abc.abstractmethod
    def block_size(self, plan: ConversionPlan) -> dict[str, int]:
        """Of softmax attention's blocks, as an option of `lln.hf.convert`."""

    @abc.abstractmethod
    def check_blocks(self, model: PreTrainedModel) -> None:
        """Refused where one block holds all there is, so that nothing is left to LLN. model: has run with blocks."""

    @property
    def kind(self) -> str:
        return TAKEN[self.given_as].kind

    def request(self, plan: ConversionPlan) -> dict[str, Any]:
        """What was asked for, without what is about the other material."""
        others = {field for given, taken in TAKEN.items() if given != self.given_as for field in taken.fields}
        wishes = {name: value for name, value in dataclasses.asdict(plan).items() if name not in others}
        return wishes | {self.kind: self.fingerprint()}

    def check_model(self, model: PreTrainedModel, name: str) -> None:
        """Refused where the model takes something else."""
        wanted, remedy = model.main_input_name, IN_PYTHON
        if wanted == self.given_as:
            return
        if self.given_as in inspect.signature(model.forward).parameters:  # CLIP: not by itself
            wanted = " and ".join(taken.kind for taken in TAKEN.values())
        elif (taken := TAKEN.get(wanted)) is not None:
            mine = TAKEN[self.given_as].option
            wanted, remedy = taken.kind, f"give it some with {taken.option} {taken.named} in place of {mine}"
        raise Refused(f"{name} is a {type(model).__name__}, which takes {wanted}; {remedy}")
