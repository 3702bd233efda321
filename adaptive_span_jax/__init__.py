"""Adaptive attention span in Transformers, in JAX and Flax.

Reading order, which is also the way the data flows:

    config        fields → frozen, checked dataclasses    (modes, flag_errors, command_line)
    corpus        bytes → token ids                       (text_files, entropy, datasets/)
    segments      ids → parallel streams → segments
    span          how far each head looks back
    attention     the plain attention, and attention_per_head, which pays only for what each head reads
    memory        what is carried from segment to segment
    layer, model  tokens, memory → logits, memory             (linear)
    loss, optimizer, train_state, step
    score         a text → bits per symbol
    checkpoint    state, memory and position → disk → state     (sealed, saved, save_times, storage, lock, workdir,
                  pretrained)
    machine       machines that are not here: their chips, and devices to compile for
    plan          does it fit such a machine, and how long may it take (roofline)
    doctor        what can be wrong with the machine that is here
    train         the loop; hosts: several machines as one; cpu: a machine without accelerators
    head_reach, key_value_cache, finished_model      the same numbers for weights that no longer change, faster
    trained_model                                    a checkpoint as an object: score, continue, spans
    evaluate, generate, compress, convert, prepare   the other modes
    metrics, result, health, display       what people see while it runs and at its end
    observation, figures/, report          the paper's figures and tables, of any run

Array names end in the letters of their axes:

    B streams · T positions of a segment · S the span limit · J keys · M rows of memory · D model width · H heads
    K width of a head · F feed-forward width · V vocabulary · L layers · N chunks of C queries · W near window
    P rows of the padded position table, of which a tile reads Y
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"
STARTED = time.perf_counter()  # when the program began, but for Python's own start

if TYPE_CHECKING:
    from adaptive_span_jax.trained_model import TrainedModel


def load(workdir: str | Path, step: str | int = "latest") -> "TrainedModel":
    """The model of a run's checkpoint: the latest, the best on dev, or that of a step."""
    # Only when asked for: importing JAX takes seconds.
    from adaptive_span_jax import trained_model

    return trained_model.load(workdir, step)
