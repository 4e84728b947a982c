"""Image classification with a vision transformer (Table 3, Figs. 9 and 10)."""

from dataclasses import replace

from lln.lab.train.config import BY_WIDTH, OF_ARCHITECTURE, OF_TORCH, Attention, Config, Data, Model, Optimisation


def tiny() -> Config:
    """Handwritten digits of 8 by 8 pixels, one token a pixel."""
    return Config(
        task="image", preset="tiny", attention=Attention(options={"block_size": 16}),
        model=Model(
            layers=2, width=64, heads=2, inner=128, dropout=0.0, attention_dropout=0.0, patch=1,
            initialisation=BY_WIDTH,
        ),
        data=Data("embedded/digits", length=8),
        optimisation=Optimisation(steps=300, batch=64, rate=2e-3, warmup=30, schedule="cosine", clip=1.0),
        log_every=10, evaluate_every=100, save_every=100, record_every=100,
    )  # fmt: skip


def mini() -> Config:
    return Config(
        task="image", preset="mini", attention=Attention(options={"block_size": 16}),
        model=Model(
            layers=6, width=128, heads=4, inner=256, attention_dropout=0.0, patch=8, initialisation=BY_WIDTH
        ),
        data=Data("microsoft/cats_vs_dogs", length=64),
        optimisation=Optimisation(steps=3000, batch=64, rate=3e-4, warmup=150, schedule="cosine", clip=1.0),
        precision="bfloat16", graph=True, log_every=50, evaluate_every=500, save_every=500, record_every=500,
    )  # fmt: skip


def paper() -> Config:
    """12 layers, 128 wide, on Dogs vs Cats for 100 epochs (20,000 training images, batches of 64) under float16, as the
    released script has it: images of 224 pixels in patches of 7, which with the class token are 1,025 tokens, 8 heads,
    a rate of 3e-5, torch's first weights, images mirrored and shifted at random (the script crops and mirrors)."""
    return Config(
        task="image", preset="paper", attention=Attention(options={"block_size": 16}),
        model=Model(
            layers=12, width=128, heads=8, inner=512, dropout=0.0, attention_dropout=0.0, patch=7,
            initialisation=OF_TORCH,
        ),
        data=Data("microsoft/cats_vs_dogs", length=224, options={"augment": True}),
        optimisation=Optimisation(
            steps=31_300, batch=64, rate=3e-5, schedule="constant", decay=0.0, betas=(0.9, 0.999), epsilon=1e-8
        ),
        precision="float16", log_every=100, evaluate_every=1000, save_every=1000, record_every=1000,
    )  # fmt: skip


def deit_tiny() -> Config:
    """deit-tiny under float16, for the loss scale of Fig. 10b, with the first weights and images that it has had."""
    base = paper()
    model = replace(base.model, width=192, heads=3, inner=768, patch=16, initialisation=OF_ARCHITECTURE)
    rising = replace(base.optimisation, rate=5e-4, warmup=1_565, schedule="cosine", decay=0.05)
    return replace(
        base,
        preset="deit-tiny",
        attention=Attention(),
        model=model,
        data=replace(base.data, options={}),
        optimisation=rising,
    )
