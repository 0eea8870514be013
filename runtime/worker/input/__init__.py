"""From a request to token ids: templates, tokenizers, kept turns, within a budget.

`intake_pool` takes requests in; what could take too long runs in the processes of `sandbox`. Never
computes with the model.
"""
