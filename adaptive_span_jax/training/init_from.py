"""`config.init_from`: starts a new run from the newest weights of another run."""

import jax
import numpy as np

from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.config import Config, differences
from adaptive_span_jax.data import corpus
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model.transformer import Params
from adaptive_span_jax.runtime import storage, terminal

# Parameters with a vocabulary axis: name → axis.
_BY_SYMBOL = {"embedding_VD": 0, "output_DV": 1, "output_bias_V": 0}


def load_init_params(config: Config, vocabulary: tuple[bytes, ...], abstract: Params) -> Params:
    """The weights of the run in `config.init_from`, with the shardings of `abstract`, matched by symbol.

    The two texts may assign different ids to a symbol. Raises if the other run never saw one of this text's symbols.
    """
    directory = storage.place(config.init_from)
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint)
    step = checkpoints.newest()
    if step is None:
        raise UserError(f"config.init_from={directory} has no checkpoint to start from; set it to the workdir of a run")
    saved = checkpoints.describe(step)
    known = corpus.symbols(saved.vocabulary)
    unknown = [symbol for symbol in vocabulary if symbol not in known]
    if unknown:
        raise UserError(
            f"config.init_from={directory} has {len(known)} symbols, but {len(unknown)} of the {len(vocabulary)} "
            f"symbols of this text are not among them: {', '.join(map(repr, unknown[:10]))}"
            f"{', …' if len(unknown) > 10 else ''}; remove them from the text, or train from random weights"
        )
    stored = checkpoints.shapes(step, "params")
    if _shapes(stored) != _shapes(abstract):
        there, here = (
            {"model": vars(each.model), "span": vars(each.span)} for each in (Config.from_dict(saved.config), config)
        )
        raise UserError(
            f"config.init_from={directory} has weights of another shape; there → here:\n  "
            + "\n  ".join(differences(there, here))
            + "\nThe shape depends on model.layers, width, heads, feedforward and persistent and on span.kind and "
            "limit; set these fields to the values of the other run"
        )
    order = np.array([known.index(symbol) for symbol in vocabulary])
    place = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    # Restored unsharded, because the other run may have another vocabulary size.
    somewhere = jax.tree.leaves(place)[0]
    whole = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=somewhere), stored)
    params = checkpoints.restore(step, {"params": whole})["params"]
    params |= {name: params[name].take(order, axis=axis) for name, axis in _BY_SYMBOL.items()}
    terminal.say(f"initialized from step {step:,} of {directory}")
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf.astype(like.dtype), like.sharding), params, abstract)


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape, without the vocabulary axis."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        symbols = _BY_SYMBOL.get(name)
        found[name] = tuple(size for axis, size in enumerate(leaf.shape) if axis != symbols)
    return found
