"""A diffusion transformer at 2,048 x 2,048 pixels: LLN attention beside torch's, in time and memory.

    pip install '.[diffusers]'
    python examples/image_transformer.py               a narrow DiT, 512 and 1,024 pixels, on a CPU
    python examples/image_transformer.py --full        DiT-S/2 and SD3's joint attention, up to 2,048 pixels

The latents of a picture are an eighth of its pixels a side, and a patch is 2 x 2 of them: 2,048 pixels are 16,384
tokens.
The models have random weights, and the same ones with both attentions; what is measured is one step of denoising.
"""

import argparse
import copy
import functools

import torch
from diffusers import DiTTransformer2DModel, SD3Transformer2DModel
from diffusers.utils import logging

import lln.diffusers
from lln.lab.core.timing import peak_memory, time_calls

logging.set_verbosity_error()  # of what `.to` might do to a pipeline
TEXT, POOLED = 77, 64  # tokens of a prompt, and the width of what is pooled of it


def make_dit(heads: int, layers: int, side: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Self attention among the patches."""
    model = DiTTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=64,
        num_layers=layers,
        in_channels=4,
        sample_size=side,
        patch_size=2,
    )
    return model, {"timestep": torch.tensor([500]), "class_labels": torch.tensor([1])}


def make_sd3(heads: int, layers: int, side: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Joint attention among the patches and the tokens of a text."""
    model = SD3Transformer2DModel(
        num_attention_heads=heads, attention_head_dim=64, num_layers=layers, in_channels=4, sample_size=side,
        patch_size=2, out_channels=4, joint_attention_dim=64, caption_projection_dim=64 * heads,
        pooled_projection_dim=POOLED, pos_embed_max_size=side // 2,
    )  # fmt: skip
    text = {"encoder_hidden_states": torch.randn(1, TEXT, 64), "pooled_projections": torch.randn(1, POOLED)}
    return model, {"timestep": torch.tensor([500]), **text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="12 layers of 6 heads at up to 2,048 pixels")
    parser.add_argument("--sizes", help="pixels a side, with commas between")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    heads, layers = (6, 12) if arguments.full else (1, 1)
    sizes = [int(size) for size in (arguments.sizes or ("512,1024,2048" if arguments.full else "512,1024")).split(",")]
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)

    def place(t: torch.Tensor) -> torch.Tensor:
        return t.to(device, dtype if t.is_floating_point() else t.dtype)

    print(f"{layers} layers of {heads} heads of 64, {arguments.dtype} on {device}, one step of one picture")
    print(f"{'model':>6} {'pixels':>7} {'tokens':>7} {'softmax, s':>11} {'LLN+Diag, s':>12} {'MiB':>15}")
    for name, make in (("DiT", make_dit), ("SD3", make_sd3)):
        for size in sizes:
            torch.manual_seed(0)
            side = size // 8
            softmax, given = make(heads, layers, side)
            given = {key: place(t) for key, t in given.items()} | {
                "hidden_states": place(torch.randn(1, 4, side, side))
            }
            softmax = softmax.to(device, dtype).eval()
            linear = lln.diffusers.convert(copy.deepcopy(softmax), "lln_diag", block_size=arguments.block_size)
            works = {"softmax": functools.partial(softmax, **given), "linear": functools.partial(linear, **given)}
            with torch.inference_mode():
                times = time_calls(works, repeats=arguments.repeats, device=device)
                memory = "{:,.0f} and {:,.0f}".format(*(peak_memory(work, device) / 2**20 for work in works.values()))
            seconds = [times[work].median / 1000 for work in works]
            tokens = (side // 2) ** 2 + (TEXT if name == "SD3" else 0)
            print(f"{name:>6} {size:7} {tokens:7,} {seconds[0]:11.3f} {seconds[1]:12.3f} {memory:>15}", flush=True)


if __name__ == "__main__":
    main()
