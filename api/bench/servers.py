"""The servers of one run of `hearth bench`: what is asked, where they live, how they count."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from api.bench.ask import AskFailed, ask
from api.bench.peers import Peer, lay_out
from api.bench.recipes import Recipe, RecipeError, find
from api.bench.texts import CHARACTERS_PER_TOKEN, conversation
from api.cli.arguments import BASELINE


class Servers:
    """Those that the command line names; each life of one gets a home of its own in `folder`."""

    def __init__(self, arguments: argparse.Namespace, words: Sequence[str], folder: Path) -> None:
        self.recipes: list[Recipe] = [find(word) for word in words]
        self._folder = folder
        self._models = lay_out(folder, arguments.model, arguments.second)
        self._venvs: Path = arguments.venvs or folder / "venvs"

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.recipes]

    def baseline(self, given: str | None) -> str:
        """What the others are compared with: what is given, mlx-lm, or the last."""
        return given or (BASELINE if BASELINE in self.names else self.names[-1])

    def peer(self, recipe: Recipe, number: int) -> Peer:
        """The server in a round; it has not been started."""
        home = self._folder / f"{recipe.name.replace('/', '-')}-{number}"
        return Peer(recipe, self._models, home, self._venvs)

    def in_turn(self, number: int) -> Sequence[Recipe]:
        """Every server once, the other way round in every other round."""
        return self.recipes[:: -1 if number % 2 else 1]

    def characters_per_token(self, num_tokens: int) -> float:
        """Of a prompt of about that length, as the first server counts it.

        Raises:
            RecipeError: it cannot be started, or does not answer.
        """
        trial = conversation(int(num_tokens * CHARACTERS_PER_TOKEN), seed=0).first
        peer = self.peer(self.recipes[0], -1)
        try:
            peer.start()
            counted = ask(peer.target, trial.messages, 1, may_be_empty=True).prompt_tokens
        except AskFailed as error:
            raise RecipeError(f"The first server does not answer: {error.message}") from error
        finally:
            peer.stop()
        num_characters = sum(len(one.content) for one in trial.messages)
        return num_characters / counted if counted else CHARACTERS_PER_TOKEN
