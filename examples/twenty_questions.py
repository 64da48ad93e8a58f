"""Twenty Questions with ten words: an environment of tokens, whose oracle is a table, and a simple questioner.

A dialogue is a sequence of turns. In each, the player says an utterance of three tokens, such as "is it soft" or the guess "is
it pen", and the oracle answers with one: yes, no, or what, if the utterance means nothing. A small transformer learns to talk
from dialogues of the questioner. In the shape descriptions, `H` is the number of turns, `U` of tokens of an utterance, `N` of
utterances, `D` the size of the transformer, and `L = H (U + 1)`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from msrl_jax import envs
from msrl_jax.returns.means import mean

WORDS = ("dog", "banana", "truck", "trousers", "computer", "piano", "chair", "pen", "football", "hammer")
QUESTIONS = {  # question -> the words whose answer is yes
    "is it soft": "dog banana trousers",
    "is it large": "truck piano chair",
    "is it small": "banana pen football hammer",
    "is it wooden": "piano chair hammer",
    "is it long": "banana truck trousers pen hammer",
    "can it move": "dog truck football",
    "has it legs": "dog trousers piano chair",
    "has it keys": "computer piano",
}
UTTERANCE = 3  # tokens of every question and guess, `U`
START, YES, NO, WHAT = range(4)  # the first tokens of the vocabulary


class Game(NamedTuple):
    """The state of a dialogue."""

    word: jax.Array  # its number
    said: jax.Array  # the tokens of the utterance so far, [U]
    place: jax.Array  # of the observed token in the dialogue, from 0 on


@dataclasses.dataclass(frozen=True)
class TwentyQuestions:
    """An action is a token, which is then observed; after every utterance the oracle speaks, and the action is not heard.

    Each answer but the one to a right guess is rewarded with -1, as in the environment of ArCHer's authors.
    """

    turns: int = 20
    words: tuple[str, ...] = WORDS
    questions: tuple[tuple[str, str], ...] = tuple(QUESTIONS.items())

    def __post_init__(self):
        if not isinstance(self.turns, int) or self.turns < 1:
            raise ValueError(f"TwentyQuestions(turns={self.turns}): use at least 1, for a guess")
        if not self.words:
            raise ValueError("TwentyQuestions(words=()): give at least one word, which the oracle can think of")
        object.__setattr__(self, "words", tuple(self.words))  # of lists and dicts: the game is a key of caches
        object.__setattr__(self, "questions", tuple(dict(self.questions).items()))
        for question, words in self.questions:
            if len(question.split()) != UTTERANCE:
                raise ValueError(f"the question {question!r} has {len(question.split())} words; use {UTTERANCE}, as in a guess")
            if others := set(words.split()) - set(self.words):
                raise ValueError(f"the answer to {question!r} is yes for {sorted(others)}, which are not in words={self.words}")

    @functools.cached_property
    def tables(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """The vocabulary, all utterances, guesses last, `[N, U]`, and their answers `[N, words]`, bool."""
        said = [question.split() for question, _ in self.questions] + [["is", "it", word] for word in self.words]
        vocabulary = ["<start>", "yes", "no", "what", *sorted({token for tokens in said for token in tokens})]
        answers = [[word in words.split() for word in self.words] for _, words in self.questions]
        answers = np.array([*answers, *np.eye(len(self.words))], bool)
        return vocabulary, np.array([[vocabulary.index(token) for token in tokens] for tokens in said]), answers

    @property
    def observation_space(self):  # noqa: D102
        return envs.Discrete(len(self.tables[0]))

    action_space = observation_space

    def reset(self, key):  # noqa: D102
        word = jax.random.randint(key, (), 0, len(self.words))
        return Game(word, jnp.zeros(UTTERANCE, jnp.int32), jnp.int32(0)), jnp.int32(START)

    def step(self, key, state, action):  # noqa: D102
        _, utterances, answers = self.tables
        slot, action = state.place % (UTTERANCE + 1), jnp.asarray(action, jnp.int32)
        meant = (utterances == state.said).all(-1)
        answer = jnp.where(meant.any(), jnp.where((meant & jnp.asarray(answers)[:, state.word]).any(), YES, NO), WHAT)
        oracle = slot == UTTERANCE
        found = oracle & meant[len(self.questions) + state.word]
        new = Game(state.word, state.said.at[slot].set(action, mode="drop"), state.place + 1)
        over = found | (new.place == self.turns * (UTTERANCE + 1))
        return new, jnp.where(oracle, answer, action), jnp.where(oracle & ~found, -1.0, 0.0), over, jnp.asarray(False)


class Dialogues(NamedTuple):
    """Dialogues with room for `H` turns; a row is the token that was heard last, and the utterance after it."""

    turns: Any  # [..., H, U + 1] int32
    counts: Any  # which turns are part of the dialogue, [..., H] bool
    reward: Any  # [..., H]


def simple_dialogue(env: TwentyQuestions, key: jax.Array) -> Dialogues:
    """A dialogue of a questioner that splits the remaining words with a probability drawn for it, else says anything."""
    _, utterances, answers = env.tables
    quality_key, word_key, *keys = jax.random.split(key, 2 + env.turns)
    quality, word = jax.random.uniform(quality_key), jax.random.randint(word_key, (), 0, len(env.words))
    is_guess = np.arange(len(answers)) >= len(env.questions)

    def turn(carry, key):
        left, heard, counts = carry
        keys = jax.random.split(key)
        of_left = (answers & left).sum(-1)
        splits = ~is_guess & (of_left > 0) & (of_left < left.sum())
        useful = jnp.where(splits.any(), splits, is_guess & (of_left > 0))
        allowed = useful | (jax.random.uniform(keys[1]) > quality)
        chosen = jax.random.categorical(keys[0], jnp.where(allowed, 0.0, -jnp.inf))
        yes = jnp.asarray(answers)[chosen, word]
        found = yes & jnp.asarray(is_guess)[chosen]
        row = jnp.append(heard, jnp.asarray(utterances, jnp.int32)[chosen])
        left &= jnp.asarray(answers)[chosen] == yes
        return (left, jnp.where(yes, YES, NO), counts & ~found), Dialogues(row, counts, jnp.where(counts & ~found, -1.0, 0.0))

    start = jnp.ones(len(env.words), bool), jnp.int32(START), jnp.asarray(True)
    return jax.lax.scan(turn, start, jnp.stack(keys))[1]


class Transformer(nn.Module):
    """A causal transformer: outputs `[..., n, O]`, and keys and values of all layers, to be remembered."""

    size: int
    layers: int
    vocabulary: int
    length: int
    outputs: int
    heads: int = 4

    @nn.compact
    def __call__(self, tokens, places, distance, memory=None):
        """Reads tokens `[..., n]`, at distances `[n, m + n]` from those in memory `[..., layers, 2, m, D]` and from each other.

        What a token does not see is infinitely far away: attention falls with the distance, as in arXiv 2108.12409.
        """
        normal, split = nn.initializers.normal(0.02), lambda x: x.reshape(*x.shape[:-1], self.heads, -1)
        x = jax.nn.one_hot(tokens, self.vocabulary) @ self.param("tokens", normal, (self.vocabulary, self.size))
        x += self.param("places", normal, (self.length, self.size))[places]
        new = []
        for layer in range(self.layers):
            query, *rest = jnp.split(nn.Dense(3 * self.size)(nn.LayerNorm()(x)), 3, -1)
            new.append(jnp.stack(rest, -3))
            seen = new[-1] if memory is None else jnp.concatenate([memory[..., layer, :, :, :], new[-1]], -2)
            score = jnp.einsum("...qhd,...khd->...hqk", split(query), split(seen[..., 0, :, :]))
            score = score * (self.size // self.heads) ** -0.5 - 4.0 ** -np.arange(self.heads)[:, None, None] * distance
            value = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(score), split(seen[..., 1, :, :]))
            x += nn.Dense(self.size)(value.reshape(x.shape))
            x += nn.Dense(self.size)(nn.gelu(nn.Dense(4 * self.size)(nn.LayerNorm()(x))))
        return nn.Dense(self.outputs, name="out")(nn.LayerNorm()(x)), jnp.stack(new, -4)


def layout(turns: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and distances of a dialogue's tokens and, behind them, of another utterance for each turn. `[n]` and `[n, n]`"""
    length, start = turns * (UTTERANCE + 1), (UTTERANCE + 1) * np.arange(turns)
    places = np.concatenate([np.arange(length), (start + 1 + np.arange(UTTERANCE)[:, None]).ravel()])
    before = np.tile(np.arange(length) <= start[:, None], (UTTERANCE, 1))  # until the turn
    own = np.kron(np.tri(UTTERANCE, dtype=bool), np.eye(turns, dtype=bool))
    seen = np.block([[np.tri(length, dtype=bool), np.zeros((length, UTTERANCE * turns), bool)], [before, own]])
    return places, np.where(seen, places[:, None] - places, np.inf).astype(np.float32)


