"""Data for the paper's experiments. Everything here needs the extra `train`.

A data set has a name: a Hub id, or one that needs no download (`embedded/...`, and the generated tasks). `data_root`,
or LLN_DATA_ROOT, points at a folder that holds `<Hub id>/` in the Hub's own parquet layout; with neither, the Hub is
asked.

    sources      read(name, split, ...) -> Rows            any set, as columns, with its identity and notes
    embedded     make_columns(name, split)                 the sets that need no download
    tokenizer    train_tokenizer, load_tokenizer           byte-level BPE, cached
    text         load_text -> PackedText                   sequences of one length, masked by `Masking`
    labelled     load_glue -> Sequences                    mnli, qnli, qqp, sst2; embedded: topics, pairs
                 load_byte_text, load_retrieval, load_pixels -> Sequences: Long Range Arena
    images       load_images -> Images                     Dogs vs Cats, CIFAR-10; embedded: digits
    listops      load_listops -> Sequences                 generated, with an evaluator
    pathfinder   load_pathfinder -> Sequences              generated
    needles      load_needles -> Needles                   text of any length with planted needles, drawn anew

What these return is an `examples.Examples`: a torch data set whose items depend on (index, epoch) alone, with
`identity` (JSON; hash it into the run), `fingerprint`, and `notes` (what a result from it must say). `examples.Stream`
is the seeded order that training sees. What is slow to make is kept in `cache_dir`, or
LLN_CACHE, or the user's cache folder (`made_once`). What is wrong with data is a `core.errors.DataError`: a sentence.
"""
