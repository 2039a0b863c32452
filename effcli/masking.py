"""Secrets taken out of a text before it is shown or kept. Needs nothing."""

from __future__ import annotations

import os
import re

MASK = "***"
SHORTEST = 6
"""Characters below which a value of the environment is a switch such as `1` or `false`, and no secret."""

_NAMES = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)(?:_ID)?$", re.IGNORECASE)
_FORMS = (
    # An address (a Path drops one slash): what may be a password or a query, user and password up to the last @ before
    # the path, and signatures and keys of the query.
    (re.compile(r"(:/{1,2})[^/\s'\"?]*\?[^/\s'\"]*@[^\s'\"]*"), rf"\1{MASK}"),
    (re.compile(r"(:/{1,2})[^/\s'\"]+@"), rf"\1{MASK}@"),
    (re.compile(r"(:/{1,2}[^\s'\"?#]+\?)[^\s'\"#]+"), rf"\1{MASK}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), MASK),  # tokens of the Hugging Face hub have 34 characters behind hf_
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), MASK),  # access keys of AWS
)


def masked(text: str) -> str:
    """Return `text` with stars in place of every secret.

    Secrets are the values of environment variables whose names end in TOKEN, KEY, SECRET, PASSWORD or CREDENTIALS,
    user, password and query of an address, and what has the form of a token.
    """
    values = {value for name, value in os.environ.items() if len(value) >= SHORTEST and _NAMES.search(name)}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    for form, mask in _FORMS:
        text = form.sub(mask, text)
    return text
