"""Every field of a run, once, with its meaning and the published default.

Other configs start from this one and show only what differs. Any field can be overridden on the command line, e.g.
`--config.train.batch_size=8`. Types and ranges are checked by `adaptive_span_jax/config.py`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The published 12-layer model with adaptive spans up to 8192, on enwik8."""
    config = ConfigDict()
    config.seed = 1  # initial weights, dropout and the offsets at which epochs start all follow from it
    config.init_from = ""  # the workdir of another run: a new run starts from its newest weights; empty: random weights

    config.data = ConfigDict()
    config.data.source = (
        "enwik8"  # enwik8 | text8 | files (your own text) | stdlib (the source text of Python's library)
    )
    config.data.path = ""  # files: a file or folder of text, read as bytes; .gz, .bz2, .xz and .zip are unpacked
    config.data.archive = ""  # enwik8 and text8: a local copy to use instead of the download
    config.data.directory = ""  # where prepared data is kept; empty: ~/.cache/adaptive_span_jax
    config.data.newlines = "keep"  # keep (published) | drop (the convention of Transformer-XL's numbers)
    config.data.splits = (0.9, 0.05, 0.05)  # files and stdlib: shares of train, dev and test, in the order of the text
    config.data.max_bytes = 0  # files and stdlib: use only the first so many bytes; 0: all

    config.model = ConfigDict()
    config.model.layers = 12
    config.model.width = 512
    config.model.heads = 8
    config.model.feedforward = 2048
    config.model.dropout = 0.3  # on attention weights and on ReLU activations
    config.model.attention = "per_head"  # per_head (pays what each head reads) | plain (the same, slow and obvious)
    config.model.compute_dtype = "float32"  # float32 (published) | bfloat16 | float64 (exactness tests)
    config.model.memory_dtype = ""  # what the memory is kept in: float32 | bfloat16; empty: as compute_dtype
    config.model.remat = False  # compute a layer's activations again for its gradient instead of keeping them
    config.model.mask_empty_memory = False  # published: memory starts as zeros, and the zeros are attended to

    config.span = ConfigDict()
    config.span.kind = "adaptive"  # fixed | adaptive (one learned span per head) | dynamic (one per head and token)
    config.span.limit = 8192  # S: no head ever sees further back than this many positions
    config.span.ramp = 32  # R: the mask falls from 1 to 0 over this many positions
    config.span.penalty = 5e-7  # lambda: loss in nats per position of average span, summed over layers

    config.train = ConfigDict()
    config.train.batch_size = 64  # parallel streams, over all devices
    config.train.batch_split = 1  # into this many groups, one after the other; changes nothing but the use of memory
    config.train.segment = 512  # positions of each stream per step
    config.train.steps = 600_000
    config.train.learning_rate = 0.07
    config.train.warmup_steps = 32_000  # linear, from learning_rate / warmup_steps at the first step
    config.train.cooldown_start = 0  # from this step on a tenth of the learning rate; 0: never
    config.train.clip = 0.03  # largest L2 norm of a parameter tensor's gradient in its update
    config.train.max_bad_steps = 10  # stop after so many steps in a row whose loss or gradient is not finite

    config.mesh = ConfigDict()
    config.mesh.fsdp = 1  # share parameters and optimizer state out over so many devices; must divide their number

    config.evaluate = ConfigDict()
    config.evaluate.streams = 8  # parallel streams of the evaluation, each starting from empty memory
    config.evaluate.every_steps = 2746  # dev evaluation during training; the default is one epoch of enwik8
    config.evaluate.max_tokens = (
        0  # of dev, the first ones, in evaluations during training; 0: all. The result is of all
    )

    config.generate = ConfigDict()
    config.generate.length = 500  # symbols that are added to the prompt
    config.generate.samples = 1  # continuations of the same prompt, side by side
    config.generate.temperature = 1.0  # logits are divided by it: below 1 safer, above 1 wilder, 0 always the likeliest
    config.generate.top_k = 0  # draw only among the k likeliest symbols; 0: all
    config.generate.top_p = 1.0  # draw only among the likeliest symbols that together have this probability
    config.generate.seed = 0  # the same seed, the same text

    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 1000  # a kill costs at most so many steps: saves begin after 4/5 of them
    config.checkpoint.every_minutes = 0.0  # and at most so much time, likewise; 0: however long the steps take
    config.checkpoint.keep = 2  # newest checkpoints to keep; the one with the best dev bits is kept besides
    config.checkpoint.on_failure = "continue"  # continue (say so and train on) | stop: when one cannot be written

    config.log = ConfigDict()
    config.log.every_steps = 100  # metrics.jsonl, TensorBoard and log lines
    return config
