"""transformers' models with LLN attention are exported with an open length, and run by ONNX Runtime."""

import warnings
from typing import Any

import pytest
import torch
import transformers as tf

import lln.hf
from helpers.tensors import relative_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


class Exported(torch.nn.Module):
    """A tiny model of a kind, with tensors for arguments and result."""

    def __init__(self, kind: str, name: str, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = tf.AutoConfig.for_model(kind, **shape, vocab_size=50, max_position_embeddings=256)
        options: dict[str, Any] = {"block_size": 8} if name == "lln_diag" else {}
        options |= {"statistics": "fixed"} | more if kind == "llama" else more
        self.model = lln.hf.convert(tf.AutoModel.from_config(config), name, **options).eval()
        self.more = {"use_cache": False} if kind == "llama" else {}

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.more)[0]
        return out


def make(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(length))
    return ids, (torch.arange(length) < torch.tensor([[length], [length // 2 + 1]])).long()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bert", "lln"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in (("bert", "lln_diag"), ("llama", "lln_diag"))),
    ],
)
def test_a_model_is_exported_for_every_length(kind: str, name: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module, length = Exported(kind, name), torch.export.Dim("length", max=256)
    program = torch.export.export(module, make(37), dynamic_shapes=({1: length}, {1: length}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    session = runtime.InferenceSession(made.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for other in (64, 5, 150):
        ids, mask = make(other)
        wanted = module(ids, mask)
        assert relative_error(program.module()(ids, mask), wanted) < 1e-5
        found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        assert relative_error(torch.from_numpy(found), wanted.detach()) < 1e-5
        exported = dict(program.module().named_parameters())
        for weight, parameter in module.named_parameters():
            if weight in exported:  # all but what has no say, as a pooler
                assert torch.equal(exported[weight], parameter)


@pytest.mark.parametrize("matching", ["paper", pytest.param("entropy", marks=pytest.mark.long)])
def test_one_graph_of_an_encoder_serves_every_length_and_has_gradients(matching: str) -> None:
    torch.compiler.reset()
    module = Exported("bert", "lln_diag", matching=matching)
    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend="eager")
    weights = [p for name, p in module.named_parameters() if "pooler" not in name]
    for length in (37, 12):
        found, wanted = (one(*make(length)) for one in (compiled, module))
        assert relative_error(found, wanted) < 1e-5
        # Together: that of a bias of keys is nothing but rounding.
        got, right = (
            torch.cat([t.flatten() for t in torch.autograd.grad(one.square().sum(), weights)])
            for one in (found, wanted)
        )
        assert relative_error(got, right) < 1e-4
