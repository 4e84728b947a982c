"""A vision transformer of timm at large pictures: LLN attention beside torch's, in time and memory.

    pip install '.[timm]'
    python examples/vision_transformer.py              a narrow one, 224 to 448 pixels, on a CPU
    python examples/vision_transformer.py --full       ViT-S/16, 448 to 1,792 pixels; with a GPU: --device cuda

The two models have the same weights: timm's own layers, with LLN+Diag in tiles of neighbouring patches in the place of
softmax. So what differs is the attention alone. The weights are random; `--pretrained` fetches trained ones, for which
LLN attention is another function until it is trained: the cosine says how far the two are apart.
"""

import argparse
import copy
import functools

import timm
import torch

import lln.timm
from lln.lab.core.timing import peak_memory, time_calls

SMALL = {"embed_dim": 96, "depth": 3, "num_heads": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="ViT-S/16 at up to 1,792 pixels (12,545 tokens)")
    parser.add_argument("--sizes", help="pixels a side, with commas between")
    parser.add_argument("--tile", type=int, default=14, help="patches a side that attend by softmax")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pretrained", action="store_true")
    arguments = parser.parse_args()
    usual = "448,896,1792" if arguments.full else "224,448"
    sizes = [int(size) for size in (arguments.sizes or usual).split(",")]

    device = torch.device(arguments.device)
    torch.manual_seed(0)
    shape = {} if arguments.full or arguments.pretrained else SMALL
    name = "vit_small_patch16_224"
    softmax = timm.create_model(name, pretrained=arguments.pretrained, dynamic_img_size=True, **shape)
    softmax = softmax.to(device).eval()
    linear = lln.timm.convert(copy.deepcopy(softmax), "lln_diag", tile=arguments.tile)
    count = sum(p.numel() for p in linear.parameters())
    print(f"{name}, {count:,} parameters, tiles of at most {arguments.tile} patches a side, {arguments.device}")
    print(f"{'pixels':>7} {'tokens':>7} {'softmax, s':>11} {'LLN+Diag, s':>12} {'MiB':>15} {'cosine':>7}")
    for size in sizes:
        x = torch.randn(1, 3, size, size, device=device)
        with torch.inference_mode():
            one, other = (model.forward_features(x).flatten() for model in (softmax, linear))
            works = {"softmax": functools.partial(softmax, x), "linear": functools.partial(linear, x)}
            times = time_calls(works, repeats=arguments.repeats, device=device)
            bytes_taken = [peak_memory(work, device) / 2**20 for work in works.values()]
        seconds = [times[name].median / 1000 for name in works]
        cosine = torch.cosine_similarity(one, other, dim=0).item()
        memory = "{:,.0f} and {:,.0f}".format(*bytes_taken)
        tokens = (size // 16) ** 2 + 1
        print(f"{size:7} {tokens:7,} {seconds[0]:11.3f} {seconds[1]:12.3f} {memory:>15} {cosine:7.3f}", flush=True)


if __name__ == "__main__":
    main()
