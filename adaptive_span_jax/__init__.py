"""Adaptive attention span in Transformers, in JAX and Flax.

Reading order, which is also the way the data flows:

    config        fields → frozen, checked dataclasses
    corpus        bytes → token ids                       (text_files, entropy, datasets/)
    segments      ids → parallel streams → segments
    span          how far each head looks back
    attention     the plain attention, and attention_per_head, which pays only for what each head reads
    memory        what is carried from segment to segment
    layer, model  tokens, memory → logits, memory
    loss, optimizer, train_state, step
    score         a text → bits per symbol
    checkpoint    state, memory and position → disk → state
    machine       machines that are not here: their chips, and devices to compile for
    plan          does it fit such a machine, and how long may it take (roofline)
    doctor        what can be wrong with the machine that is here
    train         the loop; evaluate: the other mode
    result, metrics, display, figures      what people see

Array names end in the letters of their axes:

    B streams · T positions of a segment · S the span limit · J keys · M rows of memory · D model width · H heads
    K width of a head · F feed-forward width · V vocabulary · L layers · N chunks of C queries · W near window
    P rows of the padded position table, of which a tile reads Y
"""

__version__ = "0.1.0"
