"""Masked-language-model pre-training (section 5, Fig. 8)."""

from lln.lab.train.config import BY_WIDTH, OF_ARCHITECTURE, SINUSOIDAL, Attention, Config, Data, Model, Optimisation


def tiny() -> Config:
    """English prose from Python's own documentation; minutes on two cores."""
    return Config(
        task="mlm", preset="tiny", attention=Attention(options={"block_size": 32}),
        model=Model(
            layers=2, width=96, heads=2, inner=192, pre_norm=True, dropout=0.0, attention_dropout=0.0,
            initialisation=BY_WIDTH,
        ),
        data=Data("embedded/prose", length=128, vocabulary=512, windows=True),
        optimisation=Optimisation(steps=800, batch=16, rate=3e-3, warmup=40, schedule="cosine", clip=1.0),
        log_every=10, evaluate_every=100, save_every=100, record_every=100,
    )  # fmt: skip


def mini() -> Config:
    """A minute a run on one large GPU: pre-norm, 6 layers, 384 wide, 16k tokens a step. Sinusoidal positions: with
    learned ones attention starts to work much later."""
    return Config(
        task="mlm", preset="mini", attention=Attention(options={"statistics": "batch", "block_size": 64}),
        model=Model(
            layers=6, width=384, heads=6, inner=1536, pre_norm=True, dropout=0.0, attention_dropout=0.0,
            positions=SINUSOIDAL, initialisation=BY_WIDTH,
        ),
        data=Data("Salesforce/wikitext", "wikitext-103-v1", length=256, vocabulary=16384, windows=True),
        optimisation=Optimisation(steps=6500, batch=64, rate=1e-3, warmup=500, schedule="cosine", clip=1.0),
        precision="bfloat16", graph=True, log_every=50, evaluate_every=500, save_every=500, record_every=500,
    )  # fmt: skip


def paper() -> Config:
    """RoBERTa-base on WikiText-103 with fairseq's defaults, fp16 as in the paper; its pieces of text are fixed, and its
    weights begin with a deviation of .02."""
    return Config(
        task="mlm", preset="paper", attention=Attention(),
        model=Model(layers=12, width=768, heads=12, inner=3072, initialisation=OF_ARCHITECTURE),
        data=Data("Salesforce/wikitext", "wikitext-103-v1", length=512, vocabulary=50265),
        optimisation=Optimisation(
            steps=125_000, batch=256, rate=5e-4, warmup=10_000, schedule="linear", accumulation=16
        ),
        precision="float16", log_every=100, evaluate_every=1000, save_every=1000, record_every=1000,
    )  # fmt: skip
