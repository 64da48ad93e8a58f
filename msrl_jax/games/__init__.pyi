"""The names of the room, for type checkers and for `lazy`, which imports each at its first use."""

from msrl_jax.games.alphazero import AlphaZero as AlphaZero
from msrl_jax.games.matches import Match as Match
from msrl_jax.games.matches import Player as Player
from msrl_jax.games.matches import at_random as at_random
from msrl_jax.games.matches import match as match
from msrl_jax.games.matches import minimax as minimax
from msrl_jax.games.matches import with_search as with_search
from msrl_jax.games.muzero import MuZero as MuZero
from msrl_jax.games.ratings import Ratings as Ratings
from msrl_jax.games.ratings import bradley_terry as bradley_terry
from msrl_jax.games.ratings import round_robin as round_robin
from msrl_jax.games.self_play import SelfPlay as SelfPlay
from msrl_jax.games.small_games import KuhnPoker as KuhnPoker
from msrl_jax.games.small_games import RockPaperScissors as RockPaperScissors
