"""Files and rows: what outlives a process. docs/kv-store.md draws it on one page.

A *block* is the KV of 256 tokens of one sequence under a name that covers all tokens up to its end,
the model and the tenant; on disk it is a *slot*, one immutable file of that name. A *head* is a
conversation as it stood when a turn ended, one small file. A block stays for as long as a head goes
through it, or until room is needed. Eight invariants, which every function here keeps:

1. A slot is never wrong: it is whole and as it was written, or it is a miss.
2. A head is there from the one rename that publishes it until the one unlink that removes it.
3. What is removed is removed heads first: a slot without a head is garbage that the next start
   removes, and a head without a slot is a miss.
4. Who has the same content writes the same file: nobody asks who wrote it.
5. A deletion has a number. A head whose request came before it, and which is of what was deleted,
   is turned away.
6. Rows follow the files: after a start they say the same, and without the index nothing is lost
   but when and how often a head was used. Only of what is in the cold store the row comes first.
7. What is there and what workers may still write is never more than the cap.
8. A slot leaves for want of room only after all that is behind it, and never under a pinned head.

No tensor library, no policy and no process belongs here: what is to be kept or deleted is decided
above.
"""
