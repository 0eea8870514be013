"""What lies beside heads of a conversation's text: its turns, and prefixes learned from it.

Every call blocks and may come from any thread; all of them raise StoreError when files cannot be
removed.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from pathlib import Path

from store import prefixes, turns
from store.blocks.head_file import Head
from store.keyed_names import Chain, Whom, conversation_key, model_key
from store.turns import Folders, TurnTokens


def forget(root: Path, secret: bytes, whom: Whom, models: Collection[bytes] | None) -> None:
    """Remove what is of a session, of what was asked by a name, of these models, or everything."""
    if whom.names_one:
        key = whom.key
        if key is None:
            key = conversation_key(secret, whom.session_id or "")
        turns.drop_folders(root, Folders(conversation=key.hex()))
        prefixes.remove_session(root, key.hex())
    elif whom.model is not None:
        asked = model_key(secret, whom.model)
        turns.drop_folders(root, Folders(name=asked))
        prefixes.remove_asked(root, asked)
    else:
        for model in [None] if models is None else models:
            turns.drop_turns(root, model)
            prefixes.remove_model(root, model)


def forget_chain(root: Path, secret: bytes, head: Head, chain: Chain) -> None:
    """Remove what is of a conversation without a session id that ended with this head."""
    asked = model_key(secret, head.name)
    tokens = TurnTokens(array("I", chain.token_ids))
    turns.drop_chain(root, head.model, asked, tokens, head.owner.root)
    prefixes.remove_chain(root, head.model, asked, chain)


def folders_of(root: Path, secret: bytes, head: Head, token_ids: Sequence[int]) -> tuple[str, ...]:
    """The folders with turns that this head without a session id is made of."""
    asked, tokens = model_key(secret, head.name), TurnTokens(array("I", token_ids))
    return turns.folders_of(root, head.model, asked, tokens, head.owner.root)


def branch(root: Path, head: Head, copy: bytes, token_ids: Sequence[int], end: int) -> None:
    """Have another session share the turns of a head's conversation up to a token."""
    source = head.owner.session.hex()
    turns.branch(root, head.model, source, copy.hex(), TurnTokens(array("I", token_ids)), end)