def read(net: Any, params: Any, turns: jax.Array, others: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Outputs for the tokens of dialogues `[..., H, U + 1, O]`, and for other utterances in their places `[..., H, U, O]`."""
    (*batch, count, width), (places, distance) = turns.shape, layout(turns.shape[-2])
    tokens = turns.reshape(*batch, count * width)
    if others is not None:
        tokens = jnp.concatenate([tokens, jnp.swapaxes(others, -1, -2).reshape(*batch, -1)], -1)
    n = tokens.shape[-1]
    own, other = jnp.split(net.apply(params, tokens, places[:n], distance[:n, :n])[0], [count * width], -2)
    return own.reshape(*turns.shape, -1), jnp.swapaxes(other.reshape(*batch, -1, count, net.outputs), -2, -3)


def proposals(net: Any, params: Any, turns: jax.Array, key: jax.Array) -> jax.Array:
    """Draws another utterance at every turn, given the dialogue so far. `[..., H, U]`"""
    (places, distance), (*batch, count, width), said = layout(turns.shape[-2]), turns.shape, []
    end = count * width
    out, memory = net.apply(params, turns.reshape(*batch, end), places[:end], distance[:end, :end])
    out = out[..., ::width, :]
    for one in jax.random.split(key, UTTERANCE):
        said.append(jax.random.categorical(one, out))
        if len(said) < UTTERANCE:
            new, end = slice(end, end + count), end + count
            out, more = net.apply(params, said[-1], places[new], distance[new, :end], memory)
            memory = jnp.concatenate([memory, more], -2)
    return jnp.stack(said, -1)


def silence(net: Any, num_envs: int) -> tuple[jax.Array, jax.Array]:
    """The memory of new dialogues: keys and values of `L` tokens `[E, layers, 2, L, D]`, and the place of the next `[E]`."""
    return jnp.zeros((num_envs, net.layers, 2, net.length, net.size)), jnp.zeros(num_envs, jnp.int32)


def utter(net: Any, params: Any, token: jax.Array, memory: Any, key: jax.Array | None) -> tuple[jax.Array, Any]:
    """The next token of one dialogue, the most probable one without a key, and the memory with keys and values of this one."""
    cache, place = memory
    distance = jnp.append(jnp.where(jnp.arange(net.length) < place, place - jnp.arange(net.length), jnp.inf), 0.0)
    out, new = net.apply(params, token[None], place[None], distance[None], cache)
    action = out[0].argmax() if key is None else jax.random.categorical(key, out[0])
    return action, (cache.at[:, :, place].set(new[:, :, 0]), place + 1)


def log_probs(net: Any, params: Any, turns: jax.Array, others: jax.Array | None = None) -> jax.Array:
    """The log-probability of each token of a dialogue's utterances, or of others in their places. `[..., H, U]`"""
    logits, of_others = read(net, params, turns, others)
    logits = logits[..., :-1, :] if others is None else jnp.concatenate([logits[..., :1, :], of_others[..., :-1, :]], -2)
    return -optax.softmax_cross_entropy_with_integer_labels(logits, turns[..., 1:] if others is None else others)


def nothing(length: int) -> tuple[Any, ...]:
    """Inputs with which a transformer makes its parameters."""
    return jnp.zeros(length, jnp.int32), np.arange(length), np.zeros((length, length), np.float32)


@functools.cache
def cloned(env: TwentyQuestions, net: Any, steps: int, batch_size: int = 64, learning_rate: float = 3e-3) -> Any:
    """The parameters of an actor that has learned to talk from dialogues of the simple questioner."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(learning_rate, steps + 1)))

    def loss(params, dialogues):
        return -mean(log_probs(net, params, dialogues.turns).sum(-1), dialogues.counts)

    def update(carry, key):
        batch = jax.vmap(functools.partial(simple_dialogue, env))(jax.random.split(key, batch_size))
        updates, opt_state = optimizer.update(jax.grad(loss)(carry[0], batch), carry[1])
        return (optax.apply_updates(carry[0], updates), opt_state), None

    def run(key):
        params = net.init(key, *nothing(net.length))
        return jax.lax.scan(update, (params, optimizer.init(params)), jax.random.split(key, steps))[0][0]

    return jax.device_get(jax.jit(run)(jax.random.key(20_000)))
