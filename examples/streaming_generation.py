"""Write text without end in constant memory: a small Llama with LLN+Diag attention, on a CPU.

    pip install '.[hf]'
    python examples/streaming_generation.py

The model first learns from Python's own documentation, byte by byte, so nothing is downloaded. Then it writes, and
every token shows up as it comes. Its cache is as large after the last token as after the first, and a token takes as
long; the keys and values that softmax attention would keep are counted beside it.
"""

import argparse
import sys
import time
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation.streamers import BaseStreamer

import lln.hf

LENGTH = 256  # bytes of a training text
LAYERS, HIDDEN, HEADS, KEY_HEADS = 2, 128, 4, 2


class Screen(BaseStreamer):
    """Shows the first bytes, and notes when each token came."""

    def __init__(self, shown: int) -> None:
        self.shown, self.times = shown, []

    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 1:  # the prompt comes first, as a batch
            self.times.append(time.perf_counter())
            if len(self.times) <= self.shown:
                sys.stdout.write(value.numpy().astype("uint8").tobytes().decode("ascii", "replace"))
                sys.stdout.flush()

    def end(self) -> None:
        pass

    def pace(self, tokens: slice) -> float:
        """Milliseconds a token."""
        times = self.times[tokens]
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def learn(model: torch.nn.Module, text: torch.Tensor, steps: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(1, steps + 1):
        starts = torch.randint(len(text) - LENGTH, (12,))
        batch = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if number == 1 or number % 50 == 0:
            print(f"  step {number:3}  loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--attention", default="lln_diag", choices=["lln", "lln_diag"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the work of one step is too small to be shared
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "ignore")))
    config = LlamaConfig(
        vocab_size=128, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, intermediate_size=256, max_position_embeddings=2**20, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    lln.hf.convert(model, arguments.attention, statistics="running")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes to learn from")
    learn(model.train(), text, arguments.steps)
    model.eval()

    prompt = torch.tensor([list(b"The statement ")])
    screen, cache = Screen(shown=400), lln.hf.LLNCache()
    sizes = []
    for _ in range(2):  # the second half goes on from the cache that the first one leaves
        new = arguments.tokens // 2
        prompt = model.generate(
            prompt, past_key_values=cache, max_new_tokens=new, do_sample=True, temperature=0.7, streamer=screen
        )
        sizes.append(cache.nbytes)
    print("\n...")
    seen = cache.get_seq_length()
    softmax = 2 * LAYERS * KEY_HEADS * (HIDDEN // HEADS) * seen * 4
    part = max(2, arguments.tokens // 8)
    early, late = screen.pace(slice(0, part)), screen.pace(slice(-part, None))
    print(f"cache: {sizes[0]:,} bytes after half of the {seen:,} tokens, {sizes[1]:,} bytes after all of them")
    print(
        f"keys and values of softmax attention would be {softmax:,} bytes by now, and grow by {softmax // seen} a token"
    )
    print(f"a token: {early:.2f} ms at the beginning, {late:.2f} ms at the end")


if __name__ == "__main__":
    main()
